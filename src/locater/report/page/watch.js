// The page of a training run: layers over steps, the loss above on the same axis, one layer's heads beside it, warnings.
// Its data is in <script id="data">; a live page asks its server for news every two seconds. DATA.other is a second run.

const DATA = JSON.parse(element("data").textContent);
const blank = () => ({ name: "", steps: [], columns: [], layers: [], offsets: [], heads: 0, values: {}, scalars: {}, curves: {}, warnings: [], comparisons: {}, verdict: null, resumed: [], revision: 0 });
const runs = DATA.other ? [blank(), blank()] : [blank()]; // the second is drawn dashed over the first, on the same axes
let run = runs[0]; // the one that maps, numbers and warnings show
const state = { metric: "", over: "mean", curve: "loss", layer: 0, head: 0, step: null, flag: null, guide: true, all: false }; // step null: the last
const LEFT = 64; // room for labels, the same for all charts, so that their steps are aligned
const charts = {}; // the geometry of each chart, for the pointer: {sx, box, rows, cell}

// name, least end of the scale (so that noise stays pale), end of the scale where it is fixed, what it means
const METRICS = {
  entropy_ratio: ["entropy ratio", 1, 1, "Entropy of attention over the log of the keys in view. 1: all keys alike (rank collapse). Towards 0: one key takes all (entropy collapse)."],
  entropy: ["entropy (nats)", 1, 0, "Entropy of a row of attention, mean over rows. It grows with the number of keys in view; the ratio does not."],
  max_logit: ["largest logit", 5, 0, `Largest logit before the softmax. Beyond ${DATA.exploding} the softmax saturates and half precision is near its limits.`],
  max_probability: ["strongest key", 0.2, 0, "Weight of the strongest key, mean over rows. 1 is one-hot."],
  first_mass: ["weight on the first key", 0.1, 0, "Attention that rests on the first key: above 0.9 the head is idle on this text."],
  sink: ["weight on the first key", 0.1, 0, "Attention that rests on the first key: above 0.9 the head is idle on this text."],
  self_mass: ["weight on itself", 0.1, 0, "Attention that a token pays to itself."],
  row_mass: ["row mass", 1, 1, "Sum of a row's weights. Below 1 a sink takes the rest."],
  participation: ["keys that share the weight", 4, 0, "1 over the sum of squared weights: how many keys share a row."],
  sum_of_squares: ["sum of squared weights", 0.2, 0, "1 is one-hot; its inverse is how many keys share a row."],
  rest_entropy: ["entropy without the first key", 1, 0, "Entropy of a row without the first key, the other weights rescaled to sum to 1: what a sink hides."],
  rest_entropy_ratio: ["entropy ratio without the first key", 1, 1, "The entropy ratio without the first key, the other weights rescaled to sum to 1: what a sink hides."],
  output_stable_rank: ["stable rank of the output", 2, 0, "How many directions the head's output takes: 1 is rank collapse."],
  output_effective_rank: ["effective rank of the output", 2, 0, "How many directions the head's output takes, weak ones included: 1 is rank collapse."],
  M: ["mean self-logit M", 1, 0, "Mean logit of a token with itself, from weights alone. Around 2 and above, the theory lets attention localize."],
  spread: ["logit spread", 0.5, 0, "Standard deviation of logits over keys, from weights alone. Beyond 5 attention is close to one-hot."],
  distance: ["distance (tokens)", 4, 0, "Mean distance between a token and what it attends to."],
};
const about = name => Object.hasOwn(METRICS, name) ? METRICS[name] : [name.replaceAll("_", " "), 1e-6, 0, "A column of this run's log."];
const meaning = group => Object.hasOwn(DATA.flags, group.flag) ? DATA.flags[group.flag] : Object.hasOwn(run.comparisons, group.flag) ? run.comparisons[group.flag] : { meaning: group.message || "a warning of another version of Locater", way_out: "", needs: [] };
const harmless = group => meaning(group).severity === "note";

