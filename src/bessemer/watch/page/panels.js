// What the tabs beside the curves show: events, plan, spec, samples, checkpoints, processes, other runs, control.
import { $, bytes, count, duration, el, exported, get, openDialog, others, post, runPath, show, state } from "./dom.js";
import { eventTable, title, xText } from "./charts.js";
import { parallelCoordinates } from "./parallel.js";

const table = (columns, rows) => el("div", { class: "wrap" }, el("table", {},
  el("thead", {}, el("tr", {}, columns.map((name) => el("th", { class: name.endsWith("#") ? "num" : "" }, name.replace("#", ""))))),
  el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el("td", { class: columns[i].endsWith("#") ? "num" : "" }, cell)))))));
const empty = (text) => el("p", { class: "empty" }, text);
const text = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));

export function eventsPanel(run, facts, events) {
  const list = el("div", {}), find = el("input", { type: "search", placeholder: "Find events", "aria-label": "Find events", oninput: () => fill() });
  const fill = () => {
    const words = find.value.toLowerCase();
    const shown = events.filter((event) => !words || `${event.kind} ${event.line}`.toLowerCase().includes(words)).reverse();
    list.replaceChildren(shown.length ? eventTable(run, shown.slice(0, 500)) : empty("No events."), ...(shown.length > 500 ? [empty(`${shown.length - 500} older ones are not shown: find them by a word.`)] : []));
  };
  fill();
  return [el("div", { class: "tools" }, find), list];
}

export function planPanel(run, facts) {
  const parts = [], actual = facts.against_plan;
  if (actual) {
    const rows = Object.entries(actual).filter(([, value]) => value && typeof value === "object" && "run" in value);
    const write = (name, value) => (value === null ? "–" : name === "memory" ? bytes(value) : name === "MFU" ? `${(100 * value).toFixed(1)} %` : name === "time" ? duration(value) : count(value));
    parts.push(el("h2", {}, "Plan against actual"), table(["", "plan#", "run#", "run/plan#"], rows.map(([name, value]) => [name, write(name, value.plan), write(name, value.run), value.ratio === null ? "" : value.ratio.toFixed(2)])),
      el("p", { class: "note" }, [actual.error_bar === null || actual.error_bar === undefined ? "" : `The plan's error bar is ${(100 * actual.error_bar).toFixed(0)} %. `, actual.basis ?? ""]));
  }
  if (facts.decisions.length) parts.push(el("h2", {}, "Decisions"), table(["setting", "value", "reason", "source"], facts.decisions.map((one) => [el("code", {}, one.key), text(one.value), one.reason, el("span", { class: "soft" }, one.basis ? `${one.source}, ${one.basis}` : one.source)])));
  return parts.length ? parts : [empty("The run has no plan yet.")];
}

export const specPanel = (run, facts) => (facts.spec ? [el("pre", {}, facts.spec)] : [empty("The run has no spec yet.")]);

export async function samplesPanel(run) {
  const samples = await get(`${runPath(run)}/samples`);
  if (!samples.length) return [empty("This run has written no samples: list prompts in evaluate.samples. Runs of reinforcement learning store the answers that they train on.")];
  return samples.map((sample) => {
    const { from, prompt, answer, text: written, reward, ...rest } = sample;
    const details = Object.entries(rest).filter(([, value]) => value !== null && String(value).length < 80).map(([key, value]) => `${key} ${text(value)}`).join(" · ");
    return el("article", { class: "sample" }, el("div", { class: "soft" }, from, reward === undefined || reward === null ? "" : ` · reward ${show("", reward)}`),
      prompt ? el("p", { class: "soft" }, text(prompt)) : null, el("p", {}, text(answer ?? written ?? "")), el("div", { class: "soft" }, details));
  });
}

export async function checkpointsPanel(run) {
  const rows = await get(`${runPath(run)}/checkpoints`);
  if (!rows.length) return [empty("No checkpoint yet.")];
  return [table(["step#", "name", "size#", "age#", "validation#", "marks", "files"], rows.map((one) => {
    const verdict = el("span", { class: "verdict" });
    const check = exported ? "" : el("button", { onclick: async () => {
      check.disabled = true;
      verdict.textContent = " reading…";
      try {
        const answer = await get(`${runPath(run)}/checkpoints/${encodeURIComponent(one.name)}`);
        verdict.textContent = answer.sound ? ` sound, ${answer.files} files` : ` damaged: ${answer.reason}`;
      } catch (error) { verdict.textContent = ` ${error.message}`; }
      check.disabled = false;
    } }, "Verify");
    const marks = [...one.tags, one.best && "best", one.last && "last", one.confirmed && "confirmed"].filter(Boolean).join(", ");
    return [one.step.toLocaleString("en"), el("code", {}, one.name), bytes(one.bytes), duration(one.age_s), one.validation_loss === null ? "–" : one.validation_loss.toFixed(4), marks, el("span", {}, check, verdict)];
  }))];
}

