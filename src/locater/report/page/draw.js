"use strict";
// What all pages use to draw: numbers as text, SVG elements, axes, colours, the choice in the address. No library.

const SVG = "http://www.w3.org/2000/svg";
const show = x => x === null || x === undefined ? "–" : Math.abs(x) >= 100 ? x.toPrecision(3) : (Math.round(x * 100) / 100 + 0).toFixed(2);
const escape = text => text.replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));
const element = id => document.getElementById(id);

// ---- colour: two ramps that stay apart for colour-blind readers; the middle is the page's own ----
const RAMPS = {
  light: { low: [178, 88, 24], middle: [244, 242, 236], high: [10, 100, 110], from: [241, 240, 234], to: [38, 52, 120] },
  dark: { low: [240, 150, 80], middle: [35, 39, 47], high: [80, 200, 205], from: [35, 39, 47], to: [165, 190, 255] },
};
const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
function blend(t, diverging) { // diverging: -1 ... 1, sequential: 0 ... 1; red, green, blue
  const ramp = RAMPS[dark() ? "dark" : "light"];
  const [a, b, s] = !diverging ? [ramp.from, ramp.to, t] : t < 0 ? [ramp.middle, ramp.low, -t] : [ramp.middle, ramp.high, t];
  const k = Math.min(1, Math.max(0, s)) ** 0.8;
  return a.map((x, i) => Math.round(x + (b[i] - x) * k));
}

// ---- drawing ----
function make(name, attributes, parent, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, v] of Object.entries(attributes)) node.setAttribute(key, v);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}
const room = id => Math.max(260, Math.round(element(id).getBoundingClientRect().width)); // charts are drawn at their real width, so that text keeps its size
function clear(id, width, height) {
  const svg = element(id);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return svg;
}
function ticks(low, high, count) {
  const rough = high / count - low / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(s => s >= rough);
  const values = [];
  const end = Math.min(Number.MAX_VALUE, high + step * 1e-6);
  for (let i = Math.ceil(low / step - 1e-9); i * step <= end && values.length < 64; i++) if (Number.isFinite(i * step)) values.push(i * step + 0);
  return values;
}
function tickWords(values) { // labels of ticks, with as many digits as tell neighbours apart
  const most = Math.max(0, ...values.map(Math.abs)), gap = values.length > 1 ? Math.abs(values[1] - values[0]) : most || 1;
  const text = most >= 1e6 || most < 1e-3 ? (t, d) => t ? t.toExponential(d).replace(/\.?0+e/, "e").replace("e+", "e") : "0" : (t, d) => String(Number(t.toFixed(d)));
  for (let digits = 0; digits < 17; digits++) {
    const labels = values.map(t => text(t, digits));
    if (values.every((t, i) => Math.abs(Number(labels[i]) - t) <= gap / 100)) return labels;
  }
  return values.map(String);
}
function tickSteps(values) { // for narrow axes: the value of the first tick, and labels relative to it
  const labels = tickWords(values);
  const more = tickWords(values.map(t => t - values[0])).map(s => `+${s}`), longest = texts => Math.max(...texts.map(s => s.length));
  return values.length < 2 || longest(labels) <= 7 || longest(more) >= longest(labels) ? ["", labels] : [labels[0], more];
}
const label = t => Math.abs(t) >= 1e6 ? t.toPrecision(2) : String(Math.round(t * 1000) / 1000);
function frame(id, width, height, x, y, names, { ends, below = 0, at, word, left = 46 } = {}) { // ends: words in place of numbers under the x axis; at: places of its grid
  const svg = clear(id, width, height);
  const box = { left, right: width - 12, top: 10, bottom: height - 36 - below };
  const sx = v => box.left + (v - x[0]) / (x[1] - x[0]) * (box.right - box.left);
  const sy = v => box.bottom - (v / 2 - y[0] / 2) / (y[1] / 2 - y[0] / 2) * (box.bottom - box.top); // halves, because the sum of the largest numbers would overflow
  const across = at || ticks(x[0], x[1], Math.min(6, Math.max(4, Math.floor(width / 80)))), labels = word ? across.map(word) : tickWords(across);
  across.forEach((t, i) => {
    make("line", { class: "grid", x1: sx(t), x2: sx(t), y1: box.top, y2: box.bottom }, svg);
    if (!ends) make("text", { x: sx(t), y: box.bottom + 14, "text-anchor": "middle" }, svg, labels[i]);
  });
  if (ends) ends.forEach((word, i) => make("text", { x: i ? box.right : box.left, y: box.bottom + 14, "text-anchor": i ? "end" : "start" }, svg, word));
  const up = ticks(y[0], y[1], 5), [base, beside] = tickSteps(up);
  up.forEach((t, i) => {
    make("line", { class: "grid", x1: box.left, x2: box.right, y1: sy(t), y2: sy(t) }, svg);
    make("text", { x: box.left - 6, y: sy(t) + 4, "text-anchor": "end" }, svg, beside[i]);
  });
  if (base) make("text", { x: box.left + 4, y: box.top + 9 }, svg, `from ${base}`);
  make("text", { x: (box.left + box.right) / 2, y: height - 5 - below, "text-anchor": "middle" }, svg, names[0]);
  if (names[1]) make("text", { x: 11, y: (box.top + box.bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 11 ${(box.top + box.bottom) / 2})` }, svg, names[1]);
  return { svg, sx, sy, box };
}
const path = (points, sx, sy) => points.map(([a, b], i) => `${i ? "L" : "M"}${sx(a).toFixed(1)} ${sy(b).toFixed(1)}`).join("");

function hatch(svg) { // two patterns: no number here, and weights that are not finite
  const defs = make("defs", {}, svg);
  for (const id of ["none", "broken"]) {
    const pattern = make("pattern", { id: `hatch-${id}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, defs);
    make("rect", { class: "hatch-ground", width: 6, height: 6 }, pattern);
    make("path", { class: `hatch ${id}`, d: "M0 0V6" }, pattern);
  }
}

// ---- the reader's choice: in the address, so that a reload and a copied link show the same ----
const choiceInAddress = () => new URLSearchParams(location.hash.slice(1));
function storeChoice(choice) {
  try { history.replaceState(null, "", `#${choice}`); } catch { /* a frame without an address has no place for it */ }
}