// ---- data ----
let half = null;
function decode([base, scale, text, size], width) { // base64 of numbers in half or double precision: an array per step, NaN for no number
  half ??= Float32Array.from({ length: 65536 }, (_, h) => {
    const e = h >> 10 & 31, m = h & 1023;
    return (h >> 15 ? -1 : 1) * (e === 31 ? NaN : e ? (1 + m / 1024) * 2 ** (e - 15) : m * 2 ** -24);
  });
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0)), view = new DataView(bytes.buffer), rows = [];
  const read = size === 2 ? at => half[view.getUint16(at, true)] : at => view.getFloat64(at, true);
  for (let at = 0; at < bytes.length; at += size * width) rows.push(Float64Array.from({ length: width }, (_, i) => base + scale * read(at + size * i)));
  return rows;
}
function take(data, run) { // the whole run, or what is new
  const { steps, values, scalars, keep, ...rest } = data;
  Object.assign(run, rest);
  run.offsets = run.layers.map((_, i) => run.layers.slice(0, i).reduce((sum, l) => sum + l.heads, 0));
  run.heads = run.layers.reduce((sum, l) => sum + l.heads, 0);
  run.steps = run.steps.slice(0, keep).concat(steps);
  const none = new Float64Array(run.heads).fill(NaN);
  for (const [stored, fresh, gap, read] of [[run.values, values, none, v => run.heads ? decode(v, run.heads) : steps.map(() => none)], [run.scalars, scalars, null, v => v]]) {
    for (const name of new Set([...Object.keys(stored), ...Object.keys(fresh)])) {
      const before = (Object.hasOwn(stored, name) ? stored[name] : []).slice(0, keep);
      while (before.length < keep) before.push(gap);
      stored[name] = before.concat(Object.hasOwn(fresh, name) ? read(fresh[name]) : steps.map(() => gap));
    }
  }
}
const now = () => state.step ?? run.steps.length - 1;
const number = (metric, step, layer, head, of = run) => numberOf(of, metric, step, layer, head);
const numberOf = (run, metric, step, layer, head) => Object.hasOwn(run.values, metric) && step >= 0 && head < (run.layers[layer]?.heads ?? 0) ? run.values[metric][step][run.offsets[layer] + head] : NaN;
function over(metric, step, layer, how) { // mean, min or max over the heads that have a number
  let sum = 0, count = 0, low = Infinity, high = -Infinity;
  const row = Object.hasOwn(run.values, metric) ? run.values[metric][step] : [], from = run.offsets[layer];
  for (let i = from; i < from + run.layers[layer].heads; i++) {
    const v = row[i];
    if (v === v) { sum += v / run.layers[layer].heads; count++; // divided first: the sum of the largest numbers would overflow
      low = Math.min(low, v); high = Math.max(high, v); }
  }
  return !count ? NaN : how === "mean" ? sum * (run.layers[layer].heads / count) : how === "min" ? low : high;
}
function scale(metric) { // ends of the colours, for both maps and both runs; the 98th percentile: one extreme head does not hide the others
  const known = [];
  for (const { values, heads } of runs) {
    const steps = Object.hasOwn(values, metric) ? values[metric] : [], skip = Math.ceil(steps.length * heads / 20000) || 1;
    for (let i = 0; i < steps.length * heads; i += skip) {
      const v = steps[Math.floor(i / heads)][i % heads];
      if (v === v) known.push(v);
    }
  }
  known.sort((a, b) => a - b);
  const at = share => known.length ? known[Math.floor(known.length * share)] : 0, [, floor, fixed] = about(metric);
  const most = fixed || Math.max(floor, Math.abs(at(0.02)), at(0.98));
  return { most, diverging: at(0.02) < -0.02 * most };
}

// ---- the axis of steps, the same for all charts ----
function edgesOf(s) { // between observed steps, and around the first and the last
  const edges = s.map((x, i) => i ? (s[i - 1] + x) / 2 : x - (s.length > 1 ? (s[1] - x) / 2 : 0.5));
  if (s.length) edges.push(s.at(-1) + (s.length > 1 ? (s.at(-1) - s.at(-2)) / 2 : 0.5));
  return edges;
}
function axis() {
  const points = runs.flatMap(r => Object.values(r.curves)).filter(c => c.length), edges = edgesOf(run.steps);
  const all = [...runs.flatMap(r => { const e = edgesOf(r.steps); return [...e.slice(0, 1), ...e.slice(-1)]; }), ...points.flatMap(c => [c[0][0], c.at(-1)[0]])];
  const low = Math.min(...all), high = Math.max(...all);
  return { edges, domain: all.length ? [low, high > low ? high : low + 1] : [0, 1] };
}
function nearest(step) {
  let best = 0;
  run.steps.forEach((s, i) => { if (Math.abs(s - step) < Math.abs(run.steps[best] - step)) best = i; });
  return best;
}

