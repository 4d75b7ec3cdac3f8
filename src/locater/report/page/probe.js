// The page of a probe: predicted against measured, heads by layers, one head in numbers, the stream between blocks.
// Its data is in <script id="data">: columns of numbers in the order of the heads. One head is chosen; every chart shows it.

const DATA = JSON.parse(element("data").textContent);
const HEADS = DATA.heads.map(([layer, head, kv, rows, flags, excused, role], at) => ({ at, layer, head, kv, rows, excused, role, flags: flags.map(i => DATA.flags[i]) }));
const INDEX = new Map(HEADS.map(h => [h.layer * 65536 + h.head, h]));
const COLUMNS = new Map(DATA.columns.map(c => [c.name, c]));
const state = { at: 0, metric: "entropy", pair: 0, prior: true, flag: null, guide: true };

// a line of the table: its name, then columns measured, predicted, from weights alone
const LINES = [
  ["entropy (nats)", "entropy", "predicted_entropy", "prior_entropy"], ["entropy without the first token", "rest_entropy", "predicted_rest_entropy", null],
  ["differences kept", "typical_kept", "predicted_typical_kept", "prior_typical_kept"],
  ["weight on the first token", "sink", "predicted_sink", null], ["largest logit", "max_logit", null, "logit_bound"],
  ["localization Λ", null, "predicted_localization", "prior_localization"], ["mean self-logit M", null, "predicted_M", null], ["variance of logits F", null, "predicted_F", null],
  ...["entropy_ratio", "max_probability", "participation", "distance", "self_mass", "row_mass", "output_stable_rank", "output_effective_rank", "previous",
    "duplicate", "induction", "skip_induction", "pair_induction"].map(name => [COLUMNS.get(name).label, name, null, null]),
];
// a chart of the stream: title, what it means, [number of the measure, its name] for each line, the range it has at least
const STREAM = [
  ["Difference between tokens", "Share of the tokens that is left without their mean. 0: all tokens are the same, rank collapse.", [[1, ""]], [0, 1]],
  ["Kept by attention", "Share of the differences that the heads of the block pass on, root mean square over heads. The skip connection passes on all.", [[7, "measured"], [8, "predicted"]], [0, 1]],
  ["Likeness of tokens", "Mean cosine between two tokens. 1: all point the same way.", [[2, "as they are"], [3, "without their mean"]], [0, 1]],
  ["Stable rank", "How many directions carry most of the stream. 1 is a single one.", [[4, ""]], [1, 2]],
  ["Effective rank", "How many directions it uses, weak ones counted too.", [[5, ""]], [1, 2]],
  ["Largest entry", "Largest entry over the median one. From about 1,000 on: massive activations.", [[6, ""]], [0, 10]],
];

// ---- numbers ----
const value = (column, h) => column && h ? DATA.values[column][h.at] : null;
function numeral(x) {
  if (x === null || x === 0) return show(x);
  const size = Math.abs(x);
  return size < 0.01 ? String(Number(x.toPrecision(2))) : size >= 1000 && size < 1e7 ? Math.round(x).toLocaleString("en") : show(x);
}
const chosen = () => HEADS[state.at];
const isFault = (h, flag) => flag.severity === "fault" && !(flag.name in h.excused);
const faulty = h => h.flags.some(flag => isFault(h, flag));
const has = (h, name) => h.flags.some(f => f.name === name);
const dimmed = h => state.flag && !has(h, state.flag) ? " dim" : "";
const title = h => `Layer ${DATA.layers[h.layer].short}, head ${h.head}`;
function median(values) {
  const known = values.filter(v => v !== null).sort((a, b) => a - b), half = known.length >> 1;
  return !known.length ? null : known.length % 2 ? known[half] : (known[half - 1] + known[half]) / 2;
}
const LAYERS = { light: [[222, 125, 40], [176, 52, 112], [44, 34, 110]], dark: [[255, 200, 110], [232, 104, 160], [150, 140, 255]] };
function ink(layer) { // early layers to late ones, apart for colour-blind readers by lightness
  const ramp = LAYERS[dark() ? "dark" : "light"], t = DATA.layers.length > 1 ? layer / (DATA.layers.length - 1) * 2 : 2, i = Math.min(1, Math.floor(t));
  return `rgb(${ramp[i].map((x, c) => Math.round(x + (ramp[i + 1][c] - x) * (t - i))).join(",")})`;
}
function scale(metric) { // columns of one meaning share it; the 98th percentile: one extreme head does not hide the others
  const like = DATA.columns.filter(c => c.scale === metric.scale && (c.scale !== "share" || c === metric));
  const known = like.flatMap(c => DATA.values[c.name]).filter(v => v !== null).sort((a, b) => a - b);
  const at = share => known.length ? known[Math.min(known.length - 1, Math.floor(known.length * share))] : 0;
  const most = Math.max(metric.least, Math.abs(at(0.02)), at(0.98));
  return { most, diverging: at(0.02) < -0.02 * most };
}

