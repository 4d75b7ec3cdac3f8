// Tables with a number per pair of tokens: unpacked when they are first shown, and drawn as a canvas with a cursor over it.
// The page that uses them has the streams of tokens in STREAMS, and visible() for the text of a token.

// ---- tables: unpacked once, when first shown ----
const tables = new Map();
async function table(id, rows, columns, special) { // three of four rows stay within the colours; special tokens do not count
  if (!tables.has(id)) tables.set(id, (async () => {
    const packed = atob(element(`table-${id}`).textContent), bytes = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
    const buffer = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
    const scale = new Float32Array(buffer, 0, rows), whole = new Int8Array(buffer, 4 * rows, rows * columns);
    const usual = Uint8Array.from({ length: columns }, (_, k) => special.size < columns && special.has(k) ? 0 : 1);
    const highs = new Float32Array(rows);
    let least = 0;
    for (let q = 0; q < rows; q++) {
      let high = 0, low = 0;
      for (let k = 0, i = q * columns; k < columns; k++, i++) if (usual[k]) { if (whole[i] > high) high = whole[i]; if (whole[i] < low) low = whole[i]; }
      highs[q] = Math.max(high, -low) * scale[q]; least = Math.min(least, low * scale[q]);
    }
    const most = highs.sort()[Math.floor(0.75 * (rows - 1))] || highs[rows - 1] || 1;
    const at = (q, k) => whole[q * columns + k] * scale[q];
    return { rows, columns, scale, whole, at, most, signed: least < -0.02 * most, row: q => Array.from({ length: columns }, (_, k) => at(q, k)) };
  })());
  return tables.get(id);
}

// ---- colour ----
let PALETTE = null; // of both ramps: [red, green, blue] for 255 steps, -127 ... 127
function palette() {
  if (!PALETTE) PALETTE = { sequential: Array.from({ length: 255 }, (_, i) => blend(Math.max(0, i - 127) / 127, false)), diverging: Array.from({ length: 255 }, (_, i) => blend((i - 127) / 127, true)) };
  return PALETTE;
}
const step = (x, most) => Math.round(Math.max(-1, Math.min(1, x / most)) * 127) + 127;
const readable = ([r, g, b]) => 0.3 * r + 0.59 * g + 0.11 * b > 140 ? "#14171c" : "#ffffff";
function range(values, special) { // the largest score; special tokens count only where there are no others
  const sizes = values.filter((_, t) => !special.has(t)).map(Math.abs), most = Math.max(0, ...sizes) || Math.max(0, ...values.map(Math.abs)) || 1;
  return { most, signed: Math.min(0, ...values) < -0.02 * most };
}