// ---- drawing ----
function picture(box, values, { most, diverging }, { edges, domain }) { // a pixel high per row; an image, because thousands of rectangles are slow
  const rows = values.length, inks = Array.from({ length: 256 }, (_, i) => blend(diverging ? i / 127.5 - 1 : i / 255, diverging));
  const width = Math.max(1, Math.round((box.right - box.left) * devicePixelRatio)), canvas = document.createElement("canvas");
  Object.assign(canvas, { width, height: rows });
  const pen = canvas.getContext("2d"), image = pen.createImageData(width, rows);
  for (let x = 0, i = 0; x < width; x++) {
    const step = domain[0] + (x + 0.5) / width * (domain[1] - domain[0]);
    if (step < edges[0] || step > edges.at(-1)) continue;
    while (i < run.steps.length - 1 && step > edges[i + 1]) i++;
    for (let r = 0; r < rows; r++) {
      const v = values[r][i], t = v / most;
      if (v !== v) continue;
      const ink = inks[Math.round(255 * Math.min(1, Math.max(0, diverging ? (t + 1) / 2 : t)))], at = 4 * (r * width + x);
      image.data[at] = ink[0]; image.data[at + 1] = ink[1]; image.data[at + 2] = ink[2]; image.data[at + 3] = 255;
    }
  }
  pen.putImageData(image, 0, 0);
  return canvas.toDataURL();
}
function grid(id, names, title, values, range, chosen, marks) { // values[row][step]
  const rows = names.length, width = room(id), time = axis(), { edges, domain } = time;
  const cell = !rows ? 20 : Math.max(width < 520 || matchMedia("(pointer: coarse)").matches ? 20 : 11, Math.min(26, 300 / rows));
  const box = { left: LEFT, right: width - 12, top: 20, bottom: 20 + Math.max(1, rows) * cell };
  const svg = clear(id, width, box.bottom + 74);
  const sx = v => box.left + (v - domain[0]) / (domain[1] - domain[0]) * (box.right - box.left);
  charts[id] = { svg, sx, box, rows, cell, domain };
  make("text", { class: "title", x: box.left - 7, y: box.top - 6, "text-anchor": "end" }, svg, title);
  for (let r = 0; r < rows; r += Math.ceil(13 / cell)) make("text", { x: box.left - 7, y: box.top + (r + 0.5) * cell + 4, "text-anchor": "end" }, svg, names[r]);
  if (!rows) make("text", { x: box.left + 6, y: box.top + 14 }, svg, "no heads");
  else if (run.steps.length) {
    hatch(svg);
    make("rect", { fill: "url(#hatch-none)", x: sx(edges[0]), y: box.top, width: sx(edges.at(-1)) - sx(edges[0]), height: rows * cell }, svg);
    make("image", { class: "map", href: picture(box, values, range, time), x: box.left, y: box.top, width: box.right - box.left, height: rows * cell, preserveAspectRatio: "none" }, svg);
    for (let r = 1; r < rows; r++) make("path", { class: "seam", d: `M${box.left} ${box.top + r * cell}H${box.right}` }, svg);
    if ((box.right - box.left) / run.steps.length > 7) edges.slice(1, -1).forEach(e => make("path", { class: "seam", d: `M${sx(e)} ${box.top}V${box.bottom}` }, svg));
    const at = now(), left = sx(edges[at]), wide = Math.max(6, sx(edges[at + 1]) - left), x = Math.max(box.left, Math.min(box.right - wide, (left + sx(edges[at + 1]) - wide) / 2));
    for (const kind of ["halo", "chosen-cell"]) make("rect", { class: kind, x, y: box.top + chosen * cell, width: wide, height: cell, rx: 2 }, svg);
  } else make("text", { x: box.left + 6, y: box.top + 14 }, svg, "no step observed yet");
  marks.filter(m => m.step >= domain[0] && m.step <= domain[1]).forEach(m => {
    const dot = make("circle", { class: "mark" + (m.calm ? " calm" : "") + (m.dim ? " dim" : ""), cx: sx(m.step), cy: box.top + (m.row + 0.5) * cell, r: cell > 14 ? 3.2 : 2.4 }, svg);
    make("title", {}, dot, m.text);
  });
  const times = ticks(domain[0], domain[1], Math.min(8, Math.max(3, Math.floor(width / 90)))).filter(Number.isInteger), labels = tickWords(times);
  times.forEach((t, i) => make("text", { x: Math.min(box.right - 8, sx(t)), y: box.bottom + 15, "text-anchor": "middle" }, svg, labels[i]));
  make("text", { x: box.right, y: box.bottom + 31, "text-anchor": "end" }, svg, "training step");
  key(svg, box.left, box.bottom + 40, Math.min(220, width - 190), range);
  make("rect", { fill: "url(#hatch-none)", class: "swatch", x: box.right - 76, y: box.bottom + 41, width: 14, height: 11 }, svg);
  make("text", { x: box.right, y: box.bottom + 51, "text-anchor": "end" }, svg, "no number");
}
const DASHED = ["", " second dashed"];
function curve() {
  const every = runs.map(r => Object.hasOwn(r.curves, state.curve) ? r.curves[state.curve] : []), points = every[runs.indexOf(run)];
  const time = axis(), { svg, sx, sy, box } = frame("loss", room("loss"), 132, time.domain, reach(every.flat().map(p => p[1]), 0.06), ["", state.curve.slice(0, 16)], { ends: ["", ""], below: -24, left: LEFT });
  charts.loss = { svg, sx, box, domain: time.domain };
  every.forEach((points, i) => make("path", { class: "curve" + DASHED[i], d: route(points, sx, sy), "stroke-linecap": "round" }, svg));
  if (!points.some(p => known(p[1]))) make("text", { x: (box.left + box.right) / 2, y: 60, "text-anchor": "middle" }, svg, points.length ? `${state.curve} is not a number` : `this log holds no ${state.curve}`);
  points.filter(p => !known(p[1])).slice(0, 200).forEach(p => make("title", {}, make("path", { class: "threshold", d: `M${sx(p[0])} ${box.top}V${box.bottom}` }, svg), `step ${p[0]}: ${state.curve} is not a number`));
  run.resumed.forEach(step => { make("title", {}, make("path", { class: "rule", d: `M${sx(step)} ${box.top}V${box.bottom}` }, svg), `resumed at step ${step}`); });
  const seen = new Set();
  alarms().forEach(({ group, step, dim }) => {
    if (seen.has(step + dim) || seen.size > 400) return;
    seen.add(step + dim);
    const mark = make("path", { class: "alarm" + (harmless(group) ? " calm" : "") + dim, d: `M${sx(step) - 4.5} ${box.bottom + 9}h9l-4.5 -8z` }, svg);
    make("title", {}, mark, `step ${step}: ${group.flag}`);
  });
}
function* steps(group) { for (const step of group.steps) yield { group, step, dim: state.flag && state.flag !== group.flag ? " dim" : "" }; }
const alarms = () => run.warnings.flatMap(group => [...steps(group)]);
function marks(row) { // of the warnings for which `row` gives a row; one per place
  const byPlace = new Map();
  alarms().forEach(({ group, step, dim }) => {
    const at = row(group);
    if (at !== null && byPlace.size < 600) byPlace.set(`${at},${step}`, { row: at, step, calm: harmless(group), dim: Boolean(dim), text: `step ${step}: ${group.flag}, ${place(group)}` });
  });
  return [...byPlace.values()];
}
const place = group => [group.layer === null ? "" : `layer ${run.layers[group.layer].short}`, group.head === null ? "" : `head ${group.head}`].filter(Boolean).join(", ") || "the run";