// ---- predicted against measured ----
function scatter() {
  const pair = DATA.pairs[state.pair], prior = state.prior ? pair.prior : null, width = room("scatter"), h = chosen();
  const points = HEADS.map(h => [h, value(pair.measured, h), value(pair.predicted, h), value(prior, h)]).filter(p => p[1] !== null && (p[2] !== null || p[3] !== null));
  if (!points.length) { make("text", { x: width / 2, y: 24, "text-anchor": "middle" }, clear("scatter", width, 40), "no head has both numbers"); return; }
  const all = points.flatMap(p => p.slice(1)).filter(v => v !== null), most = Math.max(...all, 0.01) * 1.05;
  const names = [`measured ${COLUMNS.get(pair.measured).label}`, "predicted"], height = Math.round(Math.min(430, Math.max(300, width * 0.68)));
  const { svg, sx, sy, box } = frame("scatter", width, height + 26, [0, most], [0, most], names, { below: 26 });
  make("path", { class: "rule", d: `M${sx(0)} ${sy(0)}L${sx(most)} ${sy(most)}` }, svg);
  points.forEach(([h, m, , w]) => { if (w !== null) make("circle", { class: "ring" + dimmed(h), cx: sx(m), cy: sy(w), r: 3.2, "data-at": h.at }, svg); });
  points.forEach(([h, m, p]) => { if (p !== null) make("circle", { class: "point" + dimmed(h), cx: sx(m), cy: sy(p), r: 4, fill: ink(h.layer), "data-at": h.at }, svg); });
  const here = points.find(p => p[0] === h);
  if (here) {
    const [, m, p, w] = here;
    if (p !== null && w !== null) make("path", { class: "tie", d: `M${sx(m)} ${sy(p)}V${sy(w)}` }, svg);
    if (p !== null) make("circle", { class: "now", cx: sx(m), cy: sy(p), r: 6.5 }, svg);
  }
  make("text", { class: "corner", x: box.left + 8, y: box.top + 14 }, svg, pair.above);
  make("text", { class: "corner", x: box.right - 8, y: box.bottom - 8, "text-anchor": "end" }, svg, pair.below);
  layerKey(svg, box, height + 12);
}
function layerKey(svg, box, y) {
  const n = DATA.layers.length, wide = Math.min(150, box.right - box.left - 150), at = (box.left + box.right - wide) / 2;
  DATA.layers.forEach((_, i) => make("rect", { x: at + i * wide / n, y, width: wide / n + 0.4, height: 9, fill: ink(i) }, svg));
  make("text", { x: at - 6, y: y + 8, "text-anchor": "end" }, svg, `layer ${DATA.layers[0].short}`);
  make("text", { x: at + wide + 6, y: y + 8 }, svg, `layer ${DATA.layers.at(-1).short}`);
}

