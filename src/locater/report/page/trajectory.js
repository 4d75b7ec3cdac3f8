// The page of checkpoints: words and tables, the slider, pointer and keys. Data and charts are in the files before it.

const FEW = 8;
const layerName = (run, l) => run.layers[l] ? `layer ${run.layers[l].short}` : "no such layer";
const letter = i => shown().length > 1 ? `${"AB"[i]}: ` : "";

// ---- words ----
function titles() {
  shown().forEach((run, i) => {
    const at = indexOf(run), id = "ab"[i], same = at < 0 ? null : run.same[at];
    element(`title-${id}`).textContent = `${letter(i)}${run.name}${at < 0 ? "" : `, ${stepName(run, state.step)}`}`;
    element(`note-${id}`).textContent = at < 0 ? `${stepName(run, state.step)}: ${absent(run, state.step)}`
      : same !== null ? `${run.sources[at]} · the same queries, keys and norms as ${stepName(run, run.steps[same])}` : `${run.sources[at]} · ${METRICS[state.metric].label}`;
    readout(id, run, state.layer, state.head);
  });
  const run = RUNS[state.a], at = slots.indexOf(state.step), why = indexOf(run) < 0 ? ` <span class="gap">no checkpoint</span>` : run.same[indexOf(run)] !== null ? ` (= ${run.steps[run.same[indexOf(run)]].toLocaleString("en")})` : "";
  element("when").innerHTML = `<b>${escape(stepName(run, state.step))}</b>${why}, ${at + 1} of ${slots.length}`;
  Object.assign(element("slot"), { max: slots.length - 1, value: at });
  element("slot").setAttribute("aria-valuetext", element("when").textContent);
  element("back").disabled = at <= 0;
  element("on").disabled = at >= slots.length - 1;
}
function readout(id, run, layer, head) {
  const at = indexOf(run), flags = flagsOf(run, at, layer, head).map(([name]) => name);
  element(`read-${id}`).innerHTML = layer >= run.layers.length || head >= run.layers[layer].heads ? "no such head in this run"
    : `Layer <b>${escape(run.layers[layer].short)}</b>, head <b>${head}</b>: <b>${numeral(number(run, state.metric, at, layer, head))}</b>${flags.length ? ` · ${escape(flags.join(", "))}` : ""}`;
}
function headPanel() {
  const runs = shown(), run = runs[0], values = runs.map(r => number(r, state.metric, indexOf(r), state.layer, state.head));
  element("which").textContent = `${layerName(run, state.layer)[0].toUpperCase()}${layerName(run, state.layer).slice(1)}, head ${state.head} over steps: ${METRICS[state.metric].label}`;
  element("lines-note").textContent = `${run.layers[state.layer]?.name ?? ""} · a line per head of the layer, head ${state.head} is drawn strong${runs.length > 1 ? "; A solid, B dashed" : ""}. At ${stepName(run, state.step)}: ${runs.map((_, i) => letter(i) + numeral(values[i])).join(", ")}.`;
  const own = runs.flatMap((r, i) => r.findings.filter(([l, h]) => l === state.layer && h === state.head).map(f => [i, r, f]));
  element("findings").innerHTML = own.map(([i, r, [, , flag, spans, faults]]) => {
    const calm = !faults.length, said = (calm ? spans : faults).map(([from, to]) => from === to ? stepName(r, r.steps[from]) : `${stepName(r, r.steps[from])} to ${stepName(r, r.steps[to])}`);
    return `<div class="finding${calm ? " calm" : ""}"><b>${letter(i)}${escape(flag)}</b> ${escape(said.slice(0, 3).join("; "))}${said.length > 3 ? ` and ${said.length - 3} more` : ""}: <span>${escape(about(flag).meaning)}.</span></div>`;
  }).join("");
}
function numbers() {
  const runs = shown(), heads = runs.length > 1 ? ["A", "B", "B - A"] : ["number", "first step", "change"];
  element("numbers-head").innerHTML = `<tr><th>${escape(layerName(runs[0], state.layer))}, head ${state.head}, ${escape(stepName(runs[0], state.step))}</th>${heads.map(h => `<th>${h}</th>`).join("")}</tr>`;
  element("numbers").innerHTML = Object.keys(METRICS).map(name => {
    const here = runs.map(r => number(r, name, indexOf(r), state.layer, state.head));
    const row = runs.length > 1 ? [...here, here[1] - here[0]] : [here[0], number(runs[0], name, 0, state.layer, state.head), here[0] - number(runs[0], name, 0, state.layer, state.head)];
    return `<tr${name === state.metric ? ' class="chosen"' : ""}><td>${escape(METRICS[name].label)}</td>${row.map(v => `<td>${numeral(v)}</td>`).join("")}</tr>`;
  }).join("");
}
function firsts() { // by flag, faults first: the steps at which heads first raise it, with these heads
  const parts = shown().flatMap((run, i) => {
    const kinds = new Map();
    run.findings.forEach(f => { if (!state.flag || f[2] === state.flag) kinds.set(f[2], [...(kinds.get(f[2]) ?? []), f]); });
    const faulty = group => group.some(f => f[4].length);
    return [...kinds].sort((p, q) => faulty(q[1]) - faulty(p[1])).map(([flag, group]) => {
      const bad = faulty(group), steps = new Map(), id = `${i}${flag}`; // of a fault: where it first is one; heads where it never is are notes
      const begins = group.map(f => [f, bad ? f[4][0]?.[0] : f[3][0][0]]), notes = begins.filter(([, at]) => at === undefined).length;
      begins.filter(([, at]) => at !== undefined).sort((p, q) => p[1] - q[1]).forEach(([f, at]) => steps.set(at, [...(steps.get(at) ?? []), f]));
      const list = [...steps], few = state.all[id] ? list : list.slice(0, bad ? 6 : 3), most = state.all[id] ? Infinity : 24;
      const rows = few.map(([at, heads]) => `<li>${escape(stepName(run, run.steps[at]))}: ${heads.slice(0, most).map(f => `<button type="button" data-run="${i}" data-layer="${f[0]}" data-head="${f[1]}" data-at="${at}">${escape(run.layers[f[0]].short)}.${f[1]}</button>`).join(" ")}${heads.length > most ? ` <span>and ${count(heads.length - most)} more</span>` : ""}</li>`);
      const more = list.length > few.length || few.some(([, heads]) => heads.length > most) ? `<button type="button" class="more" data-all="${escape(id)}">all of them</button>` : "";
      const also = notes ? ` On ${plural(notes, "head")} it is no fault at any step.` : "";
      return `<div class="finding${bad ? "" : " calm"}"><b>${letter(i)}${escape(flag)}</b>, ${plural(group.length - notes, "head")}, first at ${escape(stepName(run, run.steps[list[0][0]]))}: <span>${escape(about(flag).meaning)}.${also}</span></div>
        <ul class="places heads">${rows.join("")}</ul>${more}`;
    });
  });
  element("firsts").innerHTML = parts.join("") || `<p class="none">No head raises a flag at any step.</p>`;
}
function missing() {
  const parts = [], list = (title, items, id) => {
    if (!items.length) return;
    const few = state.all[id] ? items : items.slice(0, FEW);
    parts.push(`<h3>${title}</h3><ul class="places">${few.map(x => `<li>${x}</li>`).join("")}</ul>${items.length > few.length ? `<button type="button" class="more" data-all="${id}">and ${count(items.length - few.length)} more</button>` : ""}`);
  };
  const go = (step, text) => `<button type="button" data-step="${step}">${escape(text)}</button>`;
  shown().forEach((run, i) => {
    list(`${letter(i)}Steps that are missing`, run.gaps.map(g => `${go(g.after + g.every, g.missing === 1 ? `step ${count(g.after + g.every)}` : `steps ${count(g.after + g.every)} to ${count(g.before - g.every)}`)} <span>${g.missing === 1 ? "" : `${count(g.missing)} checkpoints, `}one every ${count(g.every)} steps otherwise</span>`), `gap${i}`);
    list(`${letter(i)}Sources that could not be read`, run.failed.map(([step, words]) => `${go(step, stepName(run, step))} <span>${escape(words)}</span>`), `failed${i}`);
    const groups = new Map();
    run.same.forEach((first, s) => { if (first !== null) groups.set(first, [...(groups.get(first) ?? [first]), s]); });
    list(`${letter(i)}Steps with equal queries, keys and norms`, [...groups.values()].map(g => g.slice(0, 12).map(s => go(run.steps[s], run.numbered ? count(run.steps[s]) : run.sources[s])).join(" = ") + (g.length > 12 ? ` <span>and ${count(g.length - 12)} more</span>` : "")), `same${i}`);
    list(`${letter(i)}Not shown`, run.aside.map(([source, reason]) => `${escape(source)} <span>${escape(reason)}</span>`), `aside${i}`);
  });
  list("Equal queries, keys and norms in several runs", DATA.duplicates.filter(g => new Set(g.map(x => x[0])).size > 1).map(g => escape(g.slice(0, 6).map(([run, step]) => `${run} ${count(step)}`).join(" = "))), "across");
  list("Sources that could not be read and whose step is not known", DATA.unplaced.map(escape), "unplaced");
  element("missing").innerHTML = parts.join("");
  element("card-missing").hidden = !parts.length;
}
function chips() {
  const runs = shown(), counts = new Map();
  runs.forEach((run, i) => run.findings.forEach(([, , flag, , faults]) => {
    if (!counts.has(flag)) counts.set(flag, { heads: runs.map(() => 0), bad: false });
    counts.get(flag).heads[i]++;
    counts.get(flag).bad ||= faults.length > 0;
  }));
  element("flags").replaceChildren(...[...counts].sort((p, q) => q[1].bad - p[1].bad).map(([flag, { heads, bad }]) => {
    const button = document.createElement("button"), where = runs.length > 1 ? `${heads[0]} in A, ${heads[1]} in B` : plural(heads[0], "head");
    Object.assign(button, { type: "button", className: bad ? "flag" : "flag calm", title: about(flag).meaning, textContent: `${flag} · ${where}` });
    button.dataset.flag = flag;
    button.setAttribute("aria-pressed", String(state.flag === flag));
    return button;
  }));
}
function controls() {
  const fill = (id, items) => { const html = items.map(([v, text]) => `<option value="${escape(String(v))}">${escape(text)}</option>`).join(""); if (element(id).innerHTML !== html) element(id).innerHTML = html; };
  fill("metric", Object.entries(METRICS).map(([name, m]) => [name, m.label]));
  fill("run-a", RUNS.map((r, i) => [i, r.name]));
  fill("run-b", [["", "none"], ...RUNS.map((r, i) => [i, r.name]).filter(([i]) => i !== state.a)]);
  for (const id of ["run-a", "run-b"]) element(id).parentElement.hidden = RUNS.length < 2;
  Object.assign(element("metric"), { value: state.metric });
  Object.assign(element("run-a"), { value: String(state.a) });
  Object.assign(element("run-b"), { value: state.b === null ? "" : String(state.b) });
  Object.assign(element("over"), { value: state.over });
  Object.assign(element("axis"), { value: state.axis });
  element("axis").parentElement.hidden = !RUNS[state.a].numbered;
  element("explain").textContent = METRICS[state.metric].meaning;
  element("card-b").hidden = state.b === null;
  element("board").classList.toggle("two", state.b !== null);
}

