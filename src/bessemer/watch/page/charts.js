// Curves. Every chart shares the x range, the cursor and the marks; bins come for the pixels that are shown.
import { colour, count, duration, el, exported, get, openDialog, openReport, others, runPath, show, state, writeState } from "./dom.js";

// The first charts: the losses, what preference and RL runs are judged by, then what every run has.
const JUDGED = ["reward", "kl", "margin", "accuracy", "chosen_shift", "entropy", "answer_tokens"];
export const MAIN = ["loss", "validation:loss", ...JUDGED.flatMap((name) => [name, `validation:${name}`]), "lr", "grad_norm", "tokens_per_s", "mfu", "memory_bytes", "data_wait_s", "step_s"];
const HIDDEN = /^(step|tokens|clipped|time|clip|rank_step_s\..*|validation:(step|tokens|seconds))$/;
const TITLES = { "validation:loss": "validation loss", lr: "learning rate", grad_norm: "gradient norm", tokens_per_s: "tokens per second", mfu: "MFU",
  memory_bytes: "memory", data_wait_s: "wait for data", step_s: "time of a step", own_s: "own work", bubble_s: "idle between stages", kl: "KL divergence",
  "system:gpu_busy_share": "GPU busy", "system:cpu_busy_share": "processor busy", "system:ram_bytes": "memory in use", "system:process_ram_bytes": "memory of the process", "system:disk_free_bytes": "free disk",
  "system:gpu_power_capped_share": "GPU clock held by the power limit", "system:gpu_throttled_share": "GPU clock held by heat or supply", "system:gpu_clock_mhz": "GPU clock", "system:gpu_power_w": "GPU power", "system:gpu_temperature_c": "GPU temperature", "system:gpu_memory_bytes": "GPU memory" };
const PLANNED = { tokens_per_s: "tokens/s", mfu: "MFU", memory_bytes: "memory" };
export const title = (name) => TITLES[name] ?? name.replace(/^validation:per_source\./, "validation loss: ").replace("validation:", "validation ").replace("system:", "").replace(/_bytes_per_s$/, "").replace(/_s$/, "_time").replaceAll("_", " ");
export const lineColour = (index) => colour(`--c${index % 6}`);
const MOST_MARKS = 300;

export function chartNames(names) {
  const all = [...names.steps, ...names.validation.map((name) => `validation:${name}`)];
  const known = MAIN.filter((name) => all.includes(name));
  return [...known, ...all.filter((name) => !known.includes(name) && !HIDDEN.test(name))];
}

// Exponential smoothing that starts unbiased; gaps stay gaps.
export function smoothed(values, weight) {
  let [average, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    average = weight * average + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return average / total;
  });
}

const RAW = /^(step|time|gpu_throttle|gpu_max_clock_mhz)$/;
export const systemNames = (names) => {
  const shown = (names.system ?? []).filter((name) => !RAW.test(name)), first = (name) => (name.startsWith("gpu") ? 0 : name.startsWith("tokens") ? 1 : 2);
  return shown.sort((a, b) => first(a) - first(b)).map((name) => `system:${name}`);
};

