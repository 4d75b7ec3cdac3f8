// The page of checkpoints: its charts. Steps have one axis for all of them, to scale or evenly spaced.

const LEFT = 46; // room for labels, the same for all charts over steps
const charts = {}; // the geometry of each chart, for the pointer
const count = n => n.toLocaleString("en");

// ---- the axis of steps ----
const place = step => state.axis === "even" ? slots.indexOf(step) : step;
function domain() {
  const first = place(slots[0]), last = place(slots.at(-1)), pad = state.axis === "even" ? 0.5 : (last - first) / Math.max(1, slots.length - 1) / 2 || 0.5;
  return [first - pad, last + pad];
}
function cells(run) { // from and to of each step on the axis; between steps that are apart because one is missing, nothing
  const at = run.steps.map(place), [low, high] = domain();
  if (state.axis === "even") return at.map(x => [x - 0.5, x + 0.5]);
  const half = (i, other) => { // from step i towards its neighbour, or towards what is missing before it
    const lost = run.breaks.get(Math.min(i, other)), next = lost ? lost[other > i ? 0 : 1] : at[other];
    return (next - at[i]) / 2;
  };
  return at.map((x, i) => [i ? x + half(i, i - 1) : Math.max(low, x - (i + 1 < at.length ? half(i, i + 1) : high)), i + 1 < at.length ? x + half(i, i + 1) : Math.min(high, x - (i ? half(i, i - 1) : low))]);
}
function stepTicks(width) { // [place, label]
  const most = Math.min(8, Math.max(2, Math.floor(width / 100))), run = RUNS[state.a];
  if (state.axis === "even") {
    const by = Math.ceil(slots.length / most);
    return slots.filter((_, i) => i % by === 0).map(s => [place(s), run.numbered ? label(s) : (run.sources[s] ?? "").slice(-14)]);
  }
  const times = ticks(slots[0], Math.max(slots[0] + 1, slots.at(-1)), most).filter(Number.isInteger), labels = tickWords(times);
  return times.map((t, i) => [t, labels[i]]);
}

// ---- pictures: one pixel per cell, because thousands of rectangles are slow ----
function picture(width, height, { most, diverging }, value) {
  const inks = Array.from({ length: 256 }, (_, i) => blend(diverging ? i / 127.5 - 1 : i / 255, diverging)), canvas = document.createElement("canvas");
  Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d"), image = pen.createImageData(width, height);
  for (let y = 0, at = 0; y < height; y++) for (let x = 0; x < width; x++, at += 4) {
    const v = value(x, y), t = v / most;
    if (v !== v) continue;
    const ink = inks[Math.round(255 * Math.min(1, Math.max(0, diverging ? (t + 1) / 2 : t)))];
    image.data[at] = ink[0]; image.data[at + 1] = ink[1]; image.data[at + 2] = ink[2]; image.data[at + 3] = 255;
  }
  pen.putImageData(image, 0, 0);
  return canvas.toDataURL();
}
function legend(svg, box, range, marks) { // colours, and what marks mean
  const narrow = box.right - box.left < 440;
  key(svg, box.left, box.bottom + 8, Math.min(220, box.right - box.left - (narrow ? 0 : 250)), range);
  const x = narrow ? box.left : box.right - 236, y = box.bottom + (narrow ? 50 : 18);
  if (marks) {
    make("circle", { class: "mark", cx: x + 4, cy: y - 4, r: 3.2 }, svg);
    make("text", { x: x + 11, y }, svg, "has a fault");
    make("circle", { class: "mark calm", cx: x + 106, cy: y - 4, r: 2.6 }, svg);
    make("text", { x: x + 113, y }, svg, "note");
  }
  make("rect", { fill: "url(#hatch-none)", class: "swatch", x: x + 150, y: y - 10, width: 14, height: 11 }, svg);
  make("text", { x: x + 169, y }, svg, "no number");
}