// A surface of rows (ranks, layers) by columns (time), coloured from the lowest to the highest value; `bad` are red.
function heatmap(label, names, x, rows, { bad = [], log = false } = {}) {
  const scale = (value) => (log ? Math.log(Math.max(value, 1e-30)) : value);
  let [low, high] = [Infinity, -Infinity];
  for (const value of rows.flat()) if (value !== null && !(log && value <= 0)) [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (low > high && !bad.length) return null;
  const wide = x.length, canvas = el("canvas", { class: "heat", width: wide, height: rows.length, role: "img", "data-name": label, "aria-label": `${label}: ${names.length} rows from ${show(label, low)} to ${show(label, high)}` });
  canvas.style.height = `${Math.max(60, Math.min(420, 18 * rows.length))}px`;
  const context = canvas.getContext("2d"), image = context.createImageData(wide, rows.length), span = scale(high) - scale(low);
  rows.forEach((row, j) => row.forEach((value, i) => {
    const share = value === null ? 0 : span > 0 ? Math.max(0, (scale(value) - scale(low)) / span) : high > 0 ? 0.5 : 0;
    image.data.set([40 + 215 * share, 60 + 90 * share * (1 - share) * 2 + 60 * share, 120 - 80 * share, value === null ? 0 : 255], 4 * (j * wide + i));
  }));
  for (const [j, i] of bad) image.data.set([220, 20, 20, 255], 4 * (j * wide + i));
  context.putImageData(image, 0, 0);
  const red = new Set(bad.map(([j, i]) => j * wide + i)), read = el("span", { class: "read" });
  canvas.addEventListener("mousemove", (move) => {
    const i = Math.floor((move.offsetX / canvas.clientWidth) * wide), j = Math.floor((move.offsetY / canvas.clientHeight) * rows.length);
    if (rows[j]) read.textContent = `${names[j]} · ${xText(x[i])} · ${red.has(j * wide + i) ? "not finite" : show(label, rows[j][i])}`;
  });
  const ends = low > high ? "" : `; dark ${show(label, low)}, bright ${show(label, high)}${log ? ", logarithmic" : ""}`;
  return el("section", { class: "chart wide" }, el("header", {}, el("h3", {}, title(label)), read), canvas, el("p", { class: "note" }, `${xText(x[0])} to ${xText(x[x.length - 1])}; ${names[0]} above, ${names[names.length - 1]} below${ends}${bad.length ? "; red: not finite" : ""}`));
}

const LAYER_TITLES = { grad_norm: "gradient norm", update_ratio: "update ratio", dead: "dead units", saturated: "saturated units", rms: "activation", largest: "largest activation", logit: "largest attention logit", entropy: "attention entropy", weight_norm: "weight norm" };
const LINEAR = ["dead", "saturated", "entropy"];

// What the guard measured in each layer, a row of the picture for each.
export async function layersPanel(run) {
  const chosen = new Set(["grad_norm", "update_ratio", "dead"]), tools = el("div", { class: "tools" }), maps = el("div", { class: "charts" });
  const read = () => get(`${runPath(run)}/layers`, { x: state.x, from: state.from, to: state.to, quantities: [...chosen].join("|") });
  const draw = (answer) => {
    const shown = Object.entries(answer.maps).map(([name, { layers, rows, bad }]) => heatmap(LAYER_TITLES[name] ?? name, layers, answer.x, rows, { bad, log: !LINEAR.includes(name) }));
    maps.replaceChildren(...shown.filter(Boolean));
    tools.replaceChildren(...(exported ? [] : answer.available.map((name) => el("button", { "aria-pressed": String(chosen.has(name)), onclick: async () => { if (!chosen.delete(name)) chosen.add(name); draw(await read()); } }, LAYER_TITLES[name] ?? name))));
  };
  const answer = await read();
  if (!answer.x.length) return [empty("No layer sample yet: the guard takes one every guard.look_every steps.")];
  draw(answer);
  return [el("p", { class: "note" }, `${count(answer.x.length)} columns from ${xText(answer.x[0])} to ${xText(answer.x[answer.x.length - 1])}. A column shows the highest value of its samples.`), tools, maps];
}

// Columns `own_s.3` as one map a quantity: `{own_s: [["3", "ranks:own_s.3"]]}`.
function families(names) {
  const found = {};
  for (const name of names) {
    const at = name.lastIndexOf(".");
    if (at > 0) (found[name.slice(0, at)] ??= []).push([name.slice(at + 1), `ranks:${name}`]);
  }
  return found;
}

export async function ranksPanel(run, facts) {
  const { names } = await get(`${runPath(run)}/names`), maps = el("div", { class: "charts" }), parts = [];
  for (const [quantity, columns] of Object.entries(families(names.ranks ?? []))) {
    if (/^gpu_(throttle|max_clock_mhz)$/.test(quantity)) continue;
    const answer = await get(`${runPath(run)}/series`, { names: columns.map(([, name]) => name).join("|"), x: state.x, from: state.from, to: state.to, bins: 400 });
    const group = answer.groups.find((one) => one.journal === "ranks");
    const rows = group && columns.map(([, name]) => group.series[name].mean), idle = quantity === "bubble_s" && rows?.flat().every((value) => !value);
    const map = rows && !idle && heatmap(quantity, columns.map(([name]) => `rank ${name}`), group.x, rows);
    if (map) maps.append(map);
  }
  if (maps.children.length) parts.push(maps);
  const last = facts.ranks;
  if (last?.own_s) {
    const order = last.own_s.map((seconds, rank) => ({ seconds, rank })).sort((a, b) => b.seconds - a.seconds);
    const mean = last.own_s.reduce((sum, value) => sum + value, 0) / last.own_s.length;
    parts.push(el("h2", {}, `Ranks at step ${last.step.toLocaleString("en")}, slowest first`), table(["rank#", "own work#", "over the mean#", "waits for data#", "idle between stages#", "memory#"], order.slice(0, 64).map(({ seconds, rank }) => [rank, duration(seconds), mean ? `${(seconds / mean).toFixed(2)} ×` : "–", duration(last.data_wait_s[rank]), duration(last.bubble_s[rank]), bytes(last.memory_bytes[rank])])));
  }
  return parts.length ? parts : [empty("One process trains this run. With several, their pace, memory and waiting are shown here.")];
}

export async function comparePanel(run) {
  if (!others().length) return [empty("Tick other runs in the list: their curves are drawn over this one, and the settings that differ are listed here.")];
  const runs = [run, ...others()].slice(0, 32), answer = await get("compare", { runs: runs.join("|") }), { rows, results } = answer;
  const picture = parallelCoordinates(answer.runs, rows, results);
  if (!rows.length) return [picture, empty("All settings are equal.")].filter(Boolean);
  return [picture, el("p", { class: "note" }, `${rows.length} settings differ. Those that begin with "plan:" were decided, the others were asked for.`), table(["setting", ...answer.runs], [...results, ...rows].map((row) => [el("code", {}, row.key), ...row.values.map((value) => (typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(6)).toString() : text(value)))]))].filter(Boolean);
}

