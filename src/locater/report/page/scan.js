// The page of a scan. Its data is in <script id="data">; everything is drawn as SVG with the functions of draw.js.
// A scan is {name, layers, heads}; a comparison has two. Profiles and drives are computed here from moments.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SCANS = DATA.scans;
const TWO = SCANS.length === 2;
const state = { layer: 0, head: 0, metric: null, side: TWO && DATA.aligned ? "difference" : 0, flag: null, guide: true };

// by name: {label, diverging, least, meaning}; least is the smallest range of the colours, so that noise stays pale
const METRICS = DATA.metrics;
const DERIVED = { // the others are read from a head by their name
  sqrtF: h => h.F === null ? null : Math.sqrt(h.F),
  symmetry: h => h.S === null || !h.F ? null : h.S / h.F,
};
const reader = name => DERIVED[name] || (h => h[name]);

// ---- numbers ----
function erf(x) { // Abramowitz and Stegun 7.1.26, error below 2e-7
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const y = 1 - ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t * Math.exp(-x * x);
  return x < 0 ? -y : y;
}
const Phi = x => 0.5 * (1 + erf(x / Math.SQRT2));
function rho(M, S, F, u) {
  const v = F * (u * u + 1 / 12) + S * u * u;
  return v <= 0 ? (1 + M * u > 0 ? 1 : 0) : Phi((1 + M * u) / Math.sqrt(v));
}
function lambda(M, S, F) { // midpoint rule: enough for a background
  const n = 24;
  let mean = 0, odd = 0;
  for (let i = 0; i < n; i++) {
    const u = (i + 0.5) / n - 0.5, here = rho(M, S, F, u);
    mean += here / n;
    odd += ((here - rho(M, S, F, -u)) / 2) ** 2 / n;
  }
  const noise = mean * (1 - mean);
  return noise < 1e-9 ? 0 : Math.sign(M) * odd / noise;
}
function profile(head) {
  if (head.profile) return head.profile.map((y, i) => [i / (head.profile.length - 1) - 0.5, y]);
  return Array.from({ length: 65 }, (_, i) => [i / 64 - 0.5, rho(head.M, head.S, head.F, i / 64 - 0.5)]);
}
function drive(head, layer) {
  const points = [];
  for (let offset = 0; offset <= DATA.length; offset += Math.max(1, Math.floor(DATA.length / 128))) {
    let sum = head.still;
    layer.frequencies.forEach((f, i) => { sum += head.even[i] * Math.cos(f * offset) + head.odd[i] * Math.sin(f * offset); });
    points.push([offset, sum]);
  }
  return points;
}
const about = name => DATA.flags[name] || { meaning: "a flag of another version of Locater", way_out: "Scan the model again", severity: "note" };
const isFault = (head, name) => head.flags.includes(name) && about(name).severity === "fault" && !(name in head.excused);
const broken = head => head.flags.includes("nonfinite");
const headAt = (scan, layer, head) => scan.index.get(layer * 65536 + head);
SCANS.forEach(scan => { scan.index = new Map(scan.heads.map(h => [h.layer * 65536 + h.head, h])); });

const shown = () => state.side === "difference" ? SCANS : [SCANS[state.side]];
const flagsAt = (layer, head) => [...new Set(shown().flatMap(s => headAt(s, layer, head)?.flags || []))]; // of the scans shown

function value(layer, head) {
  const read = reader(state.metric);
  if (state.side === "difference") {
    const [a, b] = SCANS.map(s => headAt(s, layer, head)).map(h => h ? read(h) : null);
    return a === null || b === null ? null : b - a;
  }
  const entry = headAt(SCANS[state.side], layer, head);
  return entry ? read(entry) : null;
}
const diverging = () => state.side === "difference" || METRICS[state.metric].diverging;

const colour = t => `rgb(${blend(t, diverging()).join(",")})`;
function quantile(values, share) {
  const known = [...values].sort((a, b) => a - b);
  return known.length ? known[Math.min(known.length - 1, Math.floor(known.length * share))] : 0;
}
function range(values) { // the 98th percentile: one extreme head does not hide the others
  const floor = METRICS[state.metric].least * (state.side === "difference" ? 0.5 : 1);
  return Math.max(floor, quantile(values.filter(v => v !== null).map(Math.abs), 0.98));
}

