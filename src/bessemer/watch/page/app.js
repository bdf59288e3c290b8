// The page: list of runs, one run with its tabs, the live stream, keys.
import { $, bytes, count, defaults, duration, el, exported, get, others, readState, runPath, show, state, writeState } from "./dom.js";
import { Board, chartNames, lineColour, systemNames, xText } from "./charts.js";
import { checkpointsPanel, comparePanel, controlBar, eventsPanel, layersPanel, openHelp, planPanel, ranksPanel, samplesPanel, specPanel } from "./panels.js";

const TABS = { curves: "Curves", events: "Events", plan: "Plan", spec: "Spec", samples: "Samples", checkpoints: "Checkpoints", ranks: "Ranks", compare: "Compare", layers: "Layers", system: "System" };
const PANELS = { events: eventsPanel, plan: planPanel, spec: specPanel, samples: samplesPanel, checkpoints: checkpointsPanel, ranks: ranksPanel, compare: comparePanel, layers: layersPanel };
const INCIDENTS = ["veto", "judged_late", "rollback", "alarm", "started", "control", "spec_changed", "failed", "interrupted", "stopped", "stop", "not_recovered", "recovered", "exclude", "lower_lr", "guard_reopened", "guard_gave_way", "profiled"];
const MARKED = [...INCIDENTS, "saved", "finished", "evaluation"];
const AXES = ["step", "tokens", "time"];
const page = { runs: [], control: false, facts: null, events: [], names: null, pulse: null, board: null, source: null, drawnRows: 0 };

// ---- theme
function setTheme(theme) {
  const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.classList.toggle("dark", dark);
  page.board?.redraw();
}
const flipTheme = () => { writeState({ theme: document.documentElement.classList.contains("dark") ? "light" : "dark" }); setTheme(state.theme); };

// ---- list of runs
function drawRuns() {
  const words = $("#find-run").value.toLowerCase(), shown = page.runs.filter((run) => run.name.toLowerCase().includes(words));
  $("#run-list").replaceChildren(...shown.map((run) => {
    const overlaid = others().indexOf(run.name), total = run.total_steps && run.step < run.total_steps ? ` of ${count(run.total_steps)}` : "";
    const numbers = [run.step === null ? "no step yet" : `step ${count(run.step)}${total}`, run.validation_loss ?? run.mean_loss ? `loss ${(run.validation_loss ?? run.mean_loss).toFixed(3)}` : null];
    const box = run.name === state.run ? null : el("input", { type: "checkbox", checked: overlaid >= 0, title: "Draw over the current run", "aria-label": `Draw ${run.name} over the current run`, onchange: () => overlay(run.name),
      vars: { "--swatch": overlaid >= 0 ? `var(--c${(overlaid + 1) % 6})` : "var(--soft)" } });
    return el("li", { class: `${run.state}${run.name === state.run ? " current" : ""}` },
      el("a", { href: `?run=${encodeURIComponent(run.name)}`, "aria-current": run.name === state.run ? "page" : null, onclick: (press) => { if (press.ctrlKey || press.metaKey) return; press.preventDefault(); openRun(run.name); } },
        el("span", { class: "dot", title: run.state }), el("span", { class: "name" }, run.name), el("small", {}, numbers.filter(Boolean).join(" · "))), box);
  }));
}

function overlay(name) {
  const runs = others().includes(name) ? others().filter((one) => one !== name) : [...others(), name];
  writeState({ with: runs.join("|") });
  drawRuns();
  drawLegend();
  page.board?.invalidate();
  if (state.tab === "compare") openTab("compare");
}

// ---- one run
// All runs that the search shows, as many as one comparison takes.
function overlayShown() {
  const words = $("#find-run").value.toLowerCase(), shown = page.runs.map((run) => run.name).filter((name) => name !== state.run && name.toLowerCase().includes(words));
  writeState({ with: others().length ? "" : shown.slice(0, 31).join("|") });
  drawRuns();
  drawLegend();
  page.board?.invalidate();
  if (state.tab === "compare") openTab("compare");
}