export class Board {
  // All charts of a run. `node` holds the cards.
  constructor(node, run) {
    Object.assign(this, { node, run, charts: new Map(), visible: new Set(), events: [], plan: null, range: null, timer: 0, asked: 0 });
    if (state.from !== "" && state.to !== "") this.range = [Number(state.from), Number(state.to)];
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const chart = this.charts.get(entry.target.dataset.name);
        if (entry.isIntersecting) this.visible.add(chart); else this.visible.delete(chart);
        if (entry.isIntersecting && chart && chart.stale) this.load(30);
      }
    }, { rootMargin: "200px" });
    this.resizer = new ResizeObserver((entries) => { for (const entry of entries) this.charts.get(entry.target.parentNode?.dataset.name)?.resize(); });
  }

  setNames(names) {
    let pattern = null;
    try { pattern = state.find ? new RegExp(state.find, "i") : null; } catch { pattern = null; }
    const wanted = names.filter((name) => !pattern || pattern.test(name) || pattern.test(title(name)));
    for (const [name, chart] of this.charts) if (!wanted.includes(name)) { chart.destroy(); this.charts.delete(name); this.visible.delete(chart); }
    wanted.forEach((name, index) => {
      if (!this.charts.has(name)) this.charts.set(name, new Chart(this, name));
      const { card } = this.charts.get(name);
      if (this.node.children[index] !== card) this.node.insertBefore(card, this.node.children[index] ?? null);
    });
    this.node.dataset.charts = wanted.length;
  }

  // Ask for the visible charts after a moment: one request a run.
  load(wait = 0) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.fetch(), wait);
  }

  invalidate(wait = 0) {
    for (const chart of this.charts.values()) chart.stale = true;
    this.load(wait);
  }

  async fetch() {
    const charts = [...this.visible].filter((chart) => chart.stale);
    if (!charts.length) return;
    if (!window.uPlot) return charts.forEach((chart) => chart.drawImage());
    const names = charts.map((chart) => chart.name), asked = ++this.asked, runs = [this.run, ...others()];
    for (const chart of charts) Object.assign(chart, { stale: false, asked });
    const [low, high] = this.range ?? ["", ""];
    const bins = Math.min(2000, Math.max(200, ...charts.map((chart) => chart.plot.clientWidth)));
    const query = { names: names.join("|"), x: state.x, from: low, to: high, bins };
    try {
      const answers = await Promise.all(runs.map((run) => get(`${runPath(run)}/series`, query).catch((error) => (run === this.run ? Promise.reject(error) : null))));
      for (const chart of charts) if (chart.asked === asked) chart.setAnswers(runs, answers); // not over a newer one
      const first = answers[0];
      Object.assign(this.node.dataset, { rows: first.rows, generation: first.generation, sampled: first.sampled });
      this.onanswer?.(first);
      if (first.sampled) this.invalidate(1500);
    } catch (error) {
      for (const chart of charts) chart.stale = true;
      this.onerror?.(error);
    }
  }

  setRange(range) {
    this.range = range;
    writeState({ from: range ? String(range[0]) : "", to: range ? String(range[1]) : "" });
    for (const chart of this.charts.values()) chart.zoom();
    this.invalidate(120);
    this.onrange?.(range);
  }

  redraw() { for (const chart of this.charts.values()) chart.build(); }

  setEvents(events, places) {
    this.events = events.map((event, index) => ({ ...event, place: places[index] })).filter((event) => event.place !== null && event.place !== undefined);
    for (const chart of this.charts.values()) chart.drawMarks();
  }

  destroy() {
    clearTimeout(this.timer);
    this.observer.disconnect();
    this.resizer.disconnect();
    for (const chart of this.charts.values()) chart.destroy();
  }
}

class Chart {
  constructor(board, name) {
    Object.assign(this, { board, name, stale: true, u: null, answers: null, bad: [] });
    this.read = el("span", { class: "read" });
    this.plot = el("div", { class: "plot" });
    this.wide = el("button", { class: "plain", "aria-label": `Large or small: ${title(name)}`, title: "Large or small", onclick: () => this.toggle() }, "⤢");
    this.card = el("section", { class: "chart", "data-name": name, "aria-label": title(name) }, el("header", {}, el("h3", {}, title(name)), this.read, this.wide), this.plot);
    this.card.classList.toggle("wide", state.wide === name);
    board.observer.observe(this.card);
    board.resizer.observe(this.plot);
  }

  toggle() {
    const wide = this.card.classList.toggle("wide");
    writeState({ wide: wide ? this.name : "" });
  }

  // Without the chart library the server draws.
  drawImage() {
    this.stale = false;
    if (exported) return this.plot.replaceChildren("This file was written without the chart library.");
    const [low, high] = this.board.range ?? ["", ""];
    const query = new URLSearchParams({ name: this.name, x: state.x, from: low, to: high, log: state.log, row: this.board.rows ?? 0 });
    this.plot.style.height = "auto";
    this.plot.replaceChildren(el("img", { alt: title(this.name), src: `api/${runPath(this.board.run)}/chart.svg?${query}` }));
  }

  setAnswers(runs, answers) {
    this.runs = runs;
    this.answers = answers.map((answer) => {
      const group = answer?.groups.find((one) => this.name in one.series);
      return group ? { x: group.x, ...group.series[this.name] } : null;
    });
    const lines = this.lines();
    if (this.u && lines.length === this.u.series.length) { this.u.setData(this.data); } else this.build(lines);
    this.card.dataset.points = this.data[0].length;
    this.showLast();
  }

  // The tables of uPlot and what each column is: band and raw values of a single run, smoothed lines of all.
  lines() {
    const weight = Number(state.smooth), shown = this.answers.map((answer, index) => ({ answer, index })).filter(({ answer }) => answer);
    const single = shown.length === 1, columns = [{}], tables = [];
    const drawable = (values) => (state.log ? values.map((value) => (value > 0 ? value : null)) : values);
    [this.bad, this.readColumn] = [[], 1];
    for (const { answer, index } of shown) {
      const stroke = () => lineColour(index), faint = () => `${lineColour(index)}${single ? "55" : "33"}`, table = [answer.x];
      const few = answer.x.length < 40, points = { show: few, size: 4 };
      if (single && answer.low) {
        table.push(drawable(answer.high), drawable(answer.low));
        columns.push({ kind: "high", width: 0, points: { show: false } }, { kind: "low", width: 0, points: { show: false } });
      }
      const mean = drawable(answer.mean), smooth = weight > 0 && !few && this.name !== "lr";
      if (smooth) { table.push(mean); columns.push({ kind: "raw", stroke: faint, width: 1, points: { show: false } }); }
      table.push(smooth ? smoothed(mean, weight) : mean);
      if (index === shown[0].index) this.readColumn = columns.length;
      columns.push({ kind: "line", label: this.runs[index], stroke, width: 1.6, points: { ...points, stroke, fill: stroke } });
      tables.push(table);
      if (single && answer.bad) this.bad = answer.x.filter((_, i) => answer.bad[i]);
    }
    this.data = tables.length > 1 ? uPlot.join(tables) : (tables[0] ?? [[], []]);
    return tables.length ? columns : [{}, {}];
  }