// ---- a table as a canvas, with the largest number of `by` x `by` cells where there are many to a pixel ----
function pooled({ rows, columns, whole, scale, most }, colours, by) {
  const wide = Math.ceil(columns / by), high = Math.ceil(rows / by), image = new ImageData(wide, high), words = new Uint32Array(image.data.buffer);
  const inks = Uint32Array.from(colours, ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0), best = new Float32Array(wide);
  for (let y = 0; y < high; y++) {
    best.fill(0);
    for (let q = y * by; q < Math.min(rows, (y + 1) * by); q++) {
      const factor = scale[q] / most * 127;
      for (let k = 0, i = q * columns; k < columns; k++, i++) if (whole[i]) { const v = whole[i] * factor, x = by === 1 ? k : Math.floor(k / by); if (Math.abs(v) > Math.abs(best[x])) best[x] = v; }
    }
    for (let x = 0; x < wide; x++) words[y * wide + x] = inks[Math.max(0, Math.min(254, Math.round(best[x]) + 127))];
  }
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: wide, height: high });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// ---- a view of a table, with a cursor over it ----
function tableView(id, read, choose) {
  const box = element(id), canvas = document.createElement("canvas"), over = document.createElement("canvas");
  over.className = "over";
  box.append(canvas, over);
  let now = null, cell = [null, null], size = null, ink = ""; // size and ink as they were drawn: asking for them again would lay out the page
  const sizes = () => {
    const width = room(id), { queries, keys } = now, rows = now.data.rows, columns = now.data.columns;
    const side = Math.min(width / columns, 34), labels = side >= 11 && STREAMS[keys].tokens.length <= 48 && !STREAMS[keys].patches;
    const left = labels ? Math.min(96, width * 0.26) : 0, top = labels ? 64 : 0, cell = Math.min((width - left) / columns, 34);
    return { width, left, top, cell, high: Math.max(cell, rows === 1 ? 18 : 0), labels, rows, columns, queries, keys, height: Math.ceil(top + rows * Math.max(cell, rows === 1 ? 18 : 0)) };
  };
  const fit = (node, { width, height }) => {
    const ratio = Math.min(2, devicePixelRatio || 1);
    node.width = Math.round(width * ratio); node.height = Math.round(height * ratio);
    node.style.height = `${height}px`;
    const context = node.getContext("2d");
    context.scale(ratio, ratio);
    return context;
  };
  function draw() {
    if (!now) return;
    size = sizes();
    ink = getComputedStyle(document.documentElement).getPropertyValue("--warn");
    fit(over, size);
    const context = fit(canvas, size), { data } = now, colours = data.signed ? palette().diverging : palette().sequential;
    const small = pooled(data, colours, Math.max(1, Math.floor(1 / (size.cell * Math.min(2, devicePixelRatio || 1)))));
    context.imageSmoothingEnabled = false;
    context.drawImage(small, size.left, size.top, size.cell * data.columns, size.high * data.rows);
    if (size.labels) axis(context, size);
    cursor();
  }
  function axis(context, size) {
    const style = getComputedStyle(document.documentElement);
    context.fillStyle = style.getPropertyValue("--soft");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const word = (s, t) => { const text = visible(STREAMS[s].tokens[t]).trim() || "␣"; return text.length > 12 ? text.slice(0, 11) + "…" : text; };
    context.textAlign = "right";
    for (let q = 0; q < size.rows; q++) context.fillText(word(size.queries, q), size.left - 5, size.top + (q + 0.5) * size.high, size.left - 6);
    context.textAlign = "left";
    for (let k = 0; k < size.columns; k++) {
      context.save();
      context.translate(size.left + (k + 0.5) * size.cell, size.top - 5);
      context.rotate(-Math.PI / 2);
      context.fillText(word(size.keys, k), 0, 0, size.top - 6);
      context.restore();
    }
  }
  function cursor() {
    if (!now) return;
    const context = over.getContext("2d"), [q, k] = cell;
    context.clearRect(0, 0, size.width, size.height);
    context.strokeStyle = ink;
    context.lineWidth = 1.5;
    if (q !== null) context.strokeRect(size.left, size.top + q * size.high, size.cell * size.columns, Math.max(1, size.high));
    if (k !== null) context.strokeRect(size.left + k * size.cell, size.top, Math.max(1, size.cell), size.high * size.rows);
    read(now, q, k);
  }
  const hit = event => {
    const edge = canvas.getBoundingClientRect(), q = Math.floor((event.clientY - edge.top - size.top) / size.high), k = Math.floor((event.clientX - edge.left - size.left) / size.cell);
    return q >= 0 && q < size.rows && k >= 0 && k < size.columns ? [q, k] : null;
  };
  const set = next => { cell = next; cursor(); choose?.(now, cell[0]); };
  box.addEventListener("pointermove", event => { if (now && event.pointerType !== "touch") { const at = hit(event); if (at) set(at); } });
  box.addEventListener("click", event => { if (now) { const at = hit(event); if (at) set(at); } });
  box.addEventListener("pointerleave", () => { if (now) set([null, null]); });
  box.addEventListener("keydown", event => {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!by || !now) return;
    event.preventDefault();
    const next = (x, d, n) => x === null ? 0 : Math.max(0, Math.min(n - 1, x + d));
    set([next(cell[0], by[0], now.data.rows), next(cell[1], by[1], now.data.columns)]);
  });
  return {
    show(view) { now = view; cell = [null, null]; box.hidden = !view; draw(); },
    cursor(q, k) { if (now && (cell[0] !== q || cell[1] !== k)) { cell = [q, k]; cursor(); } },
    draw,
  };
}