// ---- heads by layers ----
function heatmap() {
  const layers = DATA.layers, heads = Math.max(1, ...layers.map(l => l.heads)), metric = COLUMNS.get(state.metric), h = chosen();
  const width = room("heatmap"), left = 40, top = 22, cellW = Math.min(64, (width - left - 4) / heads);
  const least = width < 520 || matchMedia("(pointer: coarse)").matches ? 24 : 16; // a finger needs more than a mouse
  const cellH = Math.max(least, Math.min(34, cellW * 0.9)), bottom = top + layers.length * cellH, narrow = width < 560;
  const svg = clear("heatmap", width, bottom + (narrow ? 80 : 46)), range = scale(metric), gap = cellW > 8 ? 1 : 0.4;
  hatch(svg);
  HEADS.forEach(h => {
    const v = value(state.metric, h), bad = has(h, "nonfinite");
    make("rect", {
      class: "cell" + dimmed(h) + (bad ? " broken" : ""), x: left + h.head * cellW, y: top + h.layer * cellH, width: cellW - gap, height: cellH - gap, rx: cellW > 14 ? 2 : 0,
      fill: v !== null ? `rgb(${blend(v / range.most, range.diverging)})` : bad ? "url(#hatch-broken)" : "url(#hatch-none)", "data-at": h.at,
    }, svg);
  });
  for (let l = 0; l < layers.length; l += Math.ceil(13 / cellH)) make("text", { x: left - 7, y: top + (l + 0.5) * cellH + 4, "text-anchor": "end" }, svg, layers[l].short);
  for (let i = 0; i < heads; i += Math.ceil(20 / cellW)) make("text", { x: left + (i + 0.5) * cellW, y: top - 6, "text-anchor": "middle" }, svg, i);
  make("text", { class: "title", x: left - 7, y: top - 6, "text-anchor": "end" }, svg, "layer");
  for (const kind of ["halo", "chosen-cell"]) make("rect", { class: kind, x: left + h.head * cellW - 1, y: top + h.layer * cellH - 1, width: cellW + 1, height: cellH + 1, rx: 2 }, svg);
  const size = cellW > 14 ? 1 : 0.6, mark = (calm, dim, cx, cy, size) => make("circle", { class: "mark" + (calm ? " calm" : "") + dim, cx, cy, r: size * (calm ? 2.4 : 3.2) }, svg);
  if (cellW > 7) HEADS.filter(h => h.flags.length).forEach(h => mark(!faulty(h), dimmed(h), left + (h.head + 1) * cellW - gap - 5.5 * size, top + h.layer * cellH + 5.5 * size, size));
  heatmapKey(svg, range, left, bottom + 14, width, narrow, mark);
}
function heatmapKey(svg, { most, diverging }, x, y, width, narrow, mark) {
  const wide = Math.min(240, width - x - 12), steps = 60;
  for (let i = 0; i < steps; i++) make("rect", { x: x + i * wide / steps, y, width: wide / steps + 0.5, height: 10, fill: `rgb(${blend(diverging ? i / (steps - 1) * 2 - 1 : i / (steps - 1), diverging)})` }, svg);
  (diverging ? [[-most, 0], [0, 0.5], [most, 1]] : [[0, 0], [most, 1]]).forEach(([v, at]) =>
    make("text", { x: x + at * wide, y: y + 23, "text-anchor": at === 0 ? "start" : at === 1 ? "end" : "middle" }, svg, v ? label(Number(v.toPrecision(2))) : 0));
  const at = narrow ? x : width - 250, line = y + (narrow ? 50 : 9);
  mark(false, "", at + 4, line - 4, 1);
  make("text", { x: at + 11, y: line }, svg, "has a fault");
  mark(true, "", at + 106, line - 4, 1);
  make("text", { x: at + 113, y: line }, svg, "note");
  make("rect", { fill: "url(#hatch-none)", class: "swatch", x: at + 150, y: line - 10, width: 14, height: 11 }, svg);
  make("text", { x: at + 169, y: line }, svg, "no number");
}

// ---- entropy by layer ----
const every = (count, most) => Array.from({ length: count }, (_, i) => i).filter(i => i % Math.ceil(count / most) === 0); // places of labels that fit
function byLayer() {
  const n = DATA.layers.length, width = room("layers"), known = HEADS.filter(h => value("entropy", h) !== null), h = chosen();
  if (!known.length) { make("text", { x: width / 2, y: 24, "text-anchor": "middle" }, clear("layers", width, 40), "no head has an entropy"); return; }
  const most = Math.max(0.5, ...known.flatMap(h => [value("entropy", h), value("predicted_entropy", h) ?? 0])) * 1.06;
  const { svg, sx, sy } = frame("layers", width, 250, [-0.6, n - 0.4], [0, most], ["layer", "entropy (nats)"], { at: every(n, Math.floor(width / 34)), word: i => DATA.layers[i].short });
  const place = h => h.layer + (DATA.layers[h.layer].heads > 1 ? (h.head / (DATA.layers[h.layer].heads - 1) - 0.5) * 0.55 : 0);
  known.forEach(h => make("circle", { class: "point" + dimmed(h), cx: sx(place(h)), cy: sy(value("entropy", h)), r: n * 10 > width ? 2.4 : 3.4, fill: ink(h.layer), "data-at": h.at }, svg));
  for (const [column, kind] of [["predicted_entropy", "curve expected"], ["entropy", "curve"]]) {
    const points = DATA.layers.map((_, l) => [l, median(HEADS.filter(h => h.layer === l).map(h => value(column, h)))]).filter(p => p[1] !== null);
    if (points.length) make("path", { class: kind, d: path(points, sx, sy) + (points.length > 1 ? "" : "h0.01"), "stroke-linecap": "round", "pointer-events": "none" }, svg);
  }
  if (value("entropy", h) !== null) make("circle", { class: "now", cx: sx(place(h)), cy: sy(value("entropy", h)), r: 6 }, svg);
}