// ---- drawing ----
function heatmap() {
  const scan = shown()[0];
  const layers = scan.layers.length, heads = Math.max(1, ...scan.layers.map(l => l.heads));
  const width = room("heatmap"), left = 40, top = 22, cellW = Math.min(64, (width - left - 4) / heads);
  const least = width < 520 || matchMedia("(pointer: coarse)").matches ? 24 : 16; // a finger needs more than a mouse
  const cellH = Math.max(least, Math.min(34, cellW * 0.9)), bottom = top + layers * cellH, narrow = width < 560;
  const svg = clear("heatmap", width, bottom + (narrow ? 84 : 54));
  if (!scan.heads.length) { make("text", { x: left, y: top + 12 }, svg, "no heads in this scan"); return; }
  hatch(svg);
  const values = scan.heads.map(h => value(h.layer, h.head)), most = range(values);
  const gap = cellW > 8 ? 1 : 0.4, marks = [];
  const mark = (kind, cx, cy, size) => make("circle", { class: kind, cx, cy, r: size * (kind.includes("calm") ? 2.4 : 3.2) }, svg);
  scan.heads.forEach((h, i) => {
    const v = values[i], x = left + h.head * cellW, y = top + h.layer * cellH, flags = flagsAt(h.layer, h.head), bad = flags.includes("nonfinite");
    const dim = state.flag && !flags.includes(state.flag) ? " dim" : "", look = flags.some(name => shown().some(s => headAt(s, h.layer, h.head) && isFault(headAt(s, h.layer, h.head), name)));
    const cell = make("rect", {
      class: "cell" + dim + (bad ? " broken" : ""), x, y, width: cellW - gap, height: cellH - gap, rx: cellW > 14 ? 2 : 0,
      fill: bad ? "url(#hatch-broken)" : v === null ? "url(#hatch-none)" : colour(v / most), "data-layer": h.layer, "data-head": h.head,
    }, svg);
    make("title", {}, cell, `layer ${scan.layers[h.layer].short}, head ${h.head}: ${METRICS[state.metric].label} ${show(v)}${flags.length ? " · " + flags.join(", ") : ""}`);
    if ((look || flags.some(name => name !== "uniform")) && cellW > 7) { // uniform without a fault is a property of the model, named above
      marks.push(["mark" + dim + (look ? "" : " calm"), x + cellW - gap - (cellW > 14 ? 5.5 : 3), y + (cellW > 14 ? 5.5 : 3), cellW > 14 ? 1 : 0.6]);
    }
  });
  for (let l = 0; l < layers; l += Math.ceil(13 / cellH)) make("text", { x: left - 7, y: top + (l + 0.5) * cellH + 4, "text-anchor": "end" }, svg, scan.layers[l].short);
  for (let h = 0; h < heads; h += Math.ceil(20 / cellW)) make("text", { x: left + (h + 0.5) * cellW, y: top - 6, "text-anchor": "middle" }, svg, h);
  make("text", { class: "title", x: left - 7, y: top - 6, "text-anchor": "end" }, svg, "layer");
  if (headAt(scan, state.layer, state.head)) for (const kind of ["halo", "chosen-cell"]) {
    make("rect", { class: kind, x: left + state.head * cellW - 1, y: top + state.layer * cellH - 1, width: cellW + 1, height: cellH + 1, rx: 2 }, svg);
  }
  marks.forEach(m => mark(...m)); // above the frame of the chosen cell
  legend(svg, left, bottom + 16, Math.min(240, width - left - 12), most);
  const x = narrow ? left : width - 250, y = bottom + (narrow ? 68 : 25);
  mark("mark", x + 4, y - 4, 1);
  make("text", { x: x + 11, y }, svg, "has a fault");
  mark("mark calm", x + 106, y - 4, 1);
  make("text", { x: x + 113, y }, svg, "note");
  make("rect", { fill: "url(#hatch-none)", class: "swatch", x: x + 150, y: y - 10, width: 14, height: 11 }, svg);
  make("text", { x: x + 169, y }, svg, "no number");
}
function legend(svg, x, y, width, most) {
  const steps = 60;
  for (let i = 0; i < steps; i++) {
    const t = diverging() ? i / (steps - 1) * 2 - 1 : i / (steps - 1);
    make("rect", { x: x + i * width / steps, y, width: width / steps + 0.5, height: 10, fill: colour(t) }, svg);
  }
  const ends = diverging() ? [[-most, 0], [0, 0.5], [most, 1]] : [[0, 0], [most, 1]];
  ends.forEach(([v, at]) => make("text", { x: x + at * width, y: y + 23, "text-anchor": at === 0 ? "start" : at === 1 ? "end" : "middle" }, svg, v ? Number(v.toPrecision(2)) : 0));
}