  build(columns) {
    if (!this.answers || !window.uPlot) return;
    const lines = columns ?? this.lines();
    this.u?.destroy();
    this.plot.replaceChildren();
    const grid = { stroke: () => colour("--grid"), width: 1 }, axis = { stroke: () => colour("--soft"), grid, ticks: { show: false }, font: "11px system-ui" };
    const band = lines[1]?.kind === "high";
    this.u = new uPlot({
      width: Math.max(100, this.plot.clientWidth), height: this.plot.clientHeight || 190, padding: [14, 16, 0, 0], legend: { show: false },
      cursor: { sync: { key: "board", scales: ["x", null] }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, focus: { prox: -1 } },
      scales: { x: { time: false, range: (_, low, high) => this.board.range ?? [low ?? 0, high ?? 1] }, y: { distr: state.log ? 3 : 1, range: state.log ? undefined : yRange } },
      axes: [{ ...axis, size: 26, values: (_, ticks) => ticks.map(xText) }, { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : show(this.name, tick))) }],
      series: lines.map(({ kind, ...line }) => ({ ...line, spanGaps: false })),
      bands: band ? [{ series: [1, 2], fill: `${lineColour(0)}22` }] : [],
      hooks: { setSelect: [(u) => this.select(u)], setCursor: [(u) => this.showCursor(u)], draw: [(u) => this.drawMore(u), () => this.drawMarks()], ready: [(u) => u.over.addEventListener("dblclick", () => this.board.setRange(null))] },
    }, this.data, this.plot);
  }

  select(u) {
    if (u.select.width < 6) return;
    const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.board.setRange(range);
  }

  zoom() { this.u?.setData(this.data); }

  resize() {
    if (!this.u || !this.plot.clientWidth) return;
    this.u.setSize({ width: this.plot.clientWidth, height: this.plot.clientHeight });
  }

  showCursor(u) {
    const at = u.cursor.idx;
    if (at === null || at === undefined) return this.showLast();
    this.read.textContent = `${xText(this.data[0][at])} · ${show(this.name, this.data[this.readColumn]?.[at])}`;
  }

  showLast() {
    const values = this.data[this.readColumn] ?? [];
    let last = values.length - 1;
    while (last >= 0 && (values[last] === null || values[last] === undefined)) last--;
    this.read.textContent = last >= 0 ? show(this.name, values[last]) : "";
  }

  // What the plan expects, and where values were not finite.
  drawMore(u) {
    const { ctx, bbox } = u, planned = this.board.plan?.[PLANNED[this.name]]?.plan;
    ctx.save();
    if (planned && others().length === 0) {
      const y = u.valToPos(planned, "y", true);
      if (y > bbox.top && y < bbox.top + bbox.height) {
        ctx.strokeStyle = colour("--soft");
        ctx.setLineDash([6, 5]);
        ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
        ctx.fillStyle = colour("--soft"); ctx.font = `${11 * devicePixelRatio}px system-ui`; ctx.textAlign = "right";
        ctx.fillText("plan", bbox.left + bbox.width - 4, y - 4);
      }
    }
    ctx.strokeStyle = colour("--bad");
    ctx.setLineDash([]);
    ctx.lineWidth = 2 * devicePixelRatio;
    for (const x of this.bad) {
      const at = u.valToPos(x, "x", true);
      ctx.beginPath(); ctx.moveTo(at, bbox.top + bbox.height); ctx.lineTo(at, bbox.top + bbox.height - 9 * devicePixelRatio); ctx.stroke();
    }
    ctx.restore();
  }

  // Marks are buttons over the plot: the keyboard reaches them, and each opens its report. Close ones are one.
  drawMarks() {
    if (!this.u) return;
    const { u } = this, { min, max } = u.scales.x, over = u.over, clusters = [];
    over.querySelectorAll(".mark").forEach((mark) => mark.remove());
    if (min === null || min === undefined) return;
    for (const event of this.board.events) {
      if (event.place < min || event.place > max) continue;
      const left = u.valToPos(event.place, "x"), last = clusters[clusters.length - 1];
      if (last && left - last.left < 9) last.events.push(event);
      else if (clusters.length < MOST_MARKS) clusters.push({ left, events: [event] });
    }
    over.append(...clusters.map(({ left, events }) => {
      const worst = [...events].sort((a, b) => rank(a) - rank(b))[0], text = events.slice(0, 6).map((event) => event.line).join("\n");
      const node = el("button", { class: `mark k-${worst.kind.replace(/\W/g, "")}`, "aria-label": text, title: text, "data-kind": worst.kind, onclick: () => openEvents(this.board.run, events) });
      node.style.left = `${left}px`;
      node.style.setProperty("--drop", `${u.over.clientHeight}px`);
      node.addEventListener("mousedown", (press) => press.stopPropagation());
      return node;
    }));
  }

  destroy() {
    this.board.observer.unobserve(this.card);
    this.u?.destroy();
    this.card.remove();
  }
}