function overview() {
  const values = run.layers.map((_, l) => run.steps.map((_, s) => over(state.metric, s, l, state.over)));
  grid("heatmap", run.layers.map(l => l.short), "layer", values, scale(state.metric), state.layer, marks(g => g.layer));
}
function layerPanel() {
  const layer = run.layers[state.layer], step = run.steps[now()], kind = layer.kind === "self" ? "" : ` · ${layer.kind}-attention`;
  element("which").textContent = `Layer ${layer.short}, ${layer.heads ? `head ${state.head}` : "no heads"}` + (step === undefined ? "" : `, step ${step}`);
  element("where").textContent = `${runs.length > 1 ? `${labelOf(runs.indexOf(run))} · ` : ""}${layer.name}${kind} · ${plural(layer.heads, "head")} · ${about(state.metric)[0]}`;
  const values = Array.from({ length: layer.heads }, (_, h) => run.steps.map((_, s) => number(state.metric, s, state.layer, h)));
  const own = g => g.layer === state.layer ? g.head : null;
  grid("heads", values.map((_, h) => String(h)), "head", values, scale(state.metric), state.head, marks(own));
  lines(values);
  numbers(layer);
}
function lines(values) {
  const rules = new Map(run.warnings.filter(g => g.threshold !== null && meaning(g).needs.includes(state.metric)).map(g => [g.threshold, g.flag]));
  const every = runs.map(r => r === run ? values : Array.from({ length: r.layers[state.layer]?.heads ?? 0 }, (_, h) => r.steps.map((_, s) => number(state.metric, s, state.layer, h, r))));
  const all = every.flat(2), some = all.some(v => v === v);
  const time = axis(), y = reach([...all, ...(some ? rules.keys() : [])], 0.06);
  const { svg, sx, sy, box } = frame("lines", room("lines"), 210, time.domain, y, ["training step", about(state.metric)[0].slice(0, 28)], { left: LEFT });
  charts.lines = { svg, sx, box, domain: time.domain };
  rules.forEach((flag, v) => {
    make("path", { class: "threshold", d: `M${box.left} ${sy(v)}H${box.right}` }, svg);
    make("text", { x: box.left + 4, y: sy(v) - 4 }, svg, `${flag}: ${numeral(v)}`);
  });
  const drawn = every.flatMap((heads, i) => heads.map((line, h) => [i, h, line])).sort((a, b) => (a[1] === state.head) - (b[1] === state.head)); // the chosen one on top
  drawn.forEach(([i, h, line]) => {
    const path = make("path", { class: "line" + DASHED[i] + (h === state.head ? " chosen" : ""), d: route(runs[i].steps.map((s, at) => [s, line[at]]), sx, sy), "stroke-linecap": "round", "data-head": h }, svg);
    make("title", {}, path, `head ${h}` + (runs.length > 1 ? ` of ${labelOf(i)}` : ""));
  });
  const strong = runs.length > 1 ? `A line per head: ${labelOf(0)} solid, ${labelOf(1)} dashed; head ${state.head} is drawn strong.` : `A line per head; head ${state.head} is drawn strong.`;
  const without = runs.findIndex(r => r !== run && r.layers.length && !r.layers[state.layer]);
  const lacking = without >= 0 ? ` ${labelOf(without)} has no layer ${run.layers[state.layer].short}.` : "";
  element("lines-note").textContent = (some ? strong : "No number of this metric for this layer.") + lacking;
  if (run.steps.length) make("line", { class: "here", x1: sx(run.steps[now()]), x2: sx(run.steps[now()]), y1: box.top, y2: box.bottom }, svg);
}
const labelOf = i => DATA.names[i]; // of two runs
function numbers(layer) {
  const at = now(), step = run.steps[at], other = runs.find(r => r !== run), beside = other ? other.steps.indexOf(step) : -1;
  const facts = Object.keys(run.scalars).map(name => [name.replaceAll("_", " "), run.scalars[name][at] ?? null]).filter(([, v]) => v !== null);
  element("facts").innerHTML = facts.map(([name, v]) => `<div><b>${numeral(v)}</b>${escape(name)}</div>`).join("");
  document.querySelector(".numbers thead").innerHTML = `<tr><th>at step ${step ?? "–"}</th><th>head ${state.head}</th>${other ? `<th>${escape(`head ${state.head} of ${labelOf(runs.indexOf(other))}`)}</th>` : ""}<th>mean</th><th>lowest</th><th>highest</th></tr>`;
  element("numbers").innerHTML = run.columns.map(name => {
    const row = [number(name, at, state.layer, state.head), ...(other ? [number(name, beside, state.layer, state.head, other)] : []), ...["mean", "min", "max"].map(how => at < 0 ? NaN : over(name, at, state.layer, how))];
    return `<tr${name === state.metric ? ' class="chosen"' : ""}><td>${escape(about(name)[0])}</td>${row.map(v => `<td>${numeral(v)}</td>`).join("")}</tr>`;
  }).join("");
}
function list() { // by flag, the order of the table of flags; one row per head
  const order = [...Object.keys(DATA.flags), ...run.warnings.map(g => g.flag)], FEW = 6;
  const kinds = [...new Set(run.warnings.map(g => g.flag))].filter(f => !state.flag || f === state.flag).sort((a, b) => order.indexOf(a) - order.indexOf(b));
  const parts = kinds.map(flag => {
    const groups = run.warnings.filter(g => g.flag === flag), shown = state.all ? groups : groups.slice(0, FEW), { meaning: text, way_out: out } = meaning(groups[0]);
    const rows = shown.map(g => {
      const when = g.count > 1 ? `${g.steps[0]} to ${g.last} <span>(${g.count} times)</span>` : g.steps[0];
      const bound = g.threshold === null ? "" : ` <span>(${numeral(g.threshold)})</span>`;
      return `<tr tabindex="0" data-group="${run.warnings.indexOf(g)}" title="${escape(g.message)}"><td>${when}</td><td>${g.layer === null ? "–" : escape(run.layers[g.layer].short)}</td><td>${g.head ?? "–"}</td><td>${numeral(g.worst)}${bound}</td></tr>`;
    });
    const more = groups.length > shown.length ? `<button type="button" class="more">and ${plural(groups.length - shown.length, "more head")}</button>` : "";
    return `<div class="finding${harmless(groups[0]) ? " calm" : ""}"><b>${escape(flag)}</b>: ${escape(text)}. <span>${out ? escape(out) + "." : ""}</span></div>
      <div class="scroll"><table class="cases"><thead><tr><th>step</th><th>layer</th><th>head</th><th>value (threshold)</th></tr></thead><tbody>${rows.join("")}</tbody></table></div>${more}`;
  });
  element("warnings").innerHTML = parts.join("") || `<p class="none">No warning so far.</p>`;
}
function chips() {
  const counts = new Map();
  run.warnings.forEach(g => counts.set(g.flag, (counts.get(g.flag) || 0) + 1));
  if (!counts.has(state.flag)) state.flag = null;
  element("flags").replaceChildren(...[...counts].map(([flag, count]) => {
    const group = run.warnings.find(g => g.flag === flag), button = document.createElement("button");
    Object.assign(button, { type: "button", className: harmless(group) ? "flag calm" : "flag", title: meaning(group).meaning, textContent: `${flag} · ${plural(count, "head")}` });
    button.dataset.flag = flag;
    button.setAttribute("aria-pressed", String(state.flag === flag));
    return button;
  }));
}
function controls() {
  const options = names => names.map(([value, text]) => `<option value="${escape(value)}">${escape(text)}</option>`).join("");
  const fill = (id, names) => { const html = options(names); if (element(id).innerHTML !== html) element(id).innerHTML = html; };
  fill("metric", run.columns.map(name => [name, about(name)[0]]));
  fill("curve", Object.keys(run.curves).map(name => [name, name.replaceAll("_", " ")]));
  element("curve").parentElement.hidden = Object.keys(run.curves).length < 2;
  for (const id of ["metric", "over", "curve"]) element(id).value = state[id];
  for (const part of [element("run").parentElement, element("keys"), element("two-runs")]) part.hidden = runs.length < 2;
  if (runs.length > 1) {
    fill("run", runs.map((_, i) => [String(i), labelOf(i)]));
    element("run").value = String(runs.indexOf(run));
    element("keys").innerHTML = runs.map((_, i) => `<span class="key"><i class="${DASHED[i]}"></i>${escape(labelOf(i))}</span>`).join("");
  }
  element("explain").textContent = about(state.metric)[3];
}
function words() {
  const observed = `${plural(run.observed, "step")} observed${run.every ? `, one in ${run.every}` : ""}`;
  const drawn = run.stride > 1 ? ` Drawn: one in ${run.stride} of them, the last, and those where a warning began (${run.steps.length} in all).` : "";
  element("counts").textContent = `${runs.length > 1 ? `${labelOf(runs.indexOf(run))}: ` : ""}${plural(run.heads, "head")} in ${plural(run.layers.length, "attention layer")}, ${observed}.${drawn}`
    + (run.resumed.length ? ` Resumed at step ${run.resumed.join(", ")}.` : "");
  element("verdict").hidden = !run.verdict;
  if (run.verdict) {
    element("verdict").className = `verdict ${["failed", "stuck"].includes(run.verdict.state) ? "broken" : ""}`;
    element("verdict").innerHTML = ["Verdict", "Why", "Next"].map((name, i) => `<dt>${name}</dt><dd>${escape(run.verdict.lines[i])}</dd>`).join("");
  }
  if (DATA.live) {
    element("heading").textContent = runs.length > 1 ? `${labelOf(0)} and ${labelOf(1)}` : run.name;
    document.title = `${element("heading").textContent} · Locater`;
  }
}
let drawnAt = 0;
function draw() {
  const ready = run.layers.length > 0;
  element("body").hidden = !ready;
  drawnAt = innerWidth;
  if (!ready) return;
  words(); chips(); controls(); curve(); overview(); layerPanel(); list(); read(null);
}
function change(choice) {
  Object.assign(state, choice);
  state.head = Math.max(0, Math.min(state.head, run.layers[state.layer].heads - 1));
  if (state.step !== null && state.step >= run.steps.length - 1) state.step = null; // on the last step: stay with the last
  draw();
  remember();
}