// ---- one head ----
function cell(column, h, before = "") {
  if (!column) return "<td></td>";
  const { kind, meaning } = COLUMNS.get(column), v = value(column, h);
  return `<td data-metric="${column}"${column === state.metric ? ' class="chosen"' : ""} title="${escape(`${kind}: ${meaning}`)}">${v === null ? "" : before}${numeral(v)}</td>`;
}
function panel() {
  const h = chosen(), layer = DATA.layers[h.layer], shared = layer.kv_heads !== layer.heads ? ` · reads key head ${h.kv}` : "";
  element("which").textContent = title(h);
  element("where").textContent = `${h.role ? `${h.role} head · ` : ""}${layer.name} · ${layer.note}${shared} · ${h.rows.toLocaleString("en")} rows of attention`;
  element("numbers").innerHTML = LINES.filter(l => l.slice(1).some(c => c && DATA.values[c].some(v => v !== null)))
    .map(([name, m, p, w]) => `<tr><td>${escape(name)}</td>${cell(m, h)}${cell(p, h)}${cell(w, h, w === "logit_bound" ? "≤ " : "")}</tr>`).join("");
  element("findings").innerHTML = h.flags.map(f => `<div class="finding${isFault(h, f) ? "" : " calm"}"><b>${escape(f.name)}</b>: ${h.excused[f.name] ? escape(h.excused[f.name]) : `${escape(f.meaning)}. <span>${escape(f.way_out)}</span>`}.</div>`).join("")
    || `<p class="none">No flag: nothing about this head stands out.</p>`;
  input(layer);
}
function input(layer) {
  const g = layer.input, percent = x => `${(100 * x).toFixed(x < 0.1 ? 1 : 0)} %`;
  if (!g) { element("input").innerHTML = `<h3>What layer ${escape(layer.short)} reads</h3><p class="none">No statistics of its input.</p>`; return; }
  const most = Math.max(g.mean_share || 0, ...g.directions), bar = (name, x) => `<span>${name}</span><i style="width:${(100 * x / most).toFixed(1)}%"></i><span>${percent(x)}</span>`;
  const bars = [...(g.mean_share === null ? [] : [bar("their mean", g.mean_share)]), ...g.directions.map((x, i) => bar(`direction ${i + 1}`, x))];
  element("input").innerHTML = `<h3>What layer ${escape(layer.short)} reads</h3>
    <p class="note">Share of the energy of its input tokens in their mean and in their strongest directions; spread evenly, each of ${layer.width} directions would hold ${percent(1 / layer.width)}.</p>
    <div class="bars">${bars.join("")}</div>
    <table><thead><tr><th>how normal they are</th><th>here</th><th>normal tokens</th></tr></thead><tbody>
    <tr><td>excess kurtosis, median over channels</td><td>${numeral(g.kurtosis)}</td><td>0</td></tr>
    <tr><td>distance to a normal distribution</td><td>${numeral(g.normality)}</td><td>${numeral(g.normality_expected)}</td></tr></tbody></table>
    <p class="note after">From ${g.tokens.toLocaleString("en")} tokens. Predictions assume normal tokens: the closer to normal, the better they can be.</p>`;
}