// ---- drawing: the chosen column is unpacked first; the others follow for the table ----
let drawnAt = 0, turn = 0;
function moved() { // what depends on the step alone
  titles();
  shown().forEach((run, i) => { map(`map-${"ab"[i]}`, run); layers(`layers-${"ab"[i]}`, run); });
  lines(); headPanel(); numbers();
}
async function draw() {
  const mine = ++turn;
  drawnAt = innerWidth;
  await Promise.all(shown().map(run => load(run, state.metric)));
  if (mine !== turn) return; // another choice was made meanwhile
  element("body").hidden = false;
  controls(); chips(); moved(); firsts(); missing();
  for (const name of Object.keys(METRICS)) for (const run of shown()) if (!run.tables[name]) await load(run, name);
  if (mine === turn) numbers();
  document.documentElement.dataset.ready = String(mine);
}
function settle() { // a choice that exists, after the runs have changed
  buildSlots();
  const run = RUNS[state.a];
  state.step = slots.includes(state.step) ? state.step : state.step === null ? run.steps.at(-1) : nearest(slots, state.step);
  state.layer = Math.max(0, Math.min(state.layer, run.layers.length - 1));
  state.head = Math.max(0, Math.min(state.head, run.layers[state.layer].heads - 1));
  state.axis ??= run.numbered && regular(run) ? "scale" : "even";
  if (!run.numbered) state.axis = "even";
}
function regular(run) { // whether an axis to scale tells the steps apart
  const distances = run.steps.slice(1).map((s, i) => s - run.steps[i]).sort((x, y) => x - y);
  return !distances.length || run.steps.length < 3 || (run.steps.at(-1) - run.steps[0]) / run.steps.length < 8 * distances[distances.length >> 2];
}
function change(choice) {
  const keys = Object.keys(choice), onlyStep = keys.length === 1 && keys[0] === "step";
  Object.assign(state, choice);
  settle();
  if (onlyStep) moved(); else draw();
  remember();
}
const slide = by => { const at = slots.indexOf(state.step) + by; if (at >= 0 && at < slots.length) change({ step: slots[at] }); };