// ---- pointer and keys ----
function spot(id, event) { // the step and row under the pointer
  const { svg, box, domain, rows, cell } = charts[id], at = svg.getBoundingClientRect(), x = event.clientX - at.left, y = event.clientY - at.top;
  if (!run.steps.length || rows === 0 || x < box.left || x > box.right) return null;
  const step = nearest(domain[0] + (x - box.left) / (box.right - box.left) * (domain[1] - domain[0])), row = rows ? Math.floor((y - box.top) / cell) : null;
  return rows && (row < 0 || row >= rows) ? null : { id, step, row };
}
function read(at) { // the read-out under both maps, and a line through all charts
  document.querySelectorAll("svg .cross").forEach(line => line.remove());
  const step = at ? at.step : now(), layer = at?.id === "heatmap" ? at.row : state.layer, head = at?.id === "heads" ? at.row : state.head;
  if (step < 0) { element("read-heatmap").textContent = element("read-heads").textContent = ""; return; }
  const [mean, low, high] = ["mean", "min", "max"].map(how => numeral(over(state.metric, step, layer, how)));
  element("read-heatmap").innerHTML = `Layer <b>${escape(run.layers[layer].short)}</b>, step <b>${run.steps[step]}</b>: mean <b>${mean}</b>, lowest <b>${low}</b>, highest <b>${high}</b>${lossAt(run.steps[step])}`;
  element("read-heads").innerHTML = !run.layers[state.layer].heads ? "" : `Head <b>${head}</b>, step <b>${run.steps[step]}</b>: <b>${numeral(number(state.metric, step, state.layer, head))}</b>`;
  if (at) Object.values(charts).forEach(({ svg, sx, box }) => make("line", { class: "cross", x1: sx(run.steps[step]), x2: sx(run.steps[step]), y1: box.top, y2: box.bottom }, svg));
}
function lossAt(step) {
  const loss = Object.hasOwn(run.scalars, "loss") ? run.scalars.loss[run.steps.indexOf(step)] ?? null : null;
  const other = runs.find(r => r !== run), beside = other && Object.hasOwn(other.scalars, "loss") ? other.scalars.loss[other.steps.indexOf(step)] ?? null : null;
  const more = beside === null ? "" : ` (${escape(labelOf(runs.indexOf(other)))} <b>${numeral(beside)}</b>)`;
  return loss === null ? "" : `, loss <b>${numeral(loss)}</b>${more}`;
}
function showRun(at) { // the same step and layer of the other run, where it has them
  const step = run.steps[now()];
  if (at === runs.indexOf(run) || !runs[at]?.layers.length) { draw(); return; }
  run = runs[at];
  if (!run.columns.includes(state.metric)) state.metric = run.columns[0] ?? "";
  if (!Object.hasOwn(run.curves, state.curve)) state.curve = "loss";
  change({ layer: Math.min(state.layer, run.layers.length - 1), step: state.step === null ? null : nearest(step) });
  status();
}
function listen() {
  for (const id of ["loss", "heatmap", "heads", "lines"]) {
    element(id).addEventListener("pointermove", event => read(spot(id, event)));
    element(id).addEventListener("pointerleave", () => read(null));
    element(id).addEventListener("click", event => {
      const at = spot(id, event), line = event.target.closest("[data-head]");
      if (line) change({ head: Number(line.dataset.head) });
      else if (at) change(id === "heatmap" ? { step: at.step, layer: at.row } : id === "heads" ? { step: at.step, head: at.row } : { step: at.step });
    });
  }
  for (const [id, row, rows] of [["heatmap", "layer", () => run.layers.length], ["heads", "head", () => run.layers[state.layer].heads]]) {
    element(id).addEventListener("keydown", event => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -now()], End: [0, run.steps.length - 1 - now()] }[event.key];
      if (!move) return;
      event.preventDefault();
      const to = state[row] + move[0], step = now() + move[1];
      if (to >= 0 && to < rows() && step >= 0 && step < run.steps.length) change({ [row]: to, step });
    });
  }
  for (const id of ["metric", "over", "curve"]) element(id).addEventListener("change", () => change({ [id]: element(id).value }));
  element("run").addEventListener("change", () => showRun(Number(element("run").value)));
  element("flags").addEventListener("click", event => {
    const flag = event.target.closest("button")?.dataset.flag;
    if (flag === undefined) return;
    state.flag = state.flag === flag ? null : flag;
    if (state.flag) visit(run.warnings.find(g => g.flag === flag)); else change({});
  });
  const open = event => {
    const row = event.target.closest("[data-group]");
    if (event.target.closest(".more")) change({ all: true });
    else if (row && (event.type === "click" || event.key === "Enter")) visit(run.warnings[Number(row.dataset.group)]);
  };
  for (const type of ["click", "keydown"]) element("warnings").addEventListener(type, open);
  element("guide").querySelector("summary").addEventListener("click", () => { state.guide = !element("guide").open; remember(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("hashchange", () => { recall(); draw(); });
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { if (innerWidth !== drawnAt) draw(); }, 120); });
}
function visit(group) { // to the head and the step of a warning, in the metric that raised it
  const metric = meaning(group).needs.find(name => run.columns.includes(name)) || state.metric;
  change({ metric, layer: group.layer ?? state.layer, head: group.head ?? state.head, step: run.steps.length ? nearest(group.steps[0]) : null });
}