function chosen() { return SCANS.map(s => headAt(s, state.layer, state.head)); }
function sides() { // which scans the panels draw, with their colour class
  const all = chosen().map((h, i) => [h, SCANS[i], i ? "second" : ""]);
  return all.filter(([h], i) => h && (state.side === "difference" || !TWO || i === state.side || DATA.aligned));
}

function say(id, lines) {
  element(id).textContent = lines.join(" ");
  element(id).hidden = !lines.length;
}
const whose = scan => TWO ? `${scan.letter}: ` : "";
function plane() {
  const both = sides(), spectra = both.map(([h, , kind]) => [h.eigenvalues || [], kind]);
  const points = spectra.flatMap(([list]) => list);
  say("plane-note", both.filter(([h]) => !h.eigenvalues).map(([h, s]) => whose(s) + (broken(h) ? "no eigenvalues: its weights are not finite."
    : h.M === null ? "no eigenvalues: in cross-attention queries and keys read different streams."
    : "not in this data: scan the model, not its JSON, or add --eigenvalues.")));
  element("plane").style.display = points.length ? "" : "none";
  if (!points.length) { element("plane").replaceChildren(); return; }
  const width = room("plane"), height = Math.round(Math.min(330, Math.max(220, width * 0.6)));
  const reach = Math.max(1e-6, ...points.map(([a, b]) => Math.max(Math.abs(a), Math.abs(b)))) * 1.12;
  const aspect = (width - 58) / (height - 46); // the same scale on both axes
  const { svg, sx, sy, box } = frame("plane", width, height, [-reach * aspect, reach * aspect], [-reach, reach], ["real part", "imaginary part"]);
  make("line", { class: "rule", x1: sx(0), x2: sx(0), y1: box.top, y2: box.bottom }, svg);
  make("line", { class: "rule", x1: box.left, x2: box.right, y1: sy(0), y2: sy(0) }, svg);
  spectra.forEach(([list, kind]) => list.forEach(([a, b]) => make("circle", { class: `dot ${kind}`, cx: sx(a), cy: sy(b), r: 3.4 }, svg)));
  both.forEach(([h, , kind]) => {
    if (h.mean === null) return;
    make("path", { class: `curve ${kind}`, d: `M${sx(h.mean)} ${sy(0) - 8}V${sy(0) + 8}` }, svg);
  });
}
function curves(id, series, names, zero, y, options) {
  const points = series.flatMap(([p]) => p), width = room(id);
  if (!points.length) { make("text", { x: width / 2, y: 24, "text-anchor": "middle" }, clear(id, width, 40), "nothing to draw for this head"); return; }
  const ys = points.map(p => p[1]), low = Math.min(...ys, zero), high = Math.max(...ys, zero), pad = (high - low || 1) * 0.08;
  const { svg, sx, sy, box } = frame(id, width, 200, [points[0][0], points.at(-1)[0]], y || [low - pad, high + pad], names, options);
  make("line", { class: "rule", x1: box.left, x2: box.right, y1: sy(zero), y2: sy(zero) }, svg);
  series.forEach(([p, kind]) => make("path", { class: `curve ${kind}`, d: path(p, sx, sy) }, svg));
}
const turns = layer => layer.frequencies || layer.note.split(", ").includes("rotary");
function missingDrive([h, s]) {
  if (broken(h)) return "no drive: its weights are not finite.";
  return turns(s.layers[h.layer]) ? "its drive is not in this data: scan the model, not its JSON." : "no drive: this layer has no rotary positions.";
}
function panels() {
  const both = sides(), layer = both.length ? both[0][1].layers[state.layer] : null;
  element("which").textContent = layer ? `Layer ${layer.short}, head ${state.head}` : "No head";
  element("where").textContent = layer ? layer.name + (layer.note ? " · " + layer.note : "") : "This scan holds no attention head.";
  element("facts").innerHTML = both.length ? [["self-logit M", h => h.M], ["spread √F", DERIVED.sqrtF], ["symmetry S/F", DERIVED.symmetry],
    ["concentration κ", h => h.concentration], ["localization Λ", h => h.localization], ["stable rank", h => h.stable_rank], ["effective rank", h => h.effective_rank],
    ["key bias", h => h.key_bias], ["entropy", h => h.expected_entropy], ["differences kept", h => h.residual_kept]]
    .map(([name, read]) => `<div><b>${both.map(([h]) => show(read(h))).join(" → ")}</b>${name}</div>`).join("") : "";
  findings(both);
  for (const id of ["plane-card", "profiles"]) element(id).hidden = !both.length;
  if (!both.length) return;
  plane();
  const rotary = both.some(([h, s]) => turns(s.layers[h.layer])), driven = both.filter(([h, s]) => h.even && s.layers[h.layer].frequencies);
  element("drive-card").hidden = !rotary;
  element("profiles").classList.toggle("pair", rotary);
  curves("profile", both.filter(([h]) => h.M !== null).map(([h, , kind]) => [profile(h), kind]), ["position of the key", "ρ"], 0, [0, 1.02], { ends: ["far", "near"] });
  if (!rotary) return;
  say("drive-note", both.filter(side => !driven.includes(side)).map(side => whose(side[1]) + missingDrive(side)));
  curves("drive", driven.map(([h, s, kind]) => [drive(h, s.layers[h.layer]), kind]), ["offset in tokens", "mean logit"], 0, null);
}
function findings(both) {
  const names = [...new Set(both.flatMap(([h]) => h.flags))];
  const lines = names.map(n => {
    const letters = TWO && both.length === 2 ? ` <span>(${both.filter(([h]) => h.flags.includes(n)).map(([, s]) => escape(s.letter)).join(", ")})</span>` : "";
    const fault = both.some(([h]) => isFault(h, n)), excuse = fault ? undefined : both.map(([h]) => h.excused[n]).find(Boolean);
    return `<div class="finding${fault ? "" : " calm"}"><b>${escape(n)}</b>${letters}: ${escape(about(n).meaning)}. <span>${escape(excuse || about(n).way_out)}.</span></div>`;
  });
  if (both.length && !names.length) lines.push(`<p class="none">No flag: nothing about this head's spectrum stands out.</p>`);
  both.filter(([h]) => h.approximation === "mixture").forEach(([h, s]) => lines.push(`<p class="none">${escape(whose(s))}${h.profile
    ? "Its profile comes from the exact mixture, not from the closed form."
    : "Its Λ comes from the exact mixture, but the profile is not in this data: the closed form is drawn instead."}</p>`));
  element("findings").innerHTML = lines.join("");
}

