// The page of an explanation: the input coloured by score, sources of a token, heads and what they attend to, path lengths, deletion.
// Its data is in <script id="data">; tables with a number per pair of tokens are in <script id="table-N">, unpacked when they are shown.

const DATA = JSON.parse(element("data").textContent);
const { streams: STREAMS, methods: METHODS, patterns: PATTERNS, picture: PICTURE, target: TARGET } = DATA;
const SHORT = 200; // tokens up to which all methods are shown at once
const state = { method: 0, all: true, token: null, pinned: false, head: 0, length: null };

// ---- numbers and words ----
const numeral = x => x === null || x === undefined ? "–" : x === 0 ? "0" : Math.abs(x) < 0.01 ? String(Number(x.toPrecision(2))) : show(x);
const percent = x => { const digits = Math.abs(x) < 0.0995 ? 1 : 0; return `${(Math.round(100 * x * 10 ** digits) / 10 ** digits + 0).toFixed(digits)} %`; };
const visible = text => text.replace(/\n/g, "↵").replace(/\t/g, "⇥");
const quoted = text => `‘${visible(text)}’`;
const place = (stream, t) => `${quoted(STREAMS[stream].tokens[t])} (${STREAMS[stream].patches && t >= PICTURE.before ? "patch" : `${STREAMS.length > 1 ? STREAMS[stream].name + " " : ""}token`} ${t - (STREAMS[stream].patches && t >= PICTURE.before ? PICTURE.before : 0)})`;
const order = n => n + (n % 100 > 10 && n % 100 < 14 ? "th" : { 1: "st", 2: "nd", 3: "rd" }[n % 10] || "th");
const longest = Math.max(...STREAMS.map(s => s.tokens.length));