// ---- the choice in the address ----
function remember() {
  const choice = new URLSearchParams({ layer: run.layers[state.layer]?.short ?? 0, head: state.head, metric: state.metric, over: state.over });
  if (state.step !== null) choice.set("step", run.steps[state.step]);
  if (state.curve !== "loss") choice.set("curve", state.curve);
  if (run !== runs[0]) choice.set("run", runs.indexOf(run) + 1);
  if (!state.guide) choice.set("guide", "closed");
  storeChoice(choice);
}
function recall() {
  const chosen = runs[(choiceInAddress().get("run") ?? 1) - 1];
  if (chosen?.layers.length) run = chosen;
  const choice = choiceInAddress(), layer = run.layers.findIndex(l => l.short === choice.get("layer")), head = Number(choice.get("head"));
  const first = run.warnings.find(g => g.layer !== null);
  state.metric = run.columns.includes(choice.get("metric")) ? choice.get("metric") : ["entropy_ratio", ...run.columns].find(name => run.columns.includes(name)) ?? "";
  if (["mean", "min", "max"].includes(choice.get("over"))) state.over = choice.get("over");
  if (Object.hasOwn(run.curves, choice.get("curve"))) state.curve = choice.get("curve");
  state.layer = layer >= 0 ? layer : first ? first.layer : 0;
  state.head = layer >= 0 && Number.isInteger(head) && head >= 0 && head < run.layers[layer].heads ? head : layer < 0 && first ? first.head ?? 0 : 0;
  const step = run.steps.indexOf(Number(choice.get("step")));
  state.step = choice.has("step") && step >= 0 && step < run.steps.length - 1 ? step : null;
}