function shade(t) { // colour of the background of the map for Λ = t
  const ramp = RAMPS[dark() ? "dark" : "light"], to = t < 0 ? ramp.low : ramp.high;
  return `rgb(${ramp.middle.map((x, c) => Math.round(x + (to[c] - x) * Math.abs(t) * 0.75)).join(",")})`;
}
let tinted = ["", null];
function tint(box, reach, low, high) { // narrow columns, each a gradient; drawn again only when the axes or the colours change
  const key = [box.left, box.right, box.bottom, reach, low, high, dark()].join();
  if (tinted[0] === key) return tinted[1];
  const group = make("g", { class: "tint" }), columns = Math.round((box.right - box.left) / 3), w = (box.right - box.left) / columns, stops = 32;
  for (let i = 0; i < columns; i++) {
    const M = ((i + 0.5) / columns * 2 - 1) * reach;
    const gradient = make("linearGradient", { id: `tint-${i}`, x1: 0, x2: 0, y1: 0, y2: 1 }, group);
    for (let j = 0; j <= stops; j++) make("stop", { offset: j / stops, "stop-color": shade(lambda(M, 0, Math.max(1e-3, low + (1 - j / stops) * (high - low)) ** 2)) }, gradient);
    make("rect", { x: box.left + i * w, y: box.top, width: w + 0.4, height: box.bottom - box.top, "shape-rendering": "crispEdges", fill: `url(#tint-${i})` }, group);
  }
  tinted = [key, group];
  return group;
}
function phases() {
  const drawn = shown().map(s => [s, SCANS.indexOf(s)]);
  const points = drawn.flatMap(([s, i]) => s.heads.filter(h => h.M !== null).map(h => [h, i]));
  const across = points.map(([h]) => Math.abs(h.M)), up = points.map(([h]) => Math.sqrt(h.F)), most = Math.max(0, ...up), least = Math.min(most, ...up);
  const far = Math.max(0.02, ...across), near = far < 0.5 && most < 0.5; // all heads in one spot of the usual map: go closer
  const reach = (near ? far : Math.max(2.5, far)) * 1.08, pad = Math.max(0.004, (most - least) * 0.08);
  const low = near && least > 0.5 * most ? Math.max(0, least - pad) : 0, high = near ? most + pad : Math.max(1.2, most) * 1.08;
  const missing = drawn.flatMap(([s]) => s.heads).length - points.length;
  const lacking = missing === 1 ? "1 head has no M and is not on the map." : `${missing} heads have no M and are not on the map.`;
  say("phases-note", [...(near && points.length ? ["Zoomed in: all heads lie close to M 0 and √F 0, where attention is near uniform."] : []), ...(missing ? [lacking] : [])]);
  const width = room("phases");
  const { svg, sx, sy, box } = frame("phases", width, 326, [-reach, reach], [low, high], ["M, mean self-logit", "√F, spread of logits"], { below: 26 });
  svg.appendChild(tint(box, reach, low, high));
  const bar = Math.min(150, (box.right - box.left) - 170), at = (box.left + box.right - bar) / 2, y = 310;
  for (let i = 0; i < 50; i++) make("rect", { class: "tint-key", x: at + i * bar / 50, y, width: bar / 50 + 0.5, height: 10, fill: shade(i / 24.5 - 1) }, svg);
  make("text", { x: at - 6, y: y + 9, "text-anchor": "end" }, svg, "far keys, Λ −1");
  make("text", { x: at + bar + 6, y: y + 9 }, svg, "Λ 1, near keys");
  const sharp = DATA.sharp;
  if (sharp < high) {
    make("line", { class: "rule", x1: box.left, x2: box.right, y1: sy(sharp), y2: sy(sharp) }, svg);
    make("text", { x: box.right - 4, y: sy(sharp) - 4, "text-anchor": "end" }, svg, "nearly one-hot above");
  }
  make("line", { class: "rule", x1: sx(0), x2: sx(0), y1: box.top, y2: box.bottom }, svg);
  const isHere = head => head.layer === state.layer && head.head === state.head;
  points.sort(([a], [b]) => isHere(a) - isHere(b)).forEach(([head, i]) => { // the chosen one on top
    const here = isHere(head);
    const dot = make("circle", {
      class: "dot cell" + (i ? " second" : "") + (here ? " chosen" : "") + (state.flag && !head.flags.includes(state.flag) ? " dim" : ""),
      cx: sx(head.M), cy: sy(Math.sqrt(head.F)), r: here ? 5.5 : 3.4, "data-layer": head.layer, "data-head": head.head,
    }, svg);
    make("title", {}, dot, `layer ${SCANS[i].layers[head.layer].short}, head ${head.head}: M ${show(head.M)}, √F ${show(Math.sqrt(head.F))}, Λ ${show(head.localization)}`);
  });
}

