// The page of checkpoints: its data. Numbers are unpacked column by column, when they are first shown.

const DATA = JSON.parse(element("data").textContent);
const RUNS = DATA.runs, METRICS = DATA.metrics;
const state = { a: 0, b: null, metric: DATA.opening.metric, layer: 0, head: 0, step: null, axis: null, over: "median", flag: null, guide: true, all: {} };
const NEEDS = { sqrtF: ["F"], symmetry: ["S", "F"] }; // numbers that follow from columns; the others are columns
const FROM = { sqrtF: ([F]) => Math.sqrt(F), symmetry: ([S, F]) => F ? S / F : NaN };
const about = name => Object.hasOwn(DATA.flags, name) ? DATA.flags[name] : { meaning: "a flag of another version of Locater", way_out: "", severity: "note" };

RUNS.forEach(run => {
  run.offsets = run.layers.map((_, i) => run.layers.slice(0, i).reduce((sum, l) => sum + l.heads, 0));
  run.heads = run.layers.reduce((sum, l) => sum + l.heads, 0);
  run.widest = Math.max(1, ...run.layers.map(l => l.heads));
  run.stored = Math.max(...run.rows) + 1;
  run.index = new Map(run.steps.map((step, i) => [step, i]));
  run.tables = {};
  run.loading = {};
  // breaks.get(i): steps that are missing between steps i and i + 1 of this run, the first and the last of them
  run.breaks = new Map();
  [...run.failed.map(([step]) => [step, step]), ...run.gaps.map(g => [g.after + g.every, g.before - g.every])].forEach(([from, to]) => {
    const i = run.steps.findLastIndex(s => s < from), before = run.breaks.get(i);
    if (i >= 0 && i + 1 < run.steps.length) run.breaks.set(i, before ? [Math.min(from, before[0]), Math.max(to, before[1])] : [from, to]);
  });
  run.marks = run.steps.map(() => null); // flags by step, found when they are first shown
});

// ---- numbers ----
async function unpack(text) { // base64 of a zlib stream of four planes: the upper 32 bits of every float64
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const planes = new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
  const count = planes.length / 4, numbers = new Float64Array(count), words = new Uint32Array(numbers.buffer);
  for (let i = 0; i < count; i++) words[2 * i + 1] = planes[i] * 16777216 + (planes[i + count] << 16 | planes[i + 2 * count] << 8 | planes[i + 3 * count]);
  return numbers;
}
function load(run, name) { // a promise of the numbers, by head and then by stored step
  run.loading[name] ??= (async () => {
    const parts = Object.hasOwn(NEEDS, name) ? await Promise.all(NEEDS[name].map(part => load(run, part))) : null;
    run.tables[name] = parts ? parts[0].map((_, i) => FROM[name](parts.map(part => part[i]))) : await unpack(run.values[name]);
    return run.tables[name];
  })();
  return run.loading[name];
}
function number(run, name, at, layer, head) { // NaN where there is none, and as long as the column is not unpacked
  if (!run || at < 0 || !run.tables[name] || head >= (run.layers[layer]?.heads ?? 0)) return NaN;
  return run.tables[name][(run.offsets[layer] + head) * run.stored + run.rows[at]];
}
function over(run, name, at, layer, how) { // over the heads of a layer that have a number
  const values = [];
  for (let h = 0; h < run.layers[layer].heads; h++) { const v = number(run, name, at, layer, h); if (v === v) values.push(v); }
  if (!values.length) return NaN;
  values.sort((x, y) => x - y);
  const middle = values.length >> 1;
  return how === "min" ? values[0] : how === "max" ? values.at(-1) : values.length % 2 ? values[middle] : values[middle - 1] / 2 + values[middle] / 2;
}
const shown = () => [RUNS[state.a], ...(state.b === null ? [] : [RUNS[state.b]])];
const scales = new Map();
function scale(name) { // ends of the colours, over all steps of both runs; the 98th percentile: one extreme head does not hide the others
  const id = `${name} ${state.a} ${state.b}`;
  if (!scales.has(id)) {
    const values = [];
    shown().forEach(({ tables }) => { const skip = Math.ceil(tables[name].length / 20000) || 1; for (let i = 0; i < tables[name].length; i += skip) if (Number.isFinite(tables[name][i])) values.push(tables[name][i]); });
    values.sort((x, y) => x - y);
    const at = share => values.length ? values[Math.min(values.length - 1, Math.floor(values.length * share))] : 0;
    const most = Math.max(METRICS[name].least, Math.abs(at(0.02)), at(0.98)) || 1;
    scales.set(id, { most, diverging: METRICS[name].diverging || at(0.02) < -0.02 * most });
  }
  return scales.get(id);
}

// ---- flags ----
const within = (spans, at) => spans.some(([from, to]) => from <= at && at <= to);
function flagsOf(run, at, layer, head) { // [flag, whether it is a fault here]
  if (!run || at < 0) return [];
  if (!run.marks[at]) {
    run.marks[at] = new Map();
    run.findings.forEach(([l, h, flag, spans, faults]) => {
      if (!within(spans, at)) return;
      const key = run.offsets[l] + h;
      if (!run.marks[at].has(key)) run.marks[at].set(key, []);
      run.marks[at].get(key).push([flag, within(faults, at)]);
    });
  }
  return run.marks[at].get(run.offsets[layer] + head) ?? [];
}

// ---- steps: of both runs, with those that failed and one for each gap ----
let slots = []; // steps in order
function buildSlots() {
  const steps = new Set();
  shown().forEach(run => {
    run.steps.forEach(s => steps.add(s));
    run.failed.forEach(([s]) => steps.add(s));
    run.gaps.forEach(g => { for (let i = 1; i <= Math.min(g.missing, 12); i++) steps.add(g.after + i * g.every); });
  });
  slots = [...steps].sort((x, y) => x - y);
}
const indexOf = run => run.index.get(state.step) ?? -1; // of the chosen step in a run; -1: it has none
function absent(run, step) { // why a run has no checkpoint at a step
  const failed = run.failed.find(([s]) => s === step), gap = run.gaps.find(g => g.after < step && step < g.before);
  return failed ? `could not be read: ${failed[2]}` : gap ? `missing: the run has a checkpoint every ${gap.every.toLocaleString("en")} steps, but not here` : "no checkpoint of this run at this step";
}
const stepName = (run, step) => run.numbered ? `step ${step.toLocaleString("en")}` : run.sources[step] ?? `${step}`;
const nearest = (steps, step) => steps.reduce((best, s) => Math.abs(s - step) < Math.abs(best - step) ? s : best, steps[0]);
