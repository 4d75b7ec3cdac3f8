"use strict";
// One page, no library: data in <script id="data">, everything drawn as SVG.
// A scan is {name, layers, heads}; a comparison holds two. Profiles and drives are computed here from moments.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SCANS = DATA.scans;
const TWO = SCANS.length === 2;
const SVG = "http://www.w3.org/2000/svg";
const state = { layer: 0, head: 0, metric: "localization", side: TWO && DATA.aligned ? "difference" : 0, flag: null };

// name, palette, least range of the colours (so that noise stays pale), how to read it from a head, what it means
const METRICS = {
  localization: ["Λ localization by position", "diverging", 0.1, h => h.localization,
    "Share of what decides whether a token's signal gets through that its position explains. 0: position does not matter. Towards 1: near tokens win. Negative: far tokens win."],
  M: ["M mean self-logit", "diverging", 1, h => h.M,
    "Mean logit of a token with itself. Around 2 and above, the theory lets attention localize; below -1 a token looks away from its like."],
  sqrtF: ["√F spread of logits", "sequential", 0.5, h => h.F === null ? null : Math.sqrt(h.F),
    "How far logits spread over keys. Near 0 attention is uniform (rank collapse); above √(2 log T) it locks onto single tokens (entropy collapse)."],
  concentration: ["κ concentration of the spectrum", "diverging", 0.1, h => h.concentration,
    "1 or -1: all eigenvalues are equal. 0: they spread around zero, or the map only rotates."],
  symmetry: ["S/F symmetry", "diverging", 0.2, h => h.S === null || !h.F ? null : h.S / h.F,
    "1: the query-key map is symmetric, who looks is looked at. -1: antisymmetric, one-way. Trained maps sit near 0."],
  expected_entropy: ["expected entropy (nats)", "sequential", Math.log(DATA.length), h => h.expected_entropy,
    "Entropy of a row of attention if logits were normal over keys. 0 is one-hot."],
  key_bias: ["key bias", "sequential", 0.2, h => h.key_bias,
    "Spread of the part of a logit that depends on the key alone: every query is drawn to the same keys."],
  stable_rank: ["stable rank", "sequential", 4, h => h.stable_rank,
    "How many directions carry the map: 1 is a single one, the head size is all of them."],
  spectral_norm: ["spectral norm of W", "sequential", 1, h => h.spectral_norm, "Largest stretch of the query-key map, before the logit scale."],
  skew: ["skew g₁", "diverging", 0.75, h => h.skew, "Beyond 0.75 a few directions dominate and the exact mixture replaces the closed form."],
};

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
const show = x => x === null || x === undefined ? "–" : Math.abs(x) >= 100 ? x.toPrecision(3) : (Math.round(x * 100) / 100 + 0).toFixed(2);
const escape = text => text.replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));
const headAt = (scan, layer, head) => scan.index.get(layer * 65536 + head);
SCANS.forEach(scan => { scan.index = new Map(scan.heads.map(h => [h.layer * 65536 + h.head, h])); });

function value(layer, head) {
  const read = METRICS[state.metric][3];
  if (state.side === "difference") {
    const [a, b] = SCANS.map(s => headAt(s, layer, head)).map(h => h ? read(h) : null);
    return a === null || b === null ? null : b - a;
  }
  const found = headAt(SCANS[state.side], layer, head);
  return found ? read(found) : null;
}
const diverging = () => state.side === "difference" || METRICS[state.metric][1] === "diverging";