function controls() { // controls show what is chosen
  element("explain").textContent = METRICS[state.metric].meaning;
  element("metric").value = state.metric;
  if (TWO) element("side").value = String(state.side);
  element("flags").querySelectorAll("button").forEach(b => b.setAttribute("aria-pressed", String(b.dataset.flag === state.flag)));
}
let drawnAt = 0;
function draw() { drawnAt = innerWidth; controls(); heatmap(); phases(); panels(); }
function change(choice) { Object.assign(state, choice); draw(); remember(); }

// ---- the choice in the address ----
function remember() {
  const choice = new URLSearchParams(), layer = shown()[0].layers[state.layer];
  if (layer) { choice.set("layer", layer.short); choice.set("head", state.head); }
  choice.set("metric", state.metric);
  if (TWO) choice.set("side", state.side === "difference" ? state.side : SCANS[state.side].letter);
  if (!state.guide) choice.set("guide", "closed");
  storeChoice(choice);
}
function recall() { // true when the address names a head
  const choice = choiceInAddress(), letter = SCANS.findIndex(s => s.letter === choice.get("side"));
  if (Object.hasOwn(METRICS, choice.get("metric"))) state.metric = choice.get("metric");
  if (TWO && letter >= 0) state.side = letter;
  if (TWO && DATA.aligned && choice.get("side") === "difference") state.side = "difference";
  state.guide = choice.get("guide") !== "closed";
  const layer = shown()[0].layers.findIndex(l => l.short === choice.get("layer")), head = Number(choice.get("head"));
  if (!choice.has("head") || !shown().some(s => headAt(s, layer, head))) return false;
  Object.assign(state, { layer, head });
  return true;
}
function toFlag(flag) { // to the first head that has it, in the scans shown; to the other scan when only that has one
  const having = scans => scans.flatMap(s => s.heads.filter(h => h.flags.includes(flag))).sort((a, b) => a.layer - b.layer || a.head - b.head)[0];
  let head = having(shown());
  if (!head && TWO) {
    const other = SCANS.findIndex(s => having([s]));
    if (other >= 0) { state.side = other; head = having([SCANS[other]]); }
  }
  if (head) Object.assign(state, { layer: head.layer, head: head.head });
  return Boolean(head);
}
function standout() { // the head with the largest value of the metric
  const size = h => Math.abs(value(h.layer, h.head) ?? 0);
  const best = shown()[0].heads.reduce((a, b) => a && size(a) >= size(b) ? a : b, null);
  Object.assign(state, { layer: best ? best.layer : 0, head: best ? best.head : 0 });
}