// ---- the map of heads at the chosen step ----
function map(id, run) {
  const width = room(id), left = 40, top = 22, at = indexOf(run), range = scale(state.metric), rows = run.layers.length;
  const cellW = Math.min(64, (width - left - 4) / run.widest), least = width < 520 || matchMedia("(pointer: coarse)").matches ? 20 : rows > 40 ? 10 : 14;
  const cellH = Math.max(least, Math.min(34, cellW * 0.9)), box = { left, top, right: width - 4, bottom: top + rows * cellH };
  const svg = clear(id, width, box.bottom + (width < 490 ? 58 : 38));
  charts[id] = { run, left, top, cellW, cellH };
  hatch(svg);
  run.layers.forEach((l, y) => make("rect", { fill: "url(#hatch-none)", x: left, y: top + y * cellH, width: l.heads * cellW, height: cellH }, svg));
  const image = picture(run.widest, rows, range, (h, l) => number(run, state.metric, at, l, h));
  make("image", { class: "map", href: image, x: left, y: top, width: run.widest * cellW, height: rows * cellH, preserveAspectRatio: "none" }, svg);
  const seams = (n, size) => Array.from({ length: n - 1 }, (_, i) => (i + 1) * size);
  make("path", { class: "seam", d: seams(rows, cellH).map(y => `M${left} ${top + y}h${run.widest * cellW}`).join("") }, svg);
  if (cellW > 5) make("path", { class: "seam", d: seams(run.widest, cellW).map(x => `M${left + x} ${top}V${box.bottom}`).join("") }, svg);
  for (let l = 0; l < rows; l += Math.ceil(13 / cellH)) make("text", { x: left - 7, y: top + (l + 0.5) * cellH + 4, "text-anchor": "end" }, svg, run.layers[l].short);
  for (let h = 0; h < run.widest; h += Math.ceil(20 / cellW)) make("text", { x: left + (h + 0.5) * cellW, y: top - 6, "text-anchor": "middle" }, svg, h);
  make("text", { class: "title", x: left - 7, y: top - 6, "text-anchor": "end" }, svg, "layer");
  const dots = at >= 0 && cellW > 7;
  if (at >= 0 && state.layer < rows && state.head < run.layers[state.layer].heads) for (const kind of ["halo", "chosen-cell"]) {
    make("rect", { class: kind, x: left + state.head * cellW - 1, y: top + state.layer * cellH - 1, width: cellW + 1, height: cellH + 1, rx: 2 }, svg);
  }
  run.layers.forEach((l, y) => { for (let h = 0; h < l.heads; h++) {
    const flags = flagsOf(run, at, y, h), look = flags.some(([, fault]) => fault), x = left + h * cellW, off = state.flag && !flags.some(([name]) => name === state.flag);
    if (flags.some(([name]) => name === "nonfinite")) make("rect", { class: "cell broken", fill: "url(#hatch-broken)", x, y: top + y * cellH, width: cellW - 1, height: cellH - 1 }, svg);
    if (off) make("rect", { x, y: top + y * cellH, width: cellW, height: cellH, fill: "var(--card)", "fill-opacity": 0.75 }, svg);
    else if ((look || flags.some(([name]) => name !== "uniform")) && dots) make("circle", { class: "mark" + (look ? "" : " calm"), cx: x + cellW - (cellW > 14 ? 6.5 : 3.5), cy: top + y * cellH + (cellW > 14 ? 6 : 3.5), r: (look ? 3.2 : 2.4) * (cellW > 14 ? 1 : 0.6) }, svg);
  } });
  if (at < 0) make("text", { class: "title", x: left + run.widest * cellW / 2, y: (top + box.bottom) / 2 + 4, "text-anchor": "middle", "paint-order": "stroke", stroke: "var(--card)", "stroke-width": 6 }, svg, "no checkpoint");
  legend(svg, box, range, true);
}