// ---- pointer and keys ----
function headUnder(id, event) {
  const { run, left, top, cellW, cellH } = charts[id], box = element(id).getBoundingClientRect();
  const head = Math.floor((event.clientX - box.left - left) / cellW), layer = Math.floor((event.clientY - box.top - top) / cellH);
  return layer >= 0 && layer < run.layers.length && head >= 0 && head < run.layers[layer].heads ? { layer, head } : null;
}
function listen() {
  for (const id of ["a", "b"]) {
    const heads = element(`map-${id}`), over = element(`layers-${id}`);
    heads.addEventListener("pointermove", event => { const at = headUnder(`map-${id}`, event); if (at) readout(id, charts[`map-${id}`].run, at.layer, at.head); });
    heads.addEventListener("pointerleave", () => readout(id, charts[`map-${id}`].run, state.layer, state.head));
    heads.addEventListener("click", event => { const at = headUnder(`map-${id}`, event); if (at) change(at); });
    over.addEventListener("click", event => {
      const { run, sx, box, rows, cell, spans } = charts[`layers-${id}`], at = over.getBoundingClientRect(), x = event.clientX - at.left, layer = Math.floor((event.clientY - at.top - box.top) / cell);
      const step = run.steps[spans.findIndex(([from, to]) => sx(from) <= x && x < sx(to))];
      if (layer >= 0 && layer < rows) change({ layer, step: step ?? state.step });
    });
    for (const [node, side] of [[heads, "head"], [over, "step"]]) node.addEventListener("keydown", event => {
      const step = { PageUp: -1, PageDown: 1 }[event.key] ?? (side === "step" ? { ArrowLeft: -1, ArrowRight: 1 }[event.key] : undefined);
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ...(side === "head" ? { ArrowLeft: [0, -1], ArrowRight: [0, 1] } : {}) }[event.key];
      if (step) { event.preventDefault(); slide(step); }
      if (!move) return;
      event.preventDefault();
      const layer = state.layer + move[0], head = state.head + move[1];
      if (head >= 0 && layer >= 0 && layer < RUNS[state.a].layers.length && (move[0] || head < RUNS[state.a].layers[layer].heads)) change({ layer, head });
    });
  }
  element("lines").addEventListener("click", event => { const line = event.target.closest("[data-head]"); if (line) change({ head: Number(line.dataset.head) }); });
  element("slot").addEventListener("input", () => change({ step: slots[Number(element("slot").value)] }));
  element("back").addEventListener("click", () => slide(-1));
  element("on").addEventListener("click", () => slide(1));
  for (const id of ["metric", "over", "axis"]) element(id).addEventListener("change", () => change({ [id]: element(id).value }));
  element("run-a").addEventListener("change", () => { const a = Number(element("run-a").value); change({ a, b: state.b === a ? null : state.b, axis: null }); });
  element("run-b").addEventListener("change", () => change({ b: element("run-b").value === "" ? null : Number(element("run-b").value) }));
  element("flags").addEventListener("click", event => { const flag = event.target.closest("button")?.dataset.flag; if (flag) change({ flag: state.flag === flag ? null : flag }); });
  const open = event => {
    const all = event.target.closest("[data-all]"), row = event.target.closest("[data-at]"), step = event.target.closest("[data-step]");
    if (all) { state.all[all.dataset.all] = true; firsts(); missing(); }
    else if (row) change({ layer: Number(row.dataset.layer), head: Number(row.dataset.head), step: shown()[Number(row.dataset.run)].steps[Number(row.dataset.at)] });
    else if (step) change({ step: Number(step.dataset.step) });
  };
  element("firsts").addEventListener("click", open);
  element("missing").addEventListener("click", open);
  element("guide").querySelector("summary").addEventListener("click", () => { state.guide = !element("guide").open; remember(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("hashchange", () => { recall(); draw(); });
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { if (innerWidth !== drawnAt) draw(); }, 120); });
}