// Buttons that ask the live run. What became of it is an event.
export function controlBar(run, pulse) {
  const said = el("span", { class: "soft", role: "status" });
  const ask = async (action, value) => {
    said.textContent = `${action}…`;
    try { await post(`${runPath(run)}/control`, { action, value }); said.textContent = `${action}: asked; the run answers with an event`; } catch (error) { said.textContent = error.message; }
  };
  const sure = (question, action, value) => confirm(question) && ask(action, value);
  const button = (label, press, danger = false) => el("button", { class: danger ? "danger" : "", onclick: press }, label);
  return el("div", { class: "tools", id: "control" },
    button("Save now", () => ask("save")), button("Evaluate now", () => ask("evaluate")), button("Pause", () => ask("pause")), button("Resume", () => ask("resume")),
    button("Learning rate ×", () => { const factor = prompt("Factor on the schedule's learning rate from now on, such as 0.5"); if (factor) ask("lr", Number(factor)); }),
    button("Roll back", () => { const step = prompt("Step to go back to; empty for the newest healthy state"); if (step !== null) ask("rollback", step === "" ? undefined : Number(step)); }, true),
    button("Profile 10 steps", () => ask("profile")),
    button("Stop", () => sure("Save and stop the run?", "stop"), true), said);
}

export function openHelp() {
  const keys = [["/", "find charts"], ["j k", "next and previous run"], ["1 … 9, 0", "tabs"], ["l", "logarithmic axis"], ["r", "whole range"], ["x", "axis: step, tokens, time"], ["m", "marks: incidents or all"], ["t", "dark or light"], ["Esc", "close"]];
  openDialog("Keys", table(["", ""], keys.map(([key, what]) => [el("kbd", {}, key), what])), el("p", { class: "note" }, "Drag over a chart to zoom all of them; double-click for the whole range. Marks on the curves open their reports. The address holds the view: copy it to share it."));
}