// ---- colour: two ramps that stay apart for colour-blind readers; the middle is the page's own ----
const RAMPS = {
  light: { low: [178, 88, 24], middle: [244, 242, 236], high: [10, 100, 110], from: [241, 240, 234], to: [38, 52, 120] },
  dark: { low: [240, 150, 80], middle: [35, 39, 47], high: [80, 200, 205], from: [35, 39, 47], to: [165, 190, 255] },
};
const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
function colour(t) { // diverging: -1 ... 1, sequential: 0 ... 1
  const ramp = RAMPS[dark() ? "dark" : "light"];
  const [a, b, s] = !diverging() ? [ramp.from, ramp.to, t] : t < 0 ? [ramp.middle, ramp.low, -t] : [ramp.middle, ramp.high, t];
  const k = Math.min(1, Math.max(0, s)) ** 0.8;
  return `rgb(${a.map((x, i) => Math.round(x + (b[i] - x) * k)).join(",")})`;
}
function range(values) { // the 98th percentile, so that one head does not hide the others
  const known = values.filter(v => v !== null).map(Math.abs).sort((a, b) => a - b);
  const floor = METRICS[state.metric][2] * (state.side === "difference" ? 0.5 : 1);
  return known.length ? Math.max(floor, known[Math.min(known.length - 1, Math.floor(known.length * 0.98))]) : floor;
}