function listen() {
  for (const id of ["heatmap", "phases"]) element(id).addEventListener("click", event => {
    const at = event.target.closest("[data-layer]");
    if (at) change({ layer: Number(at.dataset.layer), head: Number(at.dataset.head) });
  });
  element("heatmap").addEventListener("keydown", event => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    const layer = state.layer + move[0], head = state.head + move[1];
    if (shown().some(s => headAt(s, layer, head))) change({ layer, head });
  });
  const metric = element("metric");
  metric.innerHTML = Object.entries(METRICS).map(([k, m]) => `<option value="${k}">${m.label}</option>`).join("");
  metric.addEventListener("change", () => change({ metric: metric.value }));
  const side = element("side");
  side.parentElement.hidden = !TWO;
  if (TWO) {
    const options = SCANS.map((s, i) => `<option value="${i}">${s.letter}: ${escape(s.name)}</option>`);
    if (DATA.aligned) options.push(`<option value="difference">B − A</option>`);
    side.innerHTML = options.join("");
    side.addEventListener("change", () => {
      state.side = side.value === "difference" ? side.value : Number(side.value);
      if (!shown().some(s => headAt(s, state.layer, state.head))) standout(); // the other model may not have this head
      change({});
    });
    element("keys").innerHTML = SCANS.map((s, i) => `<span class="key"><i class="${i ? "second" : ""}"></i>${s.letter}: ${escape(s.name)}</span>`).join("");
  }
  flagButtons();
  element("guide").querySelector("summary").addEventListener("click", () => { state.guide = !element("guide").open; remember(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("hashchange", () => { recall(); draw(); });
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { if (innerWidth !== drawnAt) draw(); }, 120); });
}
function flagButtons() {
  const raised = new Set(SCANS.flatMap(s => s.heads.flatMap(h => h.flags)));
  const known = Object.keys(DATA.flags).filter(name => raised.has(name)); // in the order of the table: the worst first
  [...new Set([...known, ...raised])].forEach(name => {
    const counts = SCANS.map(s => s.heads.filter(h => h.flags.includes(name)).length);
    const button = document.createElement("button");
    button.className = SCANS.some(s => s.heads.some(h => isFault(h, name))) ? "flag" : "flag calm";
    button.type = "button";
    button.dataset.flag = name;
    button.title = about(name).meaning;
    button.textContent = `${name} · ${TWO ? SCANS.map((s, i) => `${s.letter} ${counts[i]}`).join(" · ") : counts[0]}`;
    button.addEventListener("click", () => {
      state.flag = state.flag === name ? null : name;
      if (state.flag) toFlag(name);
      change({});
    });
    element("flags").appendChild(button);
  });
}

function start() { // on the head in the address, else on one with a fault, else on the one that stands out most
  state.metric = DATA.opening;
  const worst = TWO ? "nonfinite" : Object.keys(DATA.flags).find(name => SCANS[0].heads.some(h => isFault(h, name)));
  if (!recall() && !toFlag(worst)) standout();
  element("guide").open = state.guide && innerWidth >= 980;
  listen();
  draw();
}
start();
