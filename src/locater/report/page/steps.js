// What pages with an axis of training steps share: numbers that may be missing as words, broken lines, the key of the colours.

const known = x => typeof x === "number" && Number.isFinite(x); // null: not known; a word: not a number
const numeral = x => typeof x === "string" ? x : x === null || Number.isNaN(x) ? "–" : x !== 0 && Math.abs(x) < 0.01 ? String(Number(x.toPrecision(2))) : show(x);
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

function key(svg, x, y, width, { most, diverging }) {
  for (let i = 0; i < 60; i++) make("rect", { x: x + i * width / 60, y, width: width / 60 + 0.5, height: 10, fill: `rgb(${blend(diverging ? i / 29.5 - 1 : i / 59, diverging)})` }, svg);
  (diverging ? [[-most, 0], [0, 0.5], [most, 1]] : [[0, 0], [most, 1]]).forEach(([v, at]) =>
    make("text", { x: x + at * width, y: y + 23, "text-anchor": at === 0 ? "start" : at === 1 ? "end" : "middle" }, svg, tickWords([Number(v.toPrecision(2))])[0]));
}
const segments = points => points.reduce((parts, p) => { // broken where there is no number
  if (!known(p[1])) parts.push([]); else parts.at(-1).push(p);
  return parts;
}, [[]]).filter(part => part.length);
const route = (points, sx, sy) => segments(points).map(part => part.length > 1 ? path(part, sx, sy) : `${path(part, sx, sy)}h0.01`).join("");
function reach(values, pad) {
  let low = Infinity, high = -Infinity; // a loop: a call cannot take a hundred thousand arguments
  for (const v of values) if (known(v)) { low = Math.min(low, v); high = Math.max(high, v); }
  const more = (high - low || Math.abs(high) || 1) * pad, inside = v => Math.max(-Number.MAX_VALUE, Math.min(Number.MAX_VALUE, v));
  return high >= low ? [inside(low - more), inside(high + more)] : [0, 1];
}