// ---- the stream between blocks ----
function streamCards() {
  const keyed = lines => lines.length < 2 ? "" : `<div>${lines.map(([, name], i) => `<span class="key"><i class="${i ? "second" : ""}"></i>${name}</span>`).join("")}</div>`;
  element("streams").innerHTML = DATA.streams.map((s, i) => `<section class="card"><h2>The stream between blocks${DATA.streams.length > 1 || s.stack ? ` · ${escape(s.stack)}` : ""}</h2>
    <p class="note">The tokens before the first block (in) and after each, mean over sequences. The dotted line: the block of the chosen head.</p><div class="charts">${
    STREAM.map(([name, meaning, lines], j) => `<div><h3>${name}</h3><p>${meaning}</p><svg id="stream-${i}-${j}" role="img" aria-label="${name} by block"></svg>${keyed(lines)}</div>`).join("")}</div></section>`).join("");
}
function streams() {
  const block = DATA.layers[chosen().layer].block;
  DATA.streams.forEach((stream, i) => STREAM.forEach(([, , lines, least], j) => {
    const id = `stream-${i}-${j}`, width = room(id), values = stream.points.flatMap(p => lines.map(([k]) => p[k])).filter(v => v !== null);
    const low = Math.min(least[0], ...values), high = Math.max(least[1], ...values), pad = (high - low) * 0.05, blocks = stream.points.map(p => p[0]);
    const { svg, sx, sy, box } = frame(id, width, 150, [blocks[0] - 0.3, blocks.at(-1) + 0.3], [low < least[0] ? low - pad : low, high + pad], ["block", ""],
      { at: every(blocks.length, Math.floor(width / 30)).map(k => blocks[k]), word: b => b < 0 ? "in" : String(b) });
    lines.forEach(([k], n) => {
      const points = stream.points.map(p => [p[0], p[k]]).filter(p => p[1] !== null), kind = n ? " second" : "";
      if (points.length) make("path", { class: `curve${kind}`, d: path(points, sx, sy) }, svg);
      if (points.length <= 40) points.forEach(([b, v]) => make("circle", { class: `curve-dot${kind}`, cx: sx(b), cy: sy(v), r: 2.6 }, svg));
    });
    if (block && block[0] === stream.stack) make("path", { class: "here", d: `M${sx(block[1])} ${box.top}V${box.bottom}` }, svg);
  }));
}

// ---- pointer and choice ----
function read(h) {
  const pair = DATA.pairs[state.pair], part = (name, v) => v === null ? "" : ` · ${name} ${numeral(v)}`, metric = COLUMNS.get(state.metric);
  const against = (m, p, w) => `<b>${escape(title(h))}</b>${part("measured", value(m, h))}${part("predicted", value(p, h))}${part("weights alone", value(w, h))}`;
  element("read-scatter").innerHTML = against(pair.measured, pair.predicted, pair.prior);
  element("read-layers").innerHTML = against("entropy", "predicted_entropy", null);
  element("read-heatmap").innerHTML = `<b>${escape(title(h))}</b> · ${escape(metric.label)} ${numeral(value(state.metric, h))}${h.flags.length ? ` · ${escape(h.flags.map(f => f.name).join(", "))}` : ""}`;
}
function point(at) { // the same head in all charts
  document.querySelectorAll("svg .hover").forEach(e => e.classList.remove("hover"));
  if (at !== null) document.querySelectorAll(`svg [data-at="${at}"]`).forEach(e => e.classList.add("hover"));
  read(at === null ? chosen() : HEADS[at]);
}
function controls() {
  const pair = DATA.pairs[state.pair], { kind, meaning } = COLUMNS.get(state.metric);
  element("metric").value = state.metric;
  element("pair").value = String(state.pair);
  element("prior").checked = state.prior;
  element("prior-label").hidden = !pair.prior;
  element("agreement").textContent = (pair.agreement ? `Predicted: ${pair.agreement}.` : "") + (pair.prior_agreement ? ` Weights alone: ${pair.prior_agreement}.` : "");
  element("explain").innerHTML = `<span class="kind ${kind}">${kind}</span>${escape(meaning)}`;
  element("flags").querySelectorAll("button").forEach(b => b.setAttribute("aria-pressed", String(b.dataset.flag === state.flag)));
}
let drawnAt = 0;
function draw() {
  drawnAt = innerWidth;
  controls();
  if (!HEADS.length) return;
  scatter(); heatmap(); byLayer(); panel(); streams(); read(chosen());
}
function change(choice) { Object.assign(state, choice); draw(); remember(); }