async function openRun(name, push = true) {
  $("#runs").classList.remove("open");
  if (push) writeState({ run: name, from: "", to: "", wide: "" }, true);
  page.source?.close();
  page.board?.destroy();
  Object.assign(page, { board: null, facts: null, events: [], pulse: null, names: null });
  drawRuns();
  document.title = name ? `${name} · Bessemer` : "Bessemer";
  if (!name) { $("#main").replaceChildren(el("p", { class: "empty" }, page.runs.length ? "Choose a run." : "No runs in this folder yet. `bessemer train SPEC` starts one.")); return listen(); }
  $("#main").replaceChildren(el("div", { class: "title" }, el("h1", {}, name), el("span", { class: "pill", id: "state" }), el("span", { class: "soft", id: "where" })), el("div", { class: "progress" }, el("i")), el("p", { class: "note", id: "reason" }),
    el("div", { class: "tiles", id: "tiles" }), el("div", { id: "control-place" }),
    el("div", { class: "tabs", role: "tablist" }, Object.entries(TABS).map(([tab, label]) => el("button", { role: "tab", "data-tab": tab, onclick: () => openTab(tab) }, label))), el("div", { id: "panel", role: "tabpanel" }));
  listen();
  try {
    [page.facts] = await Promise.all([get(runPath(name)), readEvents(), readNames()]);
  } catch (error) { return $("#panel").replaceChildren(el("p", { class: "empty" }, error.message)); }
  if (state.run === name) openTab(state.tab);
}

const readNames = async () => { page.names = (await get(`${runPath(state.run)}/names`)).names; };
async function readEvents() {
  const run = state.run, answer = await get(`${runPath(run)}/events`, { x: state.x });
  if (run !== state.run) return;
  page.events = answer.events;
  setMarks();
}

function setMarks() {
  const kinds = state.marks === "all" ? MARKED : INCIDENTS, marked = page.events.filter((event) => kinds.includes(event.kind));
  if (page.board) page.board.setEvents(marked, marked.map((event) => event.place));
}

async function openTab(tab) {
  writeState({ tab: TABS[tab] ? tab : "curves" });
  document.querySelectorAll("[role=tab]").forEach((button) => button.setAttribute("aria-selected", button.dataset.tab === state.tab));
  const panel = $("#panel");
  if (!panel || !page.facts) return;
  page.board?.destroy();
  page.board = null;
  panel.dataset.tab = "";
  if (state.tab === "curves" || state.tab === "system") openCurves(panel);
  else {
    const run = state.run;
    panel.replaceChildren(el("p", { class: "empty" }, "Reading…"));
    let content;
    try { content = await PANELS[tab](run, page.facts, page.events); } catch (error) { content = [el("p", { class: "empty" }, error.message)]; }
    if (run === state.run && state.tab === tab) panel.replaceChildren(...content);
  }
  panel.dataset.tab = state.tab;
}

// New content for an open tab, unless it holds what somebody has typed or asked for.
async function refreshTab() {
  const { run, tab } = state, panel = $("#panel");
  if (panel.dataset.tab !== tab || $("#dialog").open || panel.querySelector("input")?.value || panel.querySelector("button:disabled, .verdict:not(:empty)")) return;
  const content = await PANELS[tab](run, page.facts, page.events);
  if (run === state.run && tab === state.tab) panel.replaceChildren(...content);
}

function openCurves(panel) {
  const choice = (options, key, change) => el("span", { class: "group" }, options.map((option) => el("button", { "aria-pressed": String(state[key] === option), "data-value": option, onclick: () => change(option) }, option || "all")));
  const smooth = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth, "aria-label": "Smoothing", oninput: () => { writeState({ smooth: smooth.value }); page.board.redraw(); } });
  const find = el("input", { type: "search", id: "find", value: state.find, placeholder: "Find charts ( / )", "aria-label": "Find charts", oninput: () => { writeState({ find: find.value }); showCharts(); } });
  panel.replaceChildren(el("div", { class: "tools" }, choice(AXES, "x", setAxis), el("label", {}, "smooth", smooth), el("button", { id: "log", "aria-pressed": String(!!state.log), onclick: flipLog }, "log"),
    el("button", { id: "marks", "aria-pressed": String(state.marks === "all"), title: "Also mark saves and evaluations (m)", onclick: flipMarks }, "all marks"), el("button", { id: "reset", onclick: () => page.board.setRange(null) }, "whole range"), find),
    el("div", { class: "legend", id: "legend" }), el("div", { class: "charts", id: "charts" }));
  page.board = new Board($("#charts"), state.run);
  page.board.plan = page.facts.against_plan;
  page.board.onerror = (error) => setLink(error.message, true);
  page.board.onrange = (range) => { $("#reset").hidden = !range; };
  page.board.onrange(page.board.range);
  page.board.onanswer = (answer) => { $("#legend").dataset.sampled = answer.sampled; drawLegend(answer); };
  showCharts();
  setMarks();
  drawLegend();
}