const ORDER = ["veto", "failed", "rollback", "stop", "alarm", "profiled", "control", "started", "interrupted", "exclude", "report"];
const rank = (event) => { const at = ORDER.indexOf(event.kind); return at < 0 ? 99 : at; };
const yRange = (_, low, high) => (low === null || low === undefined ? [0, 1] : low === high ? [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1] : uPlot.rangeNum(low, high, 0.06, true));
export const xText = (value) => (state.x === "time" ? duration(value) : count(value));

// One event with a report opens it; several are listed first.
export function openEvents(run, events) {
  const reports = [...new Set(events.map((event) => event.report).filter(Boolean))];
  if (reports.length === 1) return openReport(run, reportName(reports[0]));
  openDialog(events.length === 1 ? events[0].kind.replaceAll("_", " ") : `${events.length} events`, eventTable(run, events));
}

const reportName = (file) => file.replace(/\.md$/, "");

// Where the time of profiled steps went, and the traces themselves.
async function openProfile(run, event) {
  const place = (name) => `${runPath(run)}/profiles/${encodeURIComponent(name)}`, parts = el("div", {}, el("p", { class: "note" }, "Reading the trace…"));
  const links = event.traces.flatMap((name, rank) => [" ", el("a", { href: `api/${place(name)}`, download: name }, event.traces.length > 1 ? `rank ${rank}` : name)]);
  openDialog(`${event.steps} steps, profiled`, parts, el("p", { class: "note" }, "Traces for Perfetto or chrome://tracing:", links));
  const row = (cells, tag = "td") => el("tr", {}, cells.map((cell, i) => el(tag, { class: i ? "num" : "" }, cell)));
  try {
    const { reason, wall_us: wall, parts: spent, kernels } = await get(`${place(event.traces[0])}/parts`);
    if (reason) return parts.replaceChildren(el("p", { class: "empty" }, reason));
    const ms = (us) => duration(us / 1e6 / event.steps), share = (us) => `${((100 * us) / wall).toFixed(1)} %`;
    const rows = Object.entries(spent).sort((a, b) => b[1] - a[1]).map(([part, us]) => row([part, ms(us), share(us)]));
    const longest = kernels.map((one) => row([one.name, String(one.calls / event.steps), ms(one.us), share(one.us)]));
    parts.replaceChildren(el("p", { class: "note" }, `Rank 0: ${ms(wall)} a step under the profiler, ${duration(event.step_s)} without it.`),
      el("div", { class: "wrap" }, el("table", { id: "profile-parts" }, row(["part", "a step", "share"], "th"), rows)), el("h2", {}, "Longest kernels and operations"), el("div", { class: "wrap" }, el("table", {}, row(["name", "calls a step", "a step", "share"], "th"), longest)));
  } catch (error) { parts.replaceChildren(el("p", { class: "empty" }, error.message)); }
}

export function eventTable(run, events) {
  const rows = events.map((event) => el("tr", {},
    el("td", { class: "num" }, Number.isFinite(event.step) ? event.step.toLocaleString("en") : ""),
    el("td", {}, el("span", { class: `badge k-${String(event.kind).replace(/\W/g, "")}` }, String(event.kind).replaceAll("_", " "))),
    el("td", {}, event.line, event.report ? [" ", el("button", { onclick: () => openReport(run, reportName(event.report)) }, "Report")] : null,
      event.kind === "profiled" && event.traces && !exported ? [" ", el("button", { onclick: () => openProfile(run, event) }, "Profile")] : null),
    el("td", { class: "soft hide-phone" }, event.time ? new Date(event.time * 1000).toLocaleString() : "")));
  return el("div", { class: "wrap" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { class: "num" }, "step"), el("th", {}, "event"), el("th", {}, "what happened"), el("th", { class: "hide-phone" }, "time"))), el("tbody", {}, rows)));
}
