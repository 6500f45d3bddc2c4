// The page of a run: events of /events are drawn; text of the run is only ever put in as text.
"use strict";

const $ = (id) => document.getElementById(id);
const COLOURS = ["a", "b", "c", "d", "e", "f"];
const WORKERS_A_PAGE = 100;
const UNKNOWN = "not known: the broker does not answer";
const state = { status: null, records: null, sort: ["state", 1], page: 0, dead: [] };

function make(tag, text = "", cls = "") {
  const element = document.createElement(tag);
  if (text !== "") element.textContent = text;
  if (cls) element.className = cls;
  return element;
}
function fill(parent, children) { parent.replaceChildren(...children); }
function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

// --- numbers as text ---

function short(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(digits)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(digits)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(digits)}k`;
  if (size > 0 && size < 1e-3) return (+value.toPrecision(digits)).toExponential();
  return Number.isInteger(value) ? String(value) : String(+value.toPrecision(digits));
}
function duration(seconds) {
  if (!(seconds >= 0)) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}
const last = (values) => values ? values.findLast((value) => value !== null && value !== undefined) : undefined;
function recent(values, count = 16) {
  const known = (values || []).slice(-count).filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : undefined;
}

// --- charts ---

const charts = {};
const visible = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = charts[entry.target.id];
    if (chart) { chart.isVisible = entry.isIntersecting; if (chart.isVisible) draw(chart); }
  }
});

// series: [label, colour, more]; data: () -> [x, ...columns] or null
function chart(id, series, data, more = {}) {
  charts[id] = { element: $(id), series, data, more, plot: null, drawn: null, isVisible: false };
  visible.observe($(id));
}
function draw(one) {
  if (!one.isVisible || one.drawn === state.records) return;
  const data = state.records && one.data(state.records);
  if (!data || !data[0].length) {
    if (!one.plot) fill(one.element, [make("p", "nothing on record yet", "empty")]);
    return;
  }
  one.drawn = state.records;
  const series = typeof one.series === "function" ? one.series(state.records) : one.series;
  if (one.plot && one.plot.series.length === series.length + 1) { one.plot.setData(data); return; }
  if (one.plot) one.plot.destroy();
  fill(one.element, []);
  const axis = { stroke: colour("quiet"), grid: { stroke: colour("rule"), width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 26 };
  const options = {
    ...size(one.element),
    cursor: { sync: { key: "step" }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { range: one.more.range || ((plot, low, high) => [Math.min(0, low ?? 0), (high || 1) * 1.05]) } },
    axes: [{ ...axis, incrs: WHOLE_STEPS }, { ...axis, size: 52, values: (plot, ticks) => ticks.map((value) => short(value)) }],
    series: [{ label: "step", value: (plot, value) => short(value ?? last(plot.data[0])) }, ...series.map(([label, tone, own = {}]) => ({
      label, stroke: colour(tone), width: 1.5, spanGaps: true, points: { show: data[0].length < 2 },
      value: (plot, value, i, row) => short(row === null ? last(plot.data[i]) : value, 4), ...(typeof own === "function" ? own() : own),
    }))],
    bands: one.more.bands ? one.more.bands(series) : [],
  };
  one.plot = new uPlot(options, data, one.element);
}
function size(element) { return { width: Math.max(240, element.clientWidth), height: element.classList.contains("tall") ? 230 : 170 }; }
function redraw() { for (const one of Object.values(charts)) { if (one.plot) one.plot.destroy(); one.plot = one.drawn = null; draw(one); } }
let resizing = 0;
new ResizeObserver(() => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => { for (const one of Object.values(charts)) if (one.plot) one.plot.setSize(size(one.element)); });
}).observe($("learning"));

const WHOLE_STEPS = [1, 2, 5].flatMap((first) => Array.from({ length: 12 }, (_, i) => first * 10 ** i)).sort((one, two) => one - two);
const EDGE = { width: 0.5, alpha: 0.5, points: { show: false }, class: "edge" };
const filled = (tone) => () => ({ fill: colour(tone) + "30" });
const isKnown = (records, name) => (records[name] || []).some((value) => value !== null);
const columns = (...names) => (records) => names.some((name) => isKnown(records, name)) ? [records.step, ...names.map((name) => records[name])] : null;
const datasets = (records) => [...new Set(records.evaluations.map((row) => row.dataset))];

function smooth(values = [], window = 9) {
  return values.map((_, i) => {
    const near = values.slice(Math.max(0, i - (window >> 1)), i + (window >> 1) + 1).filter((value) => value !== null);
    return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
  });
}
function learned(records) {
  const tables = [[records.step, records.reward, smooth(records.reward)]];
  for (const name of datasets(records)) {
    const rows = new Map(records.evaluations.filter((row) => row.dataset === name).map((row) => [row.step, row]));
    const ordered = [...rows.values()].sort((one, two) => one.step - two.step);
    tables.push([ordered.map((row) => row.step), ...["mean_reward", "low", "high"].map((part) => ordered.map((row) => row[part]))]);
  }
  if (!tables[0][0].length && tables.length === 1) return null;
  return tables.length === 1 ? tables[0] : uPlot.join(tables);
}
chart("chart-reward", (records) => [
  ["reward", "b", { width: 0.6, alpha: 0.5 }], ["reward, mean of 9", "b"],
  ...datasets(records).flatMap((name, i) => {
    const tone = ["a", "c", "d"][i % 3];
    return [[name, tone, { width: 2.2, points: { show: true, size: 6 } }],
      ["low", tone, EDGE], ["high", tone, EDGE]];
  }),
], learned, {
  range: (plot, low, high) => [Math.min(0, low ?? 0), high > 0.5 && high <= 1 ? 1 : (high || 1) * 1.05],
  bands: (series) => series.flatMap(([label, tone], i) => label === "high" ? [{ series: [i + 1, i], fill: colour(tone) + "28" }] : []),
});
function shares(records) {
  const names = Object.keys(records.lags || {});
  if (!names.length) return null;
  const totals = records.step.map((_, i) => names.reduce((sum, name) => sum + (records.lags[name][i] || 0), 0));
  const below = records.step.map(() => 0);
  const stacked = names.map((name) => records.step.map((_, i) => {
    below[i] += totals[i] ? (records.lags[name][i] || 0) / totals[i] : 0;
    return totals[i] ? below[i] : null;
  }));
  return [records.step, ...stacked];
}
chart("chart-lag", (records) => Object.keys(records.lags || {}).map((name, i, names) => [`lag ${name}`, COLOURS[i % 6], () => ({
  width: 1, fill: i === 0 ? colour(COLOURS[0]) + "60" : undefined,
  value: (plot, value, at, row) => {
    row ??= plot.data[0].length - 1;  // without the mouse the newest step
    if (!state.records.lags[name]) return "–";
    const total = names.reduce((sum, _, j) => sum + (Object.values(state.records.lags)[j][row] || 0), 0);
    return total ? `${Math.round(100 * (state.records.lags[name][row] || 0) / total)}%` : "–";
  },
})]), shares, {
  range: () => [0, 1],
  bands: (series) => series.slice(1).map(([, tone], i) => ({ series: [i + 2, i + 1], fill: colour(tone) + "60" })),
});
chart("chart-loss", [["loss", "a"]], columns("loss"));
chart("chart-grad", [["gradient norm", "f"]], columns("grad_norm"));
chart("chart-kl", [["to the reference", "c"], ["of the update", "d"]], columns("kl_loss", "approx_kl"));
chart("chart-entropy", [["entropy", "b"]], columns("entropy"));
chart("chart-clip", [["share of tokens clipped", "d"]], columns("pg_clipfrac"));
chart("chart-ess", [["of tokens", "a"], ["of samples", "c"]], columns("lag/all/ess_token", "lag/all/ess_sequence"));
chart("chart-lr", [["learning rate", "e"]], columns("lr"));
chart("chart-tokens", [["trained", "a"], ["sampled by workers", "b"]], columns("tokens_per_s", "rollout_tokens_per_s"));
chart("chart-steps", [["steps per second", "a"]], columns("steps_per_s"));
chart("chart-times", [["wait for samples", "f"], ["train", "a"], ["publish", "c"], ["save", "d"]], columns("wait_s", "train_s", "publish_s", "save_s"));
chart("chart-groups", [["queued", "e"], ["leased", "b"], ["ready", "c"]], columns("queued", "leased", "ready"));
chart("chart-waste", [["wasted tokens in all", "f", filled("f")]], columns("wasted_tokens"));

// --- what changes with every status ---

// adds to the row of each process: lag, tokens per second, and `lost` for one that is gone
const rates = new Map();
function measure(s) {
  const at = Object.fromEntries(s.worker_columns.map((name, i) => [name, i])), now = performance.now() / 1000;
  s.worker_columns = [...s.worker_columns, "lag", "tokens_per_s"];
  for (const row of s.workers) {
    const tokens = row[at.tokens] || 0;
    let rate = rates.get(row[at.name]) || { since: now, tokens, value: 0 };
    if (now - rate.since >= 3) rate = { since: now, tokens, value: Math.max(0, tokens - rate.tokens) / (now - rate.since) };
    rates.set(row[at.name], rate);
    const isLost = row[at.state] === "gone";
    if (isLost) row[at.state] = "lost";
    row.push(row[at.role] === "rollout" && row[at.version] >= 0 ? s.version - row[at.version] : null, isLost ? 0 : rate.value);
  }
}
function showStatus() {
  const s = state.status;
  measure(s);
  const stalled = s.stalled;
  document.title = `${s.run || "slimebus"} · ${s.step ?? "?"}/${s.num_steps ?? "?"}`;
  $("run").textContent = s.run || "slimebus";
  $("state").textContent = stalled ? `stalled for ${duration(stalled.since_s)}` : s.state || "unknown";
  const isSilent = s.problem && s.state !== "finished";
  if (isSilent) $("state").textContent = "no answer";
  $("state").className = `badge ${stalled || isSilent ? "stalled" : s.state === "running" ? "running" : ""}`;
  $("progress").max = s.num_steps || 1;
  $("progress").value = s.step || 0;
  $("steps").textContent = `step ${s.step ?? "?"} of ${s.num_steps ?? "?"}, version ${s.version ?? "?"}`;
  const left = s.pace && s.pace.step_s && s.step < s.num_steps ? s.pace.step_s * (s.num_steps - s.step) : null;
  $("eta").textContent = left && s.state === "running" && !s.problem ? `${duration(left)} left` : "";
  warn(s.problem);
  showConfig();
  const waiting = [...(stalled ? [stalled.reason] : []), ...(s.waiting || [])];
  fill($("waiting"), (isSilent ? [UNKNOWN] : waiting.length ? [...new Set(waiting)] : ["nobody waits"]).slice(0, 12).map((line) => make("li", line)));
  fill($("advice"), (s.advice && s.advice.length ? s.advice : ["none before steps were trained"]).map((line) => make("li", line)));
  showPhases(s);
  showWaste(s);
  showWorkers();
  showTiles();
  fill($("warnings"), s.warnings && s.warnings.length ? s.warnings.map((row) => {
    const line = make("tr", "", row.level === "ERROR" ? "lost" : "");
    line.append(make("td", new Date(row.time * 1000).toLocaleTimeString()), make("td", row.role), make("td", row.level), make("td", row.text, "text"));
    return line;
  }) : [make("caption", "no process on this machine has logged any", "empty")]);
  const dead = s.groups ? s.groups.dead : 0;
  $("dead-count").textContent = dead ? `${dead} groups failed too often` : "none";
}
// the page's server ended: with its broker
function showLost() {
  const isOver = state.status?.state === "finished";
  warn(isOver ? "the run is over" : "The run's broker does not answer; this is what it last said. The page goes on when it is back.");
  if (isOver) return;
  $("state").textContent = "no answer";
  $("state").className = "badge stalled";
  $("eta").textContent = "";
  fill($("waiting"), [make("li", UNKNOWN)]);
}
function warn(text) {
  $("problem").hidden = !text;
  $("problem").textContent = text || "";
  $("problem").className = text === "the run is over" ? "over" : "";
}
function showPhases(s) {
  const names = ["queued", "leased", "ready", "assigned", "committed", "dropped", "dead"];
  const spans = names.filter((name) => s.groups && name in s.groups).map((name, i) => {
    const span = make("span");
    span.id = `phase-${name}`;
    span.append(make("b", short(s.groups[name], 4)), ` ${name === "committed" ? "trained, kept" : name}`);
    return span;
  });
  const ends = Object.entries(s.moves || {}).filter(([move]) => />(dropped|dead) /.test(move)).map(([move, count]) =>
    make("span", `${short(count)} × ${move.replace(/^\S+>(dropped|dead) /, "$1: ")}`));
  fill($("phases"), [...spans, ...ends.slice(0, 12)]);
}
function showWaste(s) {
  const rows = Object.entries(s.waste || {}).sort((one, two) => two[1].tokens - one[1].tokens);
  const unused = Object.entries(s.counted || {}).filter(([what]) => what.startsWith("unused: "));
  fill($("waste"), [...rows.map(([reason, waste]) => cells([[reason, "text"], [short(waste.tokens, 4) + " tokens", "number"], [`${waste.groups} groups`, "number"]])),
    ...unused.map(([what, count]) => cells([[`${what.slice(8)} (trained without a gradient)`, "text"], ["", ""], [`${count} groups`, "number"]])),
    ...(rows.length || unused.length ? [] : [cells([["nothing was wasted", "empty"]])])]);
}
function cells(values, tag = "td") {
  const row = make("tr");
  for (const [text, cls] of values) row.append(make(tag, text, cls));
  return row;
}
function showTiles() {
  const s = state.status || {}, r = state.records || { step: [] };
  const rows = s.workers || [];
  const at = Object.fromEntries((s.worker_columns || []).map((name, i) => [name, i]));
  const workers = rows.filter((row) => row[at.role] === "rollout");
  const present = workers.filter((row) => !["lost", "fenced"].includes(row[at.state]));
  const evals = (r.evaluations || []).slice().sort((one, two) => one.version - two.version);
  const newest = evals[evals.length - 1];
  fill($("tiles"), [
    ["reward, last 16 points", short(recent(r.reward))],
    [newest ? `${newest.dataset} at version ${newest.version}` : "evaluation", newest ? short(newest.mean_reward) : "–"],
    ["steps per second", short(recent(r.steps_per_s))],
    ["tokens/s trained", short(recent(r.tokens_per_s))],
    ["tokens/s sampled", short(recent(r.rollout_tokens_per_s))],
    ["lag, mean and largest", s.lag ? `${s.lag.mean.toFixed(2)} · ${s.lag.max}` : "–"],
    ["workers, lost", `${present.length} · ${workers.length - present.length}`],
    ["wasted tokens", short(Object.values(s.waste || {}).reduce((sum, waste) => sum + waste.tokens, 0))],
  ].map(([label, value]) => {
    const tile = make("div", "", "tile");
    tile.append(make("b", value), make("span", label));
    return tile;
  }));
}

// --- processes ---

const HEADS = [["name", "name"], ["role", "role"], ["state", "state"], ["version", "version"], ["lag", "lag"], ["tokens_per_s", "tokens/s"], ["leases", "leases"],
  ["silent_s", "last heard"], ["sync_s", "sync s"]];
const STATE_ORDER = { lost: 0, fenced: 1, draining: 3, serving: 4, joined: 5 };
function showWorkers() {
  const s = state.status;
  if (!s || !s.workers) return;
  const at = Object.fromEntries(s.worker_columns.map((name, i) => [name, i]));
  const wanted = $("worker-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = s.workers.filter((row) => wanted.every((word) => [row[at.name], row[at.role], row[at.state]].some((text) => String(text).toLowerCase().includes(word))));
  const [by, way] = state.sort;
  const key = (row) => by === "state" ? STATE_ORDER[row[at.state]] ?? 2 : row[at[by]] ?? -Infinity;
  rows.sort((one, two) => way * (key(one) < key(two) ? -1 : key(one) > key(two) ? 1 : 0) || (one[at.name] < two[at.name] ? -1 : 1));
  const pages = Math.max(1, Math.ceil(rows.length / WORKERS_A_PAGE));
  state.page = Math.min(state.page, pages - 1);
  const shown = rows.slice(state.page * WORKERS_A_PAGE, (state.page + 1) * WORKERS_A_PAGE);
  const all = s.bounds && s.bounds.max_clients ? s.bounds.max_clients.used : s.workers.length;
  $("worker-count").textContent = `${all} known${all > s.workers.length ? `, the first ${s.workers.length} listed` : ""}`;
  $("worker-page").textContent = `${rows.length ? state.page * WORKERS_A_PAGE + 1 : 0}–${state.page * WORKERS_A_PAGE + shown.length} of ${rows.length}`;
  $("worker-before").disabled = state.page === 0;
  $("worker-after").disabled = state.page === pages - 1;
  const body = $("worker-table").tBodies[0];
  while (body.rows.length > shown.length) body.deleteRow(-1);
  shown.forEach((row, i) => {
    const line = body.rows[i] || body.insertRow();
    const silent = row[at.state] !== "lost" && (row[at.silent_s] > 10 || String(row[at.state]).startsWith("blocked"));
    const cls = row[at.state] === "lost" ? "lost" : silent ? "silent" : "";
    if (line.className !== cls) line.className = cls;
    HEADS.forEach(([name], j) => {
      const value = row[at[name]];
      const text = name === "silent_s" ? (value < 10 ? "now" : `${duration(value)} ago`) : typeof value === "string" ? value : name === "version" && value < 0 ? "–" : short(value);
      const cell = line.cells[j] || Object.assign(line.insertCell(), { className: headClass(name) });
      if (cell.textContent !== text) cell.textContent = text;
    });
  });
}
function headClass(name) {
  return ["name", "role", "state"].includes(name) ? (name === "role" ? "fold" : "") : ["leases", "sync_s"].includes(name) ? "number fold" : "number";
}
function showHeads() {
  const row = make("tr");
  for (const [name, label] of HEADS) {
    const head = make("th", "", `${headClass(name)} ${state.sort[0] === name ? "sorted" : ""}`);
    const button = make("button", label);
    button.onclick = () => { state.sort = [name, state.sort[0] === name ? -state.sort[1] : 1]; showHeads(); showWorkers(); };
    head.append(button);
    row.append(head);
  }
  fill($("worker-table").tHead, [row]);
}

// --- what changes with the records ---

const STAGES = [["copy_s", "copy (trainer)", "d"], ["encode_s", "encode (trainer)", "f"], ["wire_s", "pull", "a"], ["verify_s", "verify", "c"], ["share_s", "share", "e"], ["load_s", "load", "b"]];
function showWeights() {
  const rows = state.records.weights || [];
  const longest = Math.max(1e-9, ...rows.map((row) => STAGES.reduce((sum, [name]) => sum + (row[name] || 0), 0)));
  fill($("stages"), STAGES.map(([, label, tone]) => {
    const span = make("span");
    const mark = make("i");
    mark.style.background = `var(--${tone})`;
    span.append(mark, label);
    return span;
  }));
  const head = cells([["version", ""], ["", ""], ["seconds", "number"], ["delta", "number fold"], ["workers", "number"], ["slowest", "fold"]], "th");
  fill($("versions"), [head, ...rows.map((row) => {
    const bar = make("div", "", "bar");
    for (const [name, label, tone] of STAGES) {
      const part = make("i");
      part.style.width = `${100 * (row[name] || 0) / longest}%`;
      part.style.background = `var(--${tone})`;
      part.title = `${label}: ${short(row[name])} s`;
      bar.append(part);
    }
    const total = STAGES.reduce((sum, [name]) => sum + (row[name] || 0), 0);
    const share = row.total_bytes ? `${short(row.delta_bytes)}B, ${(100 * row.delta_bytes / row.total_bytes).toFixed(1)}%` : "–";
    const line = cells([[String(row.version), ""], ["", ""], [short(total), "number"], [share, "number fold"], [String(row.workers), "number"],
      [row.slowest ? `${row.slowest} ${short(row.slowest_s)} s` : "–", "fold"]]);
    line.cells[1].append(bar);
    return line;
  })]);
}
function showRecords() {
  for (const one of Object.values(charts)) draw(one);
  showWeights();
  showTiles();
}

// --- samples ---

async function ask(path, how) {
  try {
    const answer = await fetch(path, how);
    return await answer.json();
  } catch (problem) {
    return { problem: `the page's server does not answer (${problem.message})` };
  }
}
async function loadGroups() {
  const found = await ask(`/groups?state=${$("group-state").value}&text=${encodeURIComponent($("group-text").value)}`);
  if (found.problem) { fill($("group-list"), [make("li", found.problem, "bad")]); return; }
  fill($("group-list"), found.length ? found.map((group) => {
    const line = make("li", `${group.group}${group.step >= 0 ? ` · step ${group.step}` : ""}${group.reason ? ` · ${group.reason}` : ""}`);
    line.dataset.group = group.group;
    line.dataset.state = group.state;
    line.onclick = () => loadGroup(line);
    return line;
  }) : [make("li", "no such groups now", "empty")]);
  const first = $("group-list").querySelector("[data-group]");
  if (first) loadGroup(first);
}
async function loadGroup(line) {
  for (const other of $("group-list").children) other.setAttribute("aria-selected", other === line);
  line.scrollIntoView({ block: "nearest" });
  state.group = await ask(`/group?id=${encodeURIComponent(line.dataset.group)}&state=${line.dataset.state}`);
  showGroup();
}
function showGroup() {
  const group = state.group;
  if (!group) return;
  if (group.problem) { fill($("group-view"), [make("p", group.problem, "bad")]); return; }
  const about = make("p", `${group.group}: ${group.state === "dumped" ? "kept" : group.state}${group.step >= 0 ? `, step ${group.step}` : ""}, ${group.num_samples} samples${group.state === "dumped" ? "" : `, made by ${group.worker || "nobody"}`}`
    + `${group.reason ? `, ${group.reason}` : ""}`, "quiet");
  const prompt = Object.entries(group.prompt).map(([name, text]) => make("div", `${name}: ${text}`, "prompt"));
  const how = document.querySelector("input[name=colour]:checked").value;
  const versions = group.samples.flatMap((sample) => sample.pieces.map((piece) => piece[3])).filter((version) => version >= 0);
  const newest = Math.max(...versions, 0);
  fill($("group-view"), [about, ...prompt, ...group.samples.map((sample, i) => {
    const box = make("div", "", "sample");
    const text = make("div", "", "tokens");
    let shown = 0;
    for (const [piece, count, trained, version, logprob] of sample.pieces) {
      const span = make("span", piece, trained ? "" : "given");
      paint(span, how, trained, newest - version, version, logprob);
      span.title = `${trained ? "trained" : "given"}, version ${version}, logprob ${short(logprob)}${count > 1 ? `, ${count} tokens` : ""}`;
      text.append(span);
      shown += count;
    }
    const more = sample.num_tokens > shown ? `, the first ${shown} shown` : "";
    box.append(make("div", `sample ${i}: reward ${sample.reward ?? "none"}, ${sample.status}, ${sample.num_tokens} tokens${more}`, "quiet"), text);
    return box;
  })]);
}
function paint(span, how, trained, behind, version, logprob) {
  if (!trained) return;
  const tone = how === "version" ? COLOURS[behind % 6] : how === "logprob" ? "f" : "c";
  const strength = how === "logprob" ? Math.min(90, Math.round(-(logprob ?? 0) * 18)) : 22;
  span.style.background = `color-mix(in srgb, var(--${tone}) ${strength}%, transparent)`;
}