// ---- drawing ----
function make(name, attributes, parent, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, v] of Object.entries(attributes)) node.setAttribute(key, v);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}
function clear(id, width, height) {
  const svg = document.getElementById(id);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return svg;
}
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
  const found = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-6; t += step) found.push(Math.abs(t) < step * 1e-6 ? 0 : t);
  return found;
}
const label = t => Math.abs(t) >= 1000 ? t.toPrecision(2) : String(Math.round(t * 1000) / 1000);
function frame(id, width, height, x, y, names) {
  const svg = clear(id, width, height);
  const box = { left: 46, right: width - 12, top: 10, bottom: height - 36 };
  const sx = v => box.left + (v - x[0]) / (x[1] - x[0]) * (box.right - box.left);
  const sy = v => box.bottom - (v - y[0]) / (y[1] - y[0]) * (box.bottom - box.top);
  ticks(x[0], x[1], 5).forEach(t => {
    make("line", { class: "grid", x1: sx(t), x2: sx(t), y1: box.top, y2: box.bottom }, svg);
    make("text", { x: sx(t), y: box.bottom + 14, "text-anchor": "middle" }, svg, label(t));
  });
  ticks(y[0], y[1], 4).forEach(t => {
    make("line", { class: "grid", x1: box.left, x2: box.right, y1: sy(t), y2: sy(t) }, svg);
    make("text", { x: box.left - 6, y: sy(t) + 4, "text-anchor": "end" }, svg, label(t));
  });
  make("text", { x: (box.left + box.right) / 2, y: height - 5, "text-anchor": "middle" }, svg, names[0]);
  if (names[1]) make("text", { x: 11, y: (box.top + box.bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 11 ${(box.top + box.bottom) / 2})` }, svg, names[1]);
  return { svg, sx, sy, box };
}
const path = (points, sx, sy) => points.map(([a, b], i) => `${i ? "L" : "M"}${sx(a).toFixed(1)} ${sy(b).toFixed(1)}`).join("");

function heatmap() {
  const scan = SCANS[state.side === "difference" ? 0 : state.side];
  const layers = scan.layers.length, heads = Math.max(...scan.layers.map(l => l.heads));
  const width = 640, left = 40, top = 22, cellW = Math.min(64, (width - left - 4) / heads), cellH = Math.max(9, Math.min(34, cellW * 0.9));
  const bottom = top + layers * cellH, height = bottom + 54;
  const svg = clear("heatmap", width, height);
  const values = scan.heads.map(h => value(h.layer, h.head)), most = range(values);
  const gap = cellW > 8 ? 1 : 0.4;
  scan.heads.forEach((h, i) => {
    const v = values[i], x = left + h.head * cellW, y = top + h.layer * cellH;
    const flagged = TWO && state.side === "difference" ? SCANS.some(s => headAt(s, h.layer, h.head)?.flags.length) : h.flags.length;
    const cell = make("rect", {
      class: "cell" + (state.flag && !h.flags.includes(state.flag) ? " dim" : ""), x, y, width: cellW - gap, height: cellH - gap,
      rx: cellW > 14 ? 2 : 0, fill: v === null ? "var(--line)" : colour(v / most), "data-layer": h.layer, "data-head": h.head,
    }, svg);
    make("title", {}, cell, `layer ${scan.layers[h.layer].short}, head ${h.head}: ${METRICS[state.metric][0]} ${show(v)}${h.flags.length ? " · " + h.flags.join(", ") : ""}`);
    if (flagged && cellW > 7) make("circle", { class: "mark", cx: x + cellW - gap - 3.5, cy: y + 3.5, r: cellW > 14 ? 2 : 1.3, opacity: 0.75 }, svg);
  });
  const every = n => Math.max(1, Math.ceil(n / 16));
  for (let l = 0; l < layers; l += every(layers * 14 / (layers * cellH / 16) / 16)) {
    make("text", { x: left - 7, y: top + (l + 0.5) * cellH + 4, "text-anchor": "end" }, svg, scan.layers[l].short);
  }
  for (let h = 0; h < heads; h += every(heads)) make("text", { x: left + (h + 0.5) * cellW, y: top - 6, "text-anchor": "middle" }, svg, h);
  make("text", { class: "title", x: left - 7, y: top - 6, "text-anchor": "end" }, svg, "layer");
  if (headAt(scan, state.layer, state.head)) {
    make("rect", { class: "chosen-cell", x: left + state.head * cellW - 1, y: top + state.layer * cellH - 1, width: cellW + 1, height: cellH + 1, rx: 2 }, svg);
  }
  legend(svg, left, bottom + 16, 240, most);
  make("text", { x: width - 4, y: bottom + 26, "text-anchor": "end" }, svg, "heads across · a dot marks a flag");
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

function plane() {
  const spectra = sides().map(([h, , kind]) => [h.eigenvalues || [], kind]);
  const points = spectra.flatMap(([list]) => list);
  const reach = Math.max(1e-6, ...points.map(([a, b]) => Math.max(Math.abs(a), Math.abs(b)))) * 1.12;
  const { svg, sx, sy, box } = frame("plane", 560, 330, [-reach * 1.77, reach * 1.77], [-reach, reach], ["real part", "imaginary part"]);
  make("line", { class: "rule", x1: sx(0), x2: sx(0), y1: box.top, y2: box.bottom }, svg);
  make("line", { class: "rule", x1: box.left, x2: box.right, y1: sy(0), y2: sy(0) }, svg);
  spectra.forEach(([list, kind]) => list.forEach(([a, b]) => make("circle", { class: `dot ${kind}`, cx: sx(a), cy: sy(b), r: 3.2 }, svg)));
  sides().forEach(([h, , kind]) => {
    if (h.mean === null) return;
    make("path", { class: `curve ${kind}`, d: `M${sx(h.mean)} ${sy(0) - 8}V${sy(0) + 8}` }, svg);
  });
  if (!points.length) make("text", { x: 300, y: 150, "text-anchor": "middle" }, svg, "no eigenvalues: cross-attention or NaN");
}
function curves(id, series, names, zero, y, width) {
  const points = series.flatMap(([p]) => p);
  if (!points.length) { make("text", { x: width / 2, y: 80, "text-anchor": "middle" }, clear(id, width, 170), "no meaning for this head"); return; }
  const ys = points.map(p => p[1]), low = Math.min(...ys, zero), high = Math.max(...ys, zero), pad = (high - low || 1) * 0.08;
  const { svg, sx, sy, box } = frame(id, width, 190, [points[0][0], points.at(-1)[0]], y || [low - pad, high + pad], names);
  make("line", { class: "rule", x1: box.left, x2: box.right, y1: sy(zero), y2: sy(zero) }, svg);
  series.forEach(([p, kind]) => make("path", { class: `curve ${kind}`, d: path(p, sx, sy) }, svg));
}
function panels() {
  const both = sides(), first = both[0]?.[0];
  const layer = SCANS[0].layers[state.layer] || SCANS[1]?.layers[state.layer];
  document.getElementById("which").textContent = `Layer ${layer ? layer.short : state.layer}, head ${state.head}`;
  document.getElementById("where").textContent = layer ? layer.name + (layer.note ? " · " + layer.note : "") : "";
  const facts = document.getElementById("facts");
  facts.innerHTML = [["M", "self-logit M", h => h.M], ["F", "spread √F", h => h.F === null ? null : Math.sqrt(h.F)], ["S", "symmetry S/F", METRICS.symmetry[3]],
    ["k", "concentration κ", h => h.concentration], ["L", "localization Λ", h => h.localization], ["r", "stable rank", h => h.stable_rank],
    ["b", "key bias", h => h.key_bias], ["H", "entropy", h => h.expected_entropy]]
    .map(([, name, read]) => `<div><b>${both.map(([h]) => show(read(h))).join(" → ") || "–"}</b>${name}</div>`).join("");
  plane();
  const rotary = both.filter(([h, s]) => h.even && s.layers[state.layer].frequencies);
  const width = rotary.length ? 270 : 560;
  document.getElementById("drive-card").hidden = !rotary.length;
  document.getElementById("profiles").classList.toggle("pair", rotary.length > 0);
  curves("profile", both.filter(([h]) => h.M !== null).map(([h, , kind]) => [profile(h), kind]), ["position of the key, far to near", "ρ"], 0, [0, 1.02], width);
  if (rotary.length) curves("drive", rotary.map(([h, s, kind]) => [drive(h, s.layers[state.layer]), kind]), ["offset in tokens", "mean logit"], 0, null, width);
  const names = [...new Set(both.flatMap(([h]) => h.flags))];
  document.getElementById("findings").innerHTML = names.length
    ? names.map(n => `<div class="finding"><b>${n}</b>${TWO && both.length === 2 ? ` <span>(${both.filter(([h]) => h.flags.includes(n)).map(([, s]) => escape(s.letter)).join(", ")})</span>` : ""}: ${escape(DATA.flags[n].meaning)}. <span>${escape(DATA.flags[n].way_out)}.</span></div>`).join("")
    : `<p class="none">No flag: nothing about this head's spectrum stands out.</p>`;
  if (first && first.approximation === "mixture") document.getElementById("findings").insertAdjacentHTML("beforeend", `<p class="none">Its profile comes from the exact mixture, not from the closed form.</p>`);
}

function phases() {
  const drawn = SCANS.map((s, i) => [s, i]).filter(([, i]) => state.side === "difference" || i === state.side);
  const points = drawn.flatMap(([s, i]) => s.heads.filter(h => h.M !== null).map(h => [h, i]));
  const reach = Math.max(2.5, ...points.map(([h]) => Math.abs(h.M))) * 1.08;
  const high = Math.max(1.2, ...points.map(([h]) => Math.sqrt(h.F))) * 1.08;
  const { svg, sx, sy, box } = frame("phases", 640, 300, [-reach, reach], [0, high], ["M, mean self-logit", "√F, spread of logits"]);
  const nx = 90, ny = 44, w = (box.right - box.left) / nx, h = (box.bottom - box.top) / ny, ramp = RAMPS[dark() ? "dark" : "light"];
  for (let i = 0; i < nx; i++) for (let j = 0; j < ny; j++) {
    const M = -reach + (i + 0.5) / nx * 2 * reach, f = (1 - (j + 0.5) / ny) * high, t = lambda(M, 0, f * f);
    const to = t < 0 ? ramp.low : ramp.high, k = Math.abs(t) * 0.75;
    make("rect", { x: box.left + i * w, y: box.top + j * h, width: w + 0.4, height: h + 0.4, "shape-rendering": "crispEdges", fill: `rgb(${ramp.middle.map((x, c) => Math.round(x + (to[c] - x) * k)).join(",")})` }, svg);
  }
  const sharp = Math.sqrt(2 * Math.log(DATA.length));
  if (sharp < high) {
    make("line", { class: "rule", x1: box.left, x2: box.right, y1: sy(sharp), y2: sy(sharp) }, svg);
    make("text", { x: box.right - 4, y: sy(sharp) - 4, "text-anchor": "end" }, svg, "entropy collapses above");
  }
  make("line", { class: "rule", x1: sx(0), x2: sx(0), y1: box.top, y2: box.bottom }, svg);
  points.forEach(([head, i]) => {
    const here = head.layer === state.layer && head.head === state.head;
    const dot = make("circle", {
      class: "dot cell" + (i ? " second" : "") + (here ? " chosen" : "") + (state.flag && !head.flags.includes(state.flag) ? " dim" : ""),
      cx: sx(head.M), cy: sy(Math.sqrt(head.F)), r: here ? 5.5 : 3.4, "data-layer": head.layer, "data-head": head.head,
    }, svg);
    make("title", {}, dot, `layer ${SCANS[i].layers[head.layer].short}, head ${head.head}: M ${show(head.M)}, √F ${show(Math.sqrt(head.F))}, Λ ${show(head.localization)}`);
  });
}

function draw() { heatmap(); phases(); panels(); explain(); }
function explain() { document.getElementById("explain").textContent = METRICS[state.metric][4]; }
function choose(layer, head) { state.layer = layer; state.head = head; draw(); }

function listen() {
  for (const id of ["heatmap", "phases"]) document.getElementById(id).addEventListener("click", event => {
    const at = event.target.closest("[data-layer]");
    if (at) choose(Number(at.dataset.layer), Number(at.dataset.head));
  });
  document.getElementById("heatmap").addEventListener("keydown", event => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    const layer = state.layer + move[0], head = state.head + move[1];
    if (SCANS.some(s => headAt(s, layer, head))) choose(layer, head);
  });
  const metric = document.getElementById("metric");
  metric.innerHTML = Object.entries(METRICS).map(([k, m]) => `<option value="${k}">${m[0]}</option>`).join("");
  metric.value = state.metric;
  metric.addEventListener("change", () => { state.metric = metric.value; draw(); });
  const side = document.getElementById("side");
  side.parentElement.hidden = !TWO;
  if (TWO) {
    const options = SCANS.map((s, i) => `<option value="${i}">${s.letter}: ${escape(s.name)}</option>`);
    if (DATA.aligned) options.push(`<option value="difference">B − A</option>`);
    side.innerHTML = options.join("");
    side.value = String(state.side);
    side.addEventListener("change", () => { state.side = side.value === "difference" ? side.value : Number(side.value); draw(); });
    document.getElementById("keys").innerHTML = SCANS.map((s, i) => `<span class="key"><i class="${i ? "second" : ""}"></i>${s.letter}: ${escape(s.name)}</span>`).join("");
  }
  const counts = {};
  SCANS.forEach(s => s.heads.forEach(h => h.flags.forEach(f => { counts[f] = (counts[f] || 0) + 1; })));
  const bar = document.getElementById("flags");
  Object.entries(counts).forEach(([name, n]) => {
    const button = document.createElement("button");
    button.className = "flag";
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.title = DATA.flags[name].meaning;
    button.textContent = `${name} · ${n}`;
    button.addEventListener("click", () => {
      state.flag = state.flag === name ? null : name;
      bar.querySelectorAll("button").forEach(b => b.setAttribute("aria-pressed", String(b === button && state.flag === name)));
      draw();
    });
    bar.appendChild(button);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

function start() { // open on the head that stands out most
  const size = h => Math.abs(value(h.layer, h.head) ?? 0);
  const best = SCANS[0].heads.reduce((a, b) => size(b) > size(a) ? b : a);
  state.layer = best.layer;
  state.head = best.head;
  listen();
  draw();
}
start();