function showCharts() {
  if (!page.board) return;
  const names = state.tab === "system" ? systemNames(page.names) : chartNames(page.names);
  page.board.setNames(names);
  if (!names.length) $("#legend").replaceChildren("No readings yet: they are taken every five seconds while a run trains.");
  page.board.load();
}

function drawLegend(answer) {
  const legend = $("#legend");
  if (!legend) return;
  const runs = others().length ? [state.run, ...others()] : [];
  legend.replaceChildren(...runs.map((name, index) => el("span", {}, el("i"), name)), answer?.sampled ? el("span", {}, `a sample of the steps; ${Math.round(100 * answer.read)} % read`) : "");
  legend.querySelectorAll("i").forEach((swatch, index) => { swatch.style.background = lineColour(index); });
}

function setAxis(axis) {
  writeState({ x: axis, from: "", to: "" });
  readEvents();
  openTab(["system", "layers", "ranks"].includes(state.tab) ? state.tab : "curves");
}
const flipLog = () => { writeState({ log: state.log ? "" : "1" }); $("#log")?.setAttribute("aria-pressed", String(!!state.log)); page.board?.redraw(); if (!window.uPlot) page.board?.invalidate(); };
const flipMarks = () => { writeState({ marks: state.marks ? "" : "all" }); $("#marks")?.setAttribute("aria-pressed", String(!!state.marks)); setMarks(); };

// ---- numbers at the top
function drawHead(pulse) {
  const { summary, last } = pulse, done = summary.step ?? 0, total = summary.total_steps, rate = last?.step_s;
  $("#state").replaceChildren(el("span", { class: `dot ${summary.state}` }), summary.state);
  $("#state").className = `pill ${summary.state}`;
  const left = total && rate && summary.state === "running" ? `, about ${duration((total - done) * rate)} left` : "";
  $("#where").textContent = total ? `step ${done.toLocaleString("en")} of ${total.toLocaleString("en")}${left}` : `step ${done.toLocaleString("en")}`;
  if (last?.tokens) $("#where").textContent += ` · ${count(last.tokens)} tokens`;
  $(".progress i").style.width = `${total ? Math.min(100, (100 * done) / total) : 0}%`;
  $("#reason").textContent = summary.reason;
  const plan = page.facts?.against_plan, ratio = (key) => (plan?.[key]?.ratio ? `${plan[key].ratio.toFixed(2)} of plan` : "");
  const tile = (label, value, note = "") => el("div", { class: "tile" }, el("span", {}, label), el("b", {}, value), note && el("small", {}, note));
  const tiles = [tile("loss (of 32)", summary.mean_loss === null ? "–" : summary.mean_loss.toFixed(4)), tile("validation", summary.validation_loss === null ? "–" : summary.validation_loss.toFixed(4))];
  if (last) tiles.push(tile("tokens/s", show("", last.tokens_per_s), ratio("tokens/s")), tile("MFU", show("mfu", last.mfu), ratio("MFU")), tile("memory", show("memory_bytes", last.memory_bytes), ratio("memory")),
    tile("gradient norm", show("", last.grad_norm), last.clipped ? "clipped" : ""), tile("learning rate", show("lr", last.lr)), tile("time of a step", show("step_s", last.step_s), last.data_wait_s > 0.02 * last.step_s ? `waits ${duration(last.data_wait_s)}` : ""));
  const system = summary.state === "running" ? pulse.system : null, gpu = system && system.gpu_power_w !== undefined;
  if (gpu) tiles.push(tile("GPU busy", show("gpu_busy_share", system.gpu_busy_share), `${show("gpu_power_w", system.gpu_power_w)}, ${show("gpu_temperature_c", system.gpu_temperature_c)}`));
  else if (system) tiles.push(tile("processor busy", show("cpu_busy_share", system.cpu_busy_share), bytes(system.ram_bytes)));
  $("#tiles").replaceChildren(...tiles);
  const wanted = page.control && summary.state === "running";
  if (wanted && !$("#control")) $("#control-place").replaceChildren(controlBar(state.run));
  if (!wanted) $("#control-place").replaceChildren();
}

// ---- live
function setLink(text, lost = false) { $("#link").textContent = text; $("#link").classList.toggle("lost", lost); }