// --- dead letters ---

async function loadDead() {
  const found = await ask("/groups?state=dead");
  $("dead-said").textContent = found.problem || "";
  state.dead = found.problem ? [] : found;
  $("dead-all").disabled = !state.dead.length;
  fill($("dead-table"), state.dead.length ? state.dead.map((group) => {
    const line = cells([[group.group, "text"], [group.reason, "text"], ["", ""]]);
    const button = make("button", "Replay");
    button.onclick = () => replay([group.group]);
    line.cells[2].append(button);
    return line;
  }) : [make("caption", "no dead letters", "empty")]);
}
async function replay(groups) {
  const done = await ask("/replay", { method: "POST", body: JSON.stringify({ groups }) });
  const said = done.problem || [`${Object.keys(done.done).length} queued again`, ...Object.entries(done.refused).map(([name, why]) => `${name}: ${why}`)].join("; ");
  await loadDead();
  $("dead-said").textContent = said;
}

// --- config ---

async function loadConfig() {
  state.config = await ask("/config");
  showConfig();
}
// settings that `slimebus set` changed have their value of now
function showConfig() {
  const rows = [], now = (state.status || {}).settings || {};
  const walk = (prefix, value) => {
    const name = prefix.split(".").pop();
    const isChanged = /^(broker|rollout)\.\w+$/.test(prefix) && name in now && String(now[name]) !== String(value) && now[name] !== "unbounded";
    if (value && typeof value === "object" && !Array.isArray(value)) for (const [key, one] of Object.entries(value)) walk(prefix ? `${prefix}.${key}` : key, one);
    else rows.push(cells([[prefix, ""], [isChanged ? `${now[name]} (at the start ${value})` : typeof value === "string" ? value : JSON.stringify(value), "text"]]));
  };
  const seen = JSON.stringify(now);
  if (!state.config || state.settings === seen && $("config-table").rows.length) return;
  state.settings = seen;
  walk("", state.config);
  fill($("config-table"), rows);
}