// ---- the input in tokens or patches: one strip per method and stream ----
const scoresOf = (m, s) => METHODS[m].scores[s];
const hasRows = (m, s) => METHODS[m].table !== null && METHODS[m].queries === s; // whether tokens of this stream have sources
let strips = [];
const shownMethods = () => state.all && longest <= SHORT ? METHODS.map((_, m) => m) : [state.method];
function buildStrips() {
  const box = element("strips");
  strips = [];
  box.replaceChildren();
  box.className = PICTURE ? "pictures" : "";
  for (const m of shownMethods()) {
    const part = document.createElement("div");
    part.className = "strip";
    part.innerHTML = `<h3>${escape(METHODS[m].label)} <small>${escape(METHODS[m].unit)}</small></h3>`;
    STREAMS.forEach((stream, s) => {
      if (!scoresOf(m, s)) return;
      if (STREAMS.length > 1) part.insertAdjacentHTML("beforeend", `<p class="stream">${escape(stream.name)}</p>`);
      strips.push({ m, ...strip(METHODS[m].label, s, part) });
    });
    box.appendChild(part);
  }
}
function chips(parent, stream, from, to) {
  const nodes = [];
  for (let t = from; t < to; t++) {
    const node = document.createElement("span");
    node.className = "tok" + (stream.special.has(t) ? " special" : "") + (TARGET.position === t && stream.explained ? " explained" : "");
    node.textContent = visible(stream.tokens[t]);
    node.dataset.t = t;
    nodes.push(node);
    parent.appendChild(node);
    if (/\n/.test(stream.tokens[t])) parent.appendChild(document.createElement("br"));
  }
  return nodes;
}
const strip = (name, s, part) => STREAMS[s].patches ? patches(name, s, part) : tokens(name, s, part);
function holder(name, s, part, long) {
  const box = document.createElement("div");
  box.className = "tokens" + (long ? " long" : "");
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", `${name}, ${STREAMS[s].name}: arrow keys move between tokens`);
  part.appendChild(box);
  return box;
}
function tokens(name, s, part) {
  const stream = STREAMS[s], box = holder(name, s, part, stream.tokens.length > 600), nodes = chips(box, stream, 0, stream.tokens.length);
  listenTokens(box, s, nodes, 1);
  const drawn = new Int16Array(nodes.length).fill(-1); // a token is touched only when its colour changes
  let now = null;
  return {
    s,
    paint(values, { most, signed }) {
      const colours = signed ? palette().diverging : palette().sequential;
      nodes.forEach((node, t) => {
        const at = step(values[t], most), c = colours[at], kind = signed ? at + 255 : Math.max(127, at);
        if (drawn[t] === kind) return;
        drawn[t] = kind;
        node.style.cssText = `background:rgb(${c});color:${readable(c)}`;
      });
    },
    mark(t) { now?.classList.remove("now"); now = t === null ? null : nodes[t]; now?.classList.add("now"); },
    reach(t) { nodes[t].scrollIntoView({ block: "nearest" }); },
  };
}
function listenTokens(box, s, nodes, across) {
  const at = event => event.target.closest?.("[data-t]")?.dataset.t;
  box.addEventListener("pointerover", event => { if (event.pointerType !== "touch" && at(event) !== undefined) point(s, Number(at(event))); });
  box.addEventListener("pointerleave", () => point(null));
  box.addEventListener("click", event => { if (at(event) !== undefined) pin(s, Number(at(event))); });
  box.addEventListener("keydown", event => moveToken(event, s, nodes.length, across));
}
function moveToken(event, s, count, across) {
  if (event.key === "Escape") { release(); return; }
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across, ArrowDown: across, Home: -count, End: count }[event.key];
  if (by === undefined) return;
  event.preventDefault();
  const from = state.token && state.token[0] === s ? state.token[1] : by > 0 ? -1 : count;
  const next = Math.max(0, Math.min(count - 1, from + by));
  state.token = [s, next]; state.pinned = true;
  drawToken();
  strips.filter(x => x.s === s).forEach(x => x.reach?.(next));
}
function point(s, t) { // the pointer; a pinned token stays
  if (state.pinned) return;
  state.token = s === null ? null : [s, t];
  drawToken();
}
function pin(s, t) {
  const same = state.pinned && state.token && state.token[0] === s && state.token[1] === t;
  state.pinned = !same;
  state.token = same ? null : [s, t];
  drawToken();
}
function release() { state.pinned = false; state.token = null; drawToken(); }