// ---- the choice in the address ----
function remember() {
  const choice = new URLSearchParams({ layer: RUNS[state.a].layers[state.layer].short, head: state.head, metric: state.metric, step: state.step, over: state.over, axis: state.axis });
  if (RUNS.length > 1) { choice.set("a", state.a); choice.set("b", state.b ?? "none"); }
  if (!state.guide) choice.set("guide", "closed");
  storeChoice(choice);
}
function recall() {
  const choice = choiceInAddress(), opening = DATA.opening, among = (name, list) => list.includes(choice.get(name)) ? choice.get(name) : null, indices = RUNS.map((_, i) => String(i));
  state.a = Number(among("a", indices) ?? opening.run);
  const b = choice.get("b") ?? (opening.two && !choice.has("a") ? "1" : "none");
  state.b = indices.includes(b) && Number(b) !== state.a ? Number(b) : null;
  state.metric = among("metric", Object.keys(METRICS)) ?? opening.metric;
  state.over = among("over", ["median", "min", "max"]) ?? state.over;
  state.axis = among("axis", ["scale", "even"]);
  state.step = choice.has("step") && Number.isFinite(Number(choice.get("step"))) ? Number(choice.get("step")) : null;
  const layer = RUNS[state.a].layers.findIndex(l => l.short === choice.get("layer")), head = Number(choice.get("head"));
  state.layer = layer >= 0 ? layer : opening.layer;
  state.head = layer >= 0 ? (Number.isInteger(head) ? head : 0) : opening.head;
  settle();
}
function start() {
  if (!RUNS.length) { element("empty").hidden = false; return; }
  state.guide = choiceInAddress().get("guide") !== "closed";
  element("guide").open = state.guide && innerWidth >= 980;
  listen();
  recall();
  draw();
}
start();