// ---- the choice in the address ----
function remember() {
  const h = chosen(), choice = new URLSearchParams(h ? { layer: DATA.layers[h.layer].short, head: h.head } : {});
  choice.set("metric", state.metric);
  choice.set("pair", DATA.pairs[state.pair].measured);
  if (!state.prior) choice.set("prior", "off");
  if (!state.guide) choice.set("guide", "closed");
  storeChoice(choice);
}
function recall() { // true when the address names a head
  const choice = choiceInAddress(), pair = DATA.pairs.findIndex(p => p.measured === choice.get("pair"));
  if (COLUMNS.has(choice.get("metric"))) state.metric = choice.get("metric");
  if (pair >= 0) state.pair = pair;
  state.prior = choice.get("prior") !== "off";
  state.guide = choice.get("guide") !== "closed";
  const layer = DATA.layers.findIndex(l => l.short === choice.get("layer")), head = choice.has("head") && INDEX.get(layer * 65536 + Number(choice.get("head")));
  if (head) state.at = head.at;
  return Boolean(head);
}
function standout() { // a head that is broken, else one with a flag that matters, else the one the prediction misses most
  const miss = h => { const a = value("entropy", h), b = value("predicted_entropy", h); return a === null || b === null ? -1 : Math.abs(a - b); };
  const best = HEADS.find(h => has(h, "nonfinite")) || HEADS.find(faulty) || HEADS.reduce((a, b) => a && miss(a) >= miss(b) ? a : b, null);
  state.at = best ? best.at : 0;
}
function listen() {
  for (const id of ["scatter", "heatmap", "layers"]) {
    const svg = element(id), at = event => event.target.closest("[data-at]")?.dataset.at ?? null;
    svg.addEventListener("click", event => { if (at(event) !== null) change({ at: Number(at(event)) }); });
    svg.addEventListener("pointerover", event => point(at(event)));
    svg.addEventListener("pointerleave", () => point(null));
    svg.addEventListener("keydown", event => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key], h = chosen();
      if (!move || !h) return;
      event.preventDefault();
      const next = INDEX.get((h.layer + move[0]) * 65536 + h.head + move[1]);
      if (next && h.head + move[1] >= 0) change({ at: next.at });
    });
  }
  element("numbers").addEventListener("click", event => { const at = event.target.closest("[data-metric]"); if (at) change({ metric: at.dataset.metric }); });
  element("metric").addEventListener("change", event => change({ metric: event.target.value }));
  element("pair").addEventListener("change", event => change({ pair: Number(event.target.value) }));
  element("prior").addEventListener("change", event => change({ prior: event.target.checked }));
  element("guide").querySelector("summary").addEventListener("click", () => { state.guide = !element("guide").open; remember(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("hashchange", () => { recall(); draw(); });
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { if (innerWidth !== drawnAt) draw(); }, 120); });
}
function fill() { // the parts that never change: options, flags, notes
  const names = { exact: "Measured", sampled: "Measured", predicted: "Predicted from statistics of the input", prior: "From weights alone", bound: "From weights alone" };
  const option = c => `<option value="${c.name}">${escape(c.label)}${DATA.values[c.name].some(v => v !== null) ? "" : " (no number here)"}</option>`;
  element("metric").innerHTML = [...new Set(Object.values(names))].map(group => `<optgroup label="${group}">${DATA.columns.filter(c => names[c.kind] === group).map(option).join("")}</optgroup>`).join("");
  element("pair").innerHTML = DATA.pairs.map((p, i) => `<option value="${i}">${escape(COLUMNS.get(p.measured).label)}</option>`).join("");
  element("notes").innerHTML = DATA.notes.map(note => `<li>${escape(note)}</li>`).join("");
  DATA.flags.filter(f => HEADS.some(h => h.flags.includes(f))).forEach(f => {
    const button = document.createElement("button");
    Object.assign(button, { className: HEADS.some(h => h.flags.includes(f) && isFault(h, f)) ? "flag" : "flag calm", type: "button", title: f.meaning, textContent: `${f.name} · ${HEADS.filter(h => h.flags.includes(f)).length}` });
    button.dataset.flag = f.name;
    button.addEventListener("click", () => {
      const flag = state.flag === f.name ? null : f.name;
      change(flag ? { flag, at: HEADS.find(h => h.flags.includes(f)).at } : { flag });
    });
    element("flags").appendChild(button);
  });
  streamCards();
}

function start() {
  if (!recall()) standout();
  fill();
  if (DATA.layers.length < 8) element("map-card").after(element("layers-card")); // a short map leaves room below it
  element("guide").open = state.guide && innerWidth >= 980;
  listen();
  draw();
}
start();