// ---- layers over steps ----
const overviews = {}; // the last picture of each chart
function layers(id, run) {
  const width = room(id), rows = run.layers.length, [low, high] = domain(), range = scale(state.metric), spans = cells(run);
  const cell = Math.max(width < 520 || matchMedia("(pointer: coarse)").matches ? 14 : 8, Math.min(22, 240 / rows)), box = { left: LEFT, right: width - 12, top: 20, bottom: 20 + rows * cell };
  const svg = clear(id, width, box.bottom + 36), wide = box.right - box.left, sx = v => box.left + (v - low) / (high - low) * wide;
  charts[id] = { run, svg, sx, box, rows, cell, spans };
  hatch(svg);
  make("rect", { fill: "url(#hatch-none)", x: box.left, y: box.top, width: wide, height: rows * cell }, svg);
  const pixels = Math.round(wide * devicePixelRatio), made = [state.a, state.b, state.metric, state.over, state.axis, pixels, dark()].join(" ");
  if (overviews[id]?.made !== made) { // the slider does not change it
    const medians = run.layers.map((_, l) => run.steps.map((_, s) => over(run, state.metric, s, l, state.over)));
    const under = Array.from({ length: pixels }, (_, x) => { const v = low + (x + 0.5) / pixels * (high - low); return spans.findIndex(([from, to]) => from <= v && v < to); });
    overviews[id] = { made, href: picture(pixels, rows, range, (x, l) => under[x] < 0 ? NaN : medians[l][under[x]]) };
  }
  make("image", { class: "map", href: overviews[id].href, x: box.left, y: box.top, width: wide, height: rows * cell, preserveAspectRatio: "none" }, svg);
  make("path", { class: "seam", d: Array.from({ length: rows - 1 }, (_, r) => `M${box.left} ${box.top + (r + 1) * cell}H${box.right}`).join("") }, svg);
  if (wide / slots.length > 7) make("path", { class: "seam", d: spans.map(([, to]) => `M${sx(to)} ${box.top}V${box.bottom}`).join("") }, svg);
  make("text", { class: "title", x: box.left - 7, y: box.top - 6, "text-anchor": "end" }, svg, "layer");
  for (let r = 0; r < rows; r += Math.ceil(13 / cell)) make("text", { x: box.left - 7, y: box.top + (r + 0.5) * cell + 4, "text-anchor": "end" }, svg, run.layers[r].short);
  const at = indexOf(run), span = at < 0 ? [place(state.step), place(state.step)] : spans[at], width6 = Math.max(6, sx(span[1]) - sx(span[0]));
  const x = Math.max(box.left, Math.min(box.right - width6, (sx(span[0]) + sx(span[1]) - width6) / 2));
  if (state.layer < rows) for (const kind of ["halo", "chosen-cell"]) make("rect", { class: kind, x, y: box.top + state.layer * cell, width: width6, height: cell, rx: 2 }, svg);
  stepTicks(width).forEach(([t, text]) => make("text", { x: sx(t), y: box.bottom + 14, "text-anchor": "middle" }, svg, text));
  make("text", { x: (box.left + box.right) / 2, y: box.bottom + 30, "text-anchor": "middle" }, svg, `${({ median: "median", min: "lowest", max: "highest" })[state.over]} of the heads of each layer, over steps`);
}

// ---- heads over steps ----
const DASHED = ["", " second dashed"];
const series = (run, layer, head) => run.steps.flatMap((s, i) => [[place(s), number(run, state.metric, i, layer, head)], ...(run.breaks.has(i) ? [[NaN, NaN]] : [])]); // a NaN breaks the line
function lines() {
  const runs = shown(), every = runs.map(run => Array.from({ length: run.layers[state.layer]?.heads ?? 0 }, (_, h) => series(run, state.layer, h)));
  const times = stepTicks(room("lines")), words = new Map(times);
  const y = reach(every.flat(2).map(p => p[1]), 0.06), { svg, sx, sy, box } = frame("lines", room("lines"), 300, domain(), y, [RUNS[state.a].numbered ? "training step" : "checkpoint", METRICS[state.metric].label.slice(0, 34)], { left: LEFT + 12, at: times.map(t => t[0]), word: t => words.get(t) });
  charts.lines = { svg, sx, box };
  hatch(svg);
  runs.forEach(run => {
    const spans = cells(run);
    run.breaks.forEach(([lost], i) => make("title", {}, make("rect", { class: "band", x: sx(spans[i][1]), y: box.top, width: Math.max(0, sx(spans[i + 1][0]) - sx(spans[i][1])), height: box.bottom - box.top }, svg), `${stepName(run, lost)}: ${absent(run, lost)}`));
  });
  const drawn = every.flatMap((heads, i) => heads.map((points, h) => [i, h, points])).sort((p, q) => (p[1] === state.head) - (q[1] === state.head)); // the chosen one on top
  drawn.forEach(([i, h, points]) => {
    const strong = h === state.head ? " chosen" : "", d = route(points, sx, sy);
    make("path", { class: "line" + DASHED[i] + strong, d, "stroke-linecap": "round" }, svg);
    make("title", {}, make("path", { class: "hit", d, "data-head": h }, svg), `head ${h}` + (runs.length > 1 ? ` of ${runs[i].name}` : ""));
    if (strong && points.length <= 80) points.filter(p => known(p[1])).forEach(p => make("circle", { class: "point chosen" + DASHED[i], cx: sx(p[0]), cy: sy(p[1]), r: 2.6 }, svg));
  });
  runs.forEach((run, i) => {
    const base = box.bottom - 3 - 6 * i;
    run.failed.forEach(([step, words]) => { const x = sx(place(step)); make("title", {}, make("path", { class: "cross-mark", d: `M${x - 4} ${base - 10}l8 8m0 -8l-8 8` }, svg), words); });
    run.same.forEach((first, s) => { if (first !== null) make("title", {}, make("path", { class: "repeat", d: `M${sx(place(run.steps[s])) - 3} ${base}h6` }, svg), `${stepName(run, run.steps[s])} has the queries, keys and norms of ${stepName(run, run.steps[first])}`); });
  });
  const here = sx(place(state.step));
  make("line", { class: "here", x1: here, x2: here, y1: box.top, y2: box.bottom }, svg);
}