// --- events, keys, theme ---

function connect() {
  const source = new EventSource("/events");
  const take = (kind, show) => source.addEventListener(kind, (event) => {
    const begin = performance.now();
    state[kind === "status" ? "status" : "records"] = JSON.parse(event.data);
    show();
    (window.updates ||= []).push(performance.now() - begin);
    if (window.updates.length > 200) window.updates.shift();
  });
  take("status", showStatus);
  take("history", showRecords);
  source.onerror = () => {
    showLost();
    if (source.readyState === EventSource.CLOSED) { setTimeout(connect, 2000); }
  };
}
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("theme", name);
  redraw();
}
const otherTheme = () => document.documentElement.dataset.theme === "dark" ? "light" : "dark";
function stepGroup(by) {
  const lines = [...$("group-list").querySelectorAll("[data-group]")];
  const at = lines.findIndex((line) => line.getAttribute("aria-selected") === "true");
  if (lines[at + by]) loadGroup(lines[at + by]);
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const link = document.querySelector(`nav a[data-key="${CSS.escape(event.key)}"]`);
  if (link) { link.click(); document.querySelector(link.getAttribute("href")).focus({ preventScroll: true }); }
  else if (event.key === "/") { event.preventDefault(); $("worker-filter").focus(); }
  else if (event.key === "t") setTheme(otherTheme());
  else if (event.key === "?") $("help").showModal();
  else if (event.key === "j") stepGroup(1);
  else if (event.key === "k") stepGroup(-1);
});
$("theme").onclick = () => setTheme(otherTheme());
$("keys").onclick = () => $("help").showModal();
$("worker-filter").oninput = () => { state.page = 0; showWorkers(); };
$("worker-before").onclick = () => { state.page -= 1; showWorkers(); };
$("worker-after").onclick = () => { state.page += 1; showWorkers(); };
$("group-load").onclick = loadGroups;
$("group-state").onchange = loadGroups;
$("group-text").onkeydown = (event) => { if (event.key === "Enter") loadGroups(); };
$("dead-load").onclick = loadDead;
$("dead-all").onclick = () => replay(state.dead.map((group) => group.group));
for (const radio of document.querySelectorAll("input[name=colour]")) radio.onchange = showGroup;

setTheme(localStorage.getItem("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
showHeads();
connect();
loadConfig();