// a picture: grey, with the patches coloured over it; the tokens that are no patch below it
function patches(name, s, part) {
  const stream = STREAMS[s], { rows, columns, before } = PICTURE, canvas = document.createElement("canvas");
  canvas.width = 336; canvas.height = Math.round(336 * PICTURE.height / PICTURE.width);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${name}: arrow keys move between patches`);
  part.appendChild(canvas);
  const context = canvas.getContext("2d"), w = canvas.width / columns, h = canvas.height / rows;
  const patch = event => { const box = canvas.getBoundingClientRect(), c = Math.floor((event.clientX - box.left) / box.width * columns), r = Math.floor((event.clientY - box.top) / box.height * rows);
    return c >= 0 && c < columns && r >= 0 && r < rows ? before + r * columns + c : null; };
  canvas.addEventListener("pointermove", event => { if (event.pointerType !== "touch" && patch(event) !== null) point(s, patch(event)); });
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("click", event => { if (patch(event) !== null) pin(s, patch(event)); });
  canvas.addEventListener("keydown", event => moveToken(event, s, stream.tokens.length, columns));
  const first = document.createElement("div"), nodes = chips(first, stream, 0, before);
  first.className = "tokens";
  if (before) { part.appendChild(first); listenTokens(first, s, nodes, 1); }
  let last = null, marked = null;
  const draw = () => {
    if (!last) return;
    const [values, { most, signed }] = last, colours = signed ? palette().diverging : palette().sequential;
    context.drawImage(greyPicture(), 0, 0, canvas.width, canvas.height);
    for (let i = 0; i < rows * columns; i++) {
      const v = Math.max(-1, Math.min(1, values[before + i] / most));
      context.fillStyle = `rgba(${colours[v < 0 ? 0 : 254]},${(0.85 * Math.abs(v) ** 0.7).toFixed(3)})`;
      context.fillRect(i % columns * w, Math.floor(i / columns) * h, w + 0.5, h + 0.5);
    }
    nodes.forEach((node, t) => { const c = colours[step(values[t], most)]; node.style.background = `rgb(${c})`; node.style.color = readable(c); node.classList.toggle("now", t === marked); });
    if (marked !== null && marked >= before) {
      context.lineWidth = 3; context.strokeStyle = dark() ? "#fff" : "#000";
      context.strokeRect((marked - before) % columns * w, Math.floor((marked - before) / columns) * h, w, h);
    }
  };
  return { s, paint(values, scale) { last = [values, scale]; draw(); }, mark(t) { marked = t; draw(); } };
}
let grey = null;
function greyPicture() {
  if (grey) return grey;
  const { width, height } = PICTURE, pixels = atob(element("pixels").textContent), image = new ImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    const light = 0.3 * pixels.charCodeAt(3 * i) + 0.59 * pixels.charCodeAt(3 * i + 1) + 0.11 * pixels.charCodeAt(3 * i + 2);
    image.data.set([light, light, light, 255], 4 * i);
  }
  grey = document.createElement("canvas");
  Object.assign(grey, { width, height });
  grey.getContext("2d").putImageData(image, 0, 0);
  return grey;
}

// ---- scores, or the sources of the token that is pointed at ----
let drawing = 0;
async function drawToken() {
  const ticket = ++drawing, at = state.token;
  element("release").hidden = !state.pinned;
  strips.forEach(x => x.mark(at && at[0] === x.s ? at[1] : null));
  drawHeadStrip();
  const rows = new Map();
  if (at) await Promise.all(shownMethods().map(async m => { if (hasRows(m, at[0])) rows.set(m, (await tableOf(m)).row(at[1])); }));
  if (ticket !== drawing) return; // the pointer has moved on
  for (const x of strips) {
    const method = METHODS[x.m], sources = rows.get(x.m), values = sources && method.stream === x.s ? sources : scoresOf(x.m, x.s);
    const scale = range(values, STREAMS[x.s].special);
    x.signed = scale.signed;
    x.paint(values, scale);
  }
  readToken(rows);
  element("scale").innerHTML = strips.some(x => x.signed) ? `against <i style="background:${gradient(true)}"></i> for the target` : `none <i style="background:${gradient(false)}"></i> most`;
  matrixView.cursor(at && METHODS[state.method].queries === at[0] ? at[1] : null, null);
}
const gradient = signed => `linear-gradient(90deg,${[0, 0.25, 0.5, 0.75, 1].map(t => `rgb(${blend(signed ? 2 * t - 1 : t, signed)})`).join()})`;
const tableOf = m => table(METHODS[m].table, METHODS[m].rows, STREAMS[METHODS[m].stream].tokens.length, STREAMS[METHODS[m].stream].special);
function largest(values, s, count = 5) {
  return values.map((v, t) => [v, t]).filter(([v]) => v).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, count)
    .map(([v, t]) => `${escape(quoted(STREAMS[s].tokens[t]))} ${numeral(v)}`).join(" · ");
}
function readToken(rows) {
  const m = state.method, method = METHODS[m];
  if (!state.token) {
    element("read-token").innerHTML = `<b>${escape(method.label)}</b>, largest scores: ${largest(scoresOf(m, method.stream), method.stream)}`;
    return;
  }
  const [s, t] = state.token, all = scoresOf(m, s), scores = all && all[t] !== null ? all : null, row = rows.get(m);
  const rank = scores ? 1 + scores.filter(v => v > scores[t]).length : null;
  const score = scores ? ` · ${escape(method.label)} score ${numeral(scores[t])}, ${order(rank)} of ${scores.length}` : "";
  element("read-token").innerHTML = `<b>${escape(place(s, t))}</b>${score}${row ? ` · its sources: ${largest(row, method.stream)}` : ""}`;
}

// ---- the matrix of the chosen method, and the pattern of the chosen head ----
const matrixView = tableView("matrix", (view, q, k) => {
  element("read-matrix").innerHTML = q === null ? "" : k === null ? `The output at <b>${escape(place(view.queries, q))}</b>: ${largest(view.data.row(q), view.keys)}`
    : `The output at <b>${escape(place(view.queries, q))}</b> takes ${numeral(view.data.at(q, k))} from <b>${escape(place(view.keys, k))}</b>`;
}, (view, q) => point(q === null ? null : view.queries, q));
const patternView = tableView("pattern", (view, q, k) => {
  element("read-pattern").innerHTML = q === null ? "Point at the pattern, or focus it and use the arrow keys." : k === null ? "" :
    `<b>${escape(place(view.queries, q))}</b> gives ${percent(view.data.at(q, k))} of its attention to <b>${escape(place(view.keys, k))}</b> · most to ${largest(view.data.row(q), view.keys, 3)}`;
}, (view, q) => point(q === null ? null : view.queries, q));
async function drawMatrix() {
  const m = state.method, method = METHODS[m];
  element("matrix-note").textContent = method.table !== null ? `${method.label}: rows are output tokens, columns input tokens. Numbers are kept to 1/254 of the largest in their row.` : `${method.label} has one score per token and no matrix.${METHODS.some(x => x.table !== null) ? ` With a matrix: ${METHODS.filter(x => x.table !== null).map(x => x.label).join(", ")}.` : ""}${method.without ? " " + method.without : ""}`;
  element("read-matrix").textContent = "";
  if (method.table === null) { matrixView.show(null); return; }
  const data = await tableOf(m);
  if (state.method === m) matrixView.show({ data, queries: method.queries, keys: method.stream });
}

// ---- heads ----
const patternAt = new Map(PATTERNS.map((p, i) => [p.layer * 65536 + p.head, i]));
const shareAt = new Map(DATA.heads.map(h => [h[0] * 65536 + h[1], h[2]]));
const lostWithout = new Map(DATA.heads.map(h => [h[0] * 65536 + h[1], h[3]]));
function drawHeads() {
  const layers = DATA.layers, most = Math.max(1e-9, ...DATA.heads.map(h => Math.abs(h[2]))), signed = DATA.heads.some(h => h[2] < -0.02 * most), count = Math.max(1, ...layers.map(l => l.heads));
  if (!layers.length) { element("heads").setAttribute("hidden", ""); return; }
  const width = room("heads"), left = 40, top = 22, cellW = Math.min(48, (width - left - 4) / count), cellH = Math.max(width < 520 ? 22 : 15, Math.min(26, cellW * 0.8)), bottom = top + layers.length * cellH;
  const svg = clear("heads", width, bottom + (DATA.heads.length ? 42 : 6)), gap = cellW > 8 ? 1 : 0.4, chosen = PATTERNS[state.head];
  layers.forEach((layer, l) => {
    for (let h = 0; h < layer.heads; h++) {
      const key = l * 65536 + h, v = shareAt.get(key), here = patternAt.has(key);
      make("rect", { class: "cell" + (here ? "" : " away") + (v === undefined ? " plain" : ""), x: left + h * cellW, y: top + l * cellH, width: cellW - gap, height: cellH - gap, rx: cellW > 14 ? 2 : 0, ...(v === undefined ? {} : { fill: `rgb(${blend(signed ? v / most : Math.abs(v) / most, signed)})` }), "data-key": key }, svg);
      if (here && PATTERNS.length < layers.length * count && cellW > 7) make("circle", { class: "mark calm", cx: left + (h + 1) * cellW - gap - 5, cy: top + l * cellH + 5, r: 2.2 }, svg);
    }
    if (l % Math.ceil(13 / cellH) === 0) make("text", { x: left - 7, y: top + (l + 0.5) * cellH + 4, "text-anchor": "end" }, svg, layer.short);
  });
  for (let i = 0; i < count; i += Math.ceil(20 / cellW)) make("text", { x: left + (i + 0.5) * cellW, y: top - 6, "text-anchor": "middle" }, svg, i);
  make("text", { class: "title", x: left - 7, y: top - 6, "text-anchor": "end" }, svg, "layer");
  if (chosen) for (const kind of ["halo", "chosen-cell"]) make("rect", { class: kind, x: left + chosen.head * cellW - 1, y: top + chosen.layer * cellH - 1, width: cellW + 1, height: cellH + 1, rx: 2 }, svg);
  if (DATA.heads.length) ramp(svg, left, bottom + 12, Math.min(220, width - left - 12), most, signed);
}
function ramp(svg, x, y, wide, most, signed) {
  for (let i = 0; i < 60; i++) make("rect", { x: x + i * wide / 60, y, width: wide / 60 + 0.5, height: 9, fill: `rgb(${blend(signed ? i / 59 * 2 - 1 : i / 59, signed)})` }, svg);
  (signed ? [[-most, 0], [0, 0.5], [most, 1]] : [[0, 0], [most, 1]]).forEach(([v, at]) =>
    make("text", { x: x + at * wide, y: y + 22, "text-anchor": at === 0 ? "start" : at === 1 ? "end" : "middle" }, svg, percent(v)));
}
function readHead(key) {
  const l = Math.floor(key / 65536), v = shareAt.get(key), away = patternAt.has(key) ? "" : ` · its pattern is not on this page: --patterns ${DATA.layers[l].short}.${key % 65536}`;
  element("read-heads").innerHTML = `<b>Layer ${escape(DATA.layers[l].short)}, head ${key % 65536}</b>${v === undefined ? "" : ` · ${percent(v)} of the target passes through it`}${lostWithout.get(key) == null ? "" : ` · ${percent(lostWithout.get(key))} is lost without it`}${escape(away)}`;
}
// the input coloured by one row of the chosen head: of the token that is pointed at, else of the explained one
let headStrip = null, headData = null;
function drawHeadStrip() {
  const pattern = PATTERNS[state.head];
  if (!headStrip || !headData || !pattern) return;
  const q = state.token && state.token[0] === pattern.queries ? state.token[1] : Math.min(pattern.rows - 1, TARGET.position ?? 0), values = headData.row(q);
  element("head-title").innerHTML = `What <b>${escape(place(pattern.queries, q))}</b> attends to`;
  headStrip.mark(pattern.queries === pattern.keys ? q : null);
  headStrip.paint(values, range(values, STREAMS[pattern.keys].special));
}
async function drawPattern() {
  const pattern = PATTERNS[state.head];
  if (!pattern) { element("which").textContent = ""; element("where").textContent = ""; patternView.show(null); return; }
  const layer = DATA.layers[pattern.layer];
  element("which").textContent = `Layer ${layer.short}, head ${pattern.head}: what it attends to`;
  element("where").textContent = `${layer.name} · ${layer.kind}-attention · rows are queries, columns keys`;
  const data = await table(pattern.table, pattern.rows, pattern.columns, STREAMS[pattern.keys].special);
  if (PATTERNS[state.head] !== pattern) return;
  patternView.show({ data, queries: pattern.queries, keys: pattern.keys });
  headData = data;
  if (longest <= 600) {
    element("head-strip").replaceChildren();
    headStrip = strip("chosen head", pattern.keys, element("head-strip"));
    drawHeadStrip();
  }
  readHead(pattern.layer * 65536 + pattern.head);
}

// ---- path lengths ----
function drawLengths() {
  const lengths = DATA.lengths;
  element("lengths-card").hidden = !lengths.length;
  if (!lengths.length) return;
  const width = room("lengths"), totals = lengths.map(l => l[1]), high = Math.max(0, ...totals), low = Math.min(0, ...totals), pad = (high - low) * 0.06;
  const every = Math.ceil(lengths.length / Math.floor(width / 30));
  const { svg, sx, sy } = frame("lengths", width, 190, [-0.6, lengths.length - 0.4], [low < 0 ? low - pad : 0, high + pad], ["heads passed", "share of the target"], { at: lengths.map((_, i) => i).filter(i => i % every === 0), word: String });
  const wide = Math.max(2, Math.min(36, (sx(1) - sx(0)) * 0.7));
  totals.forEach((v, i) => make("rect", { class: "bar" + (v < 0 ? " against" : "") + (state.length === i ? " now" : ""), x: sx(i) - wide / 2, y: Math.min(sy(0), sy(v)), width: wide, height: Math.max(0.5, Math.abs(sy(v) - sy(0))), "data-i": i }, svg));
  make("path", { class: "nothing", d: `M${sx(-0.6)} ${sy(0)}H${sx(lengths.length - 0.4)}` }, svg);
  const best = state.length ?? totals.indexOf(Math.max(...totals)), l = lengths[best];
  element("read-lengths").innerHTML = `<b>${l[0]} ${l[0] === 1 ? "head" : "heads"}</b> · ${percent(totals[best])} of the target`;
}

// ---- deletion ----
const INKS = { light: ["#0b6e75", "#8a3ffc", "#b4531f", "#1f5fbf", "#9b1d5a", "#5a7a12", "#5d6573", "#a37400"], dark: ["#4fc3c9", "#be95ff", "#f0a35e", "#7fb2ff", "#ff8fc0", "#a9d05a", "#9aa3b1", "#e5c04a"] };
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "", "7 3", "2 3", "9 3 2 3"];
function drawDeletion() {
  const curves = DATA.deletion, inks = INKS[dark() ? "dark" : "light"];
  document.querySelector("#deletion-card .charts").hidden = !curves.length;
  if (!curves.length) return;
  const all = curves.flatMap(c => c.points.flat().map(p => p[1])), low = Math.min(...all), high = Math.max(...all), pad = (high - low || 1) * 0.05;
  for (const side of [0, 1]) {
    const id = `deletion-${side}`, { svg, sx, sy } = frame(id, room(id), 210, [0, 1], [low - pad, high + pad], ["share of tokens removed", DATA.deletion_axis], { left: 58 });
    curves.forEach((c, i) => make("path", { class: "line", d: path(c.points[side], sx, sy), stroke: inks[i % inks.length], "stroke-dasharray": DASHES[i % DASHES.length] }, svg));
  }
  element("deletion-key").innerHTML = curves.map((c, i) => `<span class="key"><i class="line" style="border-color:${inks[i % inks.length]};border-top-style:${["solid", "dashed", "dotted", "dashed"][i % 4]}"></i>${escape(c.label)} ${numeral(c.area)}</span>`).join("");
}

// ---- parts that never change ----
function fill() {
  element("method").innerHTML = METHODS.map((m, i) => `<option value="${i}">${escape(m.label)}</option>`).join("");
  element("matrix-card").hidden = METHODS.every(m => m.table === null);
  element("all-label").hidden = longest > SHORT || METHODS.length < 2;
  const most = Math.max(1e-9, ...DATA.predictions.map(p => p[2]));
  element("predictions-card").hidden = !DATA.predictions.length;
  element("predictions").innerHTML = DATA.predictions.map(([index, name, share]) => `<span class="${index === TARGET.index ? "chosen" : ""}">${escape(quoted(name))}</span><i style="width:${(100 * share / most).toFixed(1)}%"></i><span>${percent(share)}</span>`).join("");
  for (const part of ["predictions", "heads", "lengths", "deletion"]) element(`${part}-note`).textContent = DATA[`${part}_note`];
  element("methods").innerHTML = METHODS.map(m => `<dt>${escape(m.label)}</dt><dd>${escape(m.exact)}${m.how ? ` <i>${escape(m.how)}</i>` : ""}</dd>`).join("");
  element("notes").innerHTML = DATA.notes.map(note => `<li>${escape(note)}</li>`).join("");
}
let drawnAt = 0;
function draw() {
  drawnAt = innerWidth;
  PALETTE = null;
  element("method").value = String(state.method);
  element("all").checked = state.all;
  buildStrips();
  drawToken();
  drawHeads(); drawLengths(); drawDeletion();
  requestAnimationFrame(() => { drawMatrix(); drawPattern(); }); // after the first paint
}
function change(choice) {
  const before = { ...state };
  Object.assign(state, choice);
  element("method").value = String(state.method);
  if (state.method !== before.method || state.all !== before.all) { if (!state.all || longest > SHORT || state.all !== before.all) buildStrips(); drawToken(); }
  if (state.method !== before.method) drawMatrix();
  if (state.head !== before.head) { drawHeads(); drawPattern(); }
  if (state.length !== before.length) drawLengths();
  remember();
}
function remember() {
  const head = PATTERNS[state.head], choice = new URLSearchParams({ method: METHODS[state.method].name });
  if (head) { choice.set("layer", DATA.layers[head.layer].short); choice.set("head", head.head); }
  if (!state.all) choice.set("all", "off");
  storeChoice(choice);
}
function recall() {
  const choice = choiceInAddress(), method = METHODS.findIndex(m => m.name === choice.get("method"));
  if (method >= 0) state.method = method;
  state.all = choice.get("all") !== "off";
  const head = PATTERNS.findIndex(p => DATA.layers[p.layer].short === choice.get("layer") && String(p.head) === choice.get("head"));
  state.head = head >= 0 ? head : DATA.first_head;
}
function listen() {
  element("method").addEventListener("change", event => change({ method: Number(event.target.value) }));
  element("all").addEventListener("change", event => change({ all: event.target.checked }));
  element("release").addEventListener("click", release);
  const key = event => { const at = event.target.closest("[data-key]"); return at ? Number(at.dataset.key) : null; };
  element("heads").addEventListener("click", event => { const at = patternAt.get(key(event)); if (at !== undefined) change({ head: at }); });
  element("heads").addEventListener("pointerover", event => { if (key(event) !== null) readHead(key(event)); });
  element("heads").addEventListener("pointerleave", () => { const p = PATTERNS[state.head]; if (p) readHead(p.layer * 65536 + p.head); });
  element("heads").addEventListener("keydown", event => moveHead(event));
  const bar = event => { const at = event.target.closest("[data-i]"); if (at) change({ length: Number(at.dataset.i) }); };
  for (const kind of ["pointerover", "click"]) element("lengths").addEventListener(kind, bar);
  element("lengths").addEventListener("keydown", event => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    change({ length: Math.max(0, Math.min(DATA.lengths.length - 1, (state.length ?? -by) + by)) });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("hashchange", () => { recall(); draw(); });
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { if (innerWidth !== drawnAt) draw(); }, 120); });
}
function moveHead(event) { // to the next head that has a pattern on this page
  const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key], now = PATTERNS[state.head];
  if (!by || !now) return;
  event.preventDefault();
  let [l, h] = [now.layer, now.head];
  while (true) {
    l += by[0]; h += by[1];
    if (l < 0 || h < 0 || l >= DATA.layers.length || h >= 65536 || (by[1] && h >= DATA.layers[l].heads)) return;
    const at = patternAt.get(l * 65536 + h);
    if (at !== undefined) { change({ head: at }); return; }
  }
}

function start() {
  STREAMS.forEach(s => { s.special = new Set(s.special); });
  recall();
  fill();
  if (PICTURE) element("lengths-card").after(element("deletion-card")); // a picture makes the other column long
  listen();
  draw();
}
start();