function listen() {
  page.source?.close();
  if (exported) { drawHead(exported.pulse); return setLink(`written ${new Date(exported.time * 1000).toLocaleString()}`); }
  if (document.hidden) return; // a browser allows six connections to a server
  const source = (page.source = new EventSource(`api/stream${state.run ? `?run=${encodeURIComponent(state.run)}` : ""}`));
  source.onopen = () => setLink("live");
  source.onerror = () => { setLink("connection lost; trying again", true); if (source.readyState === EventSource.CLOSED) setTimeout(() => source === page.source && listen(), 1500); };
  source.addEventListener("runs", (event) => { page.runs = JSON.parse(event.data); drawRuns(); });
  source.addEventListener("run", (event) => onPulse(JSON.parse(event.data)));
}

async function onPulse(pulse) {
  const before = page.pulse, run = state.run;
  page.pulse = pulse;
  drawHead(pulse);
  const cut = before && before.generation !== pulse.generation;
  document.body.dataset.rows = pulse.rows;
  if (!page.names || !before) return;
  try {
    if (pulse.events !== before.events || cut) await readEvents();
    if (cut || before.rows < 20 || pulse.validations !== before.validations || (pulse.system && !(page.names.system ?? []).length)) { await readNames(); if (run === state.run) showCharts(); }
    const changed = { events: pulse.events !== before.events, checkpoints: pulse.events !== before.events, samples: pulse.events !== before.events || pulse.rows !== before.rows };
    if (run === state.run && changed[state.tab]) await refreshTab();
    // With a million rows, a few more would not be seen.
    if (run === state.run && (cut || pulse.validations !== before.validations || Math.abs(pulse.rows - page.drawnRows) >= Math.max(1, pulse.rows / 2000))) {
      page.drawnRows = pulse.rows;
      if (page.board) page.board.rows = pulse.rows;
      page.board?.invalidate();
    }
  } catch (error) { setLink(error.message, true); }
}

// ---- keys
document.addEventListener("keydown", (press) => {
  if (press.ctrlKey || press.metaKey || press.altKey || $("#dialog").open) return;
  const typing = /INPUT|TEXTAREA|SELECT/.test(press.target.tagName) && press.target.type !== "range" && press.target.type !== "checkbox";
  if (typing) { if (press.key === "Escape") press.target.blur(); return; }
  const at = page.runs.findIndex((run) => run.name === state.run), next = { j: at + 1, k: at - 1 }[press.key];
  const actions = { "/": () => ($("#find") ?? $("#find-run")).focus(), l: flipLog, m: flipMarks, t: flipTheme, r: () => page.board?.setRange(null), x: () => setAxis(AXES[(AXES.indexOf(state.x) + 1) % 3]), "?": openHelp };
  if (next !== undefined && page.runs[next]) openRun(page.runs[next].name);
  else if (/^[0-9]$/.test(press.key) && state.run) openTab(Object.keys(TABS)[(Number(press.key) + 9) % 10]);
  else if (actions[press.key]) actions[press.key]();
  else return;
  press.preventDefault();
});

$("#dialog").querySelector("header button").addEventListener("click", () => $("#dialog").close());
$("#dialog").addEventListener("click", (press) => press.target === $("#dialog") && $("#dialog").close());
$("#dialog").addEventListener("close", () => $("#dialog .content").replaceChildren());
$("#menu").addEventListener("click", () => $("#menu").setAttribute("aria-expanded", $("#runs").classList.toggle("open")));
$("#theme").addEventListener("click", flipTheme);
$("#help").addEventListener("click", openHelp);
$("#find-run").addEventListener("input", drawRuns);
$("#tick-shown").addEventListener("click", overlayShown);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(state.theme));
document.addEventListener("visibilitychange", () => { if (document.hidden) page.source?.close(); else listen(); });
window.addEventListener("popstate", () => { readState(); setTheme(state.theme); openRun(state.run, false); });

async function start() {
  readState();
  setTheme(state.theme);
  try {
    const overview = await get("runs");
    Object.assign(page, { runs: overview.runs, control: overview.control && !exported });
    const first = overview.first || (overview.runs.length === 1 ? overview.runs[0].name : "");
    if (!state.run && first) writeState({ run: first });
  } catch (error) { $("#main").replaceChildren(el("p", { class: "empty" }, error.message)); setTimeout(start, 2000); return; }
  await openRun(state.run || page.runs[0]?.name || "", !state.run);
  document.body.dataset.ready = "1";
}
start();