// ---- live ----
let receivedAt = 0, lost = false;
function status() {
  const ago = Math.max(0, Math.round((run.age || 0) + (Date.now() - receivedAt) / 1000));
  const time = ago < 120 ? `${ago} s` : ago < 7200 ? `${Math.round(ago / 60)} min` : `${Math.round(ago / 3600)} h`;
  const where = `last step ${run.last}`;
  const text = lost ? "the server has stopped; this is its last state" : !run.layers.length ? "waiting for the run to begin"
    : run.ended ? `ended, ${where}` : DATA.live ? `live, ${where}, ${time} ago` : `${where}; the run had not ended when this page was written`;
  element("status").textContent = text;
  element("status").className = lost ? "lost" : DATA.live && run.layers.length && !run.ended ? "live" : "";
}
function receive(data, into = runs[0]) {
  const fresh = !into.layers.length, second = into !== runs[0];
  const empty = data.error || (data.waiting ? `Nothing in ${data.waiting} yet. This page fills as soon as the run writes its first line.`
    : data.steps && !data.layers.length ? "This run observes no attention layer." : "");
  receivedAt = Date.now();
  const note = element(second ? "empty-other" : "empty");
  note.hidden = !empty;
  note.textContent = empty;
  if (data.steps) {
    if (JSON.stringify(data.layers) !== JSON.stringify(into.layers)) Object.assign(into, { steps: [], values: {}, scalars: {} }); // another run
    take(data, into);
    if (fresh && runs[0].layers.length) recall();
    state.step = state.step !== null && state.step < run.steps.length - 1 ? state.step : null;
    state.layer = Math.min(state.layer, Math.max(0, run.layers.length - 1));
    draw();
  } else Object.assign(into, data);
  status();
}
async function poll() {
  try {
    for (const [i, file] of ["run.json", "other.json"].slice(0, runs.length).entries()) {
      const answer = await fetch(`${file}?after=${runs[i].revision || 0}`, { cache: "no-store" });
      lost = !answer.ok;
      if (answer.ok) receive(await answer.json(), runs[i]);
    }
  } catch { lost = true; }
  status();
  setTimeout(poll, 2000);
}

function start() {
  state.guide = choiceInAddress().get("guide") !== "closed";
  element("guide").open = state.guide && innerWidth >= 980;
  listen();
  const { other, ...first } = DATA;
  if (other) receive(other, runs[1]);
  receive(first);
  if (DATA.live) { poll(); setInterval(status, 1000); }
}
start();
