// Elements, numbers as text, the address as the page's state, and the one place that talks to the server.
// Text that comes from a run reaches the page only through textContent.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "vars") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false).map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

export const $ = (selector) => document.querySelector(selector);
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function count(value) {
  const size = Math.abs(value);
  if (size >= 1e12 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  for (const [unit, letter] of [[1e9, "B"], [1e6, "M"], [1e4, "k"]]) if (size >= unit) return `${trim(value / (unit === 1e4 ? 1e3 : unit))}${letter}`;
  return trim(value);
}
const trim = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(4)).toString());

export function bytes(value) {
  for (const [power, unit] of [[4, "TiB"], [3, "GiB"], [2, "MiB"], [1, "KiB"]]) if (value >= 1024 ** power) return `${(value / 1024 ** power).toFixed(value >= 100 * 1024 ** power ? 0 : 1)} ${unit}`;
  return `${value} B`;
}

export function duration(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${(seconds * 1000).toPrecision(3)} ms`;
  if (seconds < 100) return `${seconds.toPrecision(3)} s`;
  const [days, hours, minutes] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  return days ? `${days}d ${hours}h` : hours ? `${hours}h ${minutes}m` : `${minutes}m ${Math.floor(seconds % 60)}s`;
}

// How a metric is written, by its name.
export function show(name, value) {
  if (value === null || value === undefined || value === "nan" || value === "inf" || value === "-inf") return value ?? "–";
  if (typeof value === "boolean" || typeof value === "string") return String(value);
  if (value === 0) return "0";
  if (/_bytes_per_s$/.test(name)) return `${bytes(Math.round(value))}/s`;
  if (/_bytes/.test(name)) return bytes(Math.round(value));
  if (/_s($|\.)/.test(name) && !/per_s/.test(name)) return duration(value);
  if (/(^|_)(mfu|share|accuracy|bubble)($|_)|^rise/.test(name)) return `${(100 * value).toFixed(1)} %`;
  for (const [ending, unit] of [["_w", "W"], ["_c", "°C"], ["_mhz", "MHz"]]) if (name.endsWith(ending)) return `${count(value)} ${unit}`;
  if (/^lr|lr$/.test(name)) return value.toExponential(2);
  return count(value);
}

// The view is in the address, so that a link shows the same and a reload forgets nothing.
export const defaults = { run: "", tab: "curves", x: "step", smooth: "0.6", log: "", from: "", to: "", find: "", with: "", wide: "", marks: "", theme: "" };
export const state = { ...defaults };

export function readState() {
  const query = new URLSearchParams(location.search);
  for (const key of Object.keys(defaults)) state[key] = query.get(key) ?? defaults[key];
}

export function writeState(changes, push = false) {
  Object.assign(state, changes);
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) if (value !== defaults[key]) query.set(key, value);
  const address = query.size ? `?${query}` : location.pathname;
  if (exported && location.protocol === "file:") return; // some browsers refuse there
  history[push ? "pushState" : "replaceState"](null, "", address);
}

export const others = () => (state.with ? state.with.split("|").filter((name) => name && name !== state.run) : []);

// A page that was written by `watch export` has its answers inside.
const inside = $("#export");
export const exported = inside ? JSON.parse(inside.textContent) : null;

export async function get(path, query = {}) {
  if (exported) return fromExport(path, query);
  const parameters = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined));
  const answer = await fetch(`api/${path}${parameters.size ? `?${parameters}` : ""}`);
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? `status ${answer.status}`);
  return answer.json();
}

export async function post(path, body) {
  const answer = await fetch(`api/${path}`, { method: "POST", headers: { "X-Bessemer": "1", "Content-Type": "application/json" }, body: JSON.stringify(body) });
  const result = await answer.json();
  if (!answer.ok) throw new Error(result.error);
  return result;
}

function fromExport(path, query) {
  const key = /\/(series|events|layers)$/.test(path) ? `${path}?${query.x}` : path;
  const answer = exported.answers[key];
  if (answer === undefined) throw new Error("not part of this file");
  return answer;
}

export const runPath = (name) => `runs/${encodeURIComponent(name)}`;

export function openDialog(title, ...content) {
  const dialog = $("#dialog");
  dialog.querySelector("h2").textContent = title;
  dialog.querySelector(".content").replaceChildren(...content);
  if (!dialog.open) dialog.showModal();
}

export function openReport(run, name) {
  const frame = el("iframe", { sandbox: "", title: name });
  if (exported) frame.srcdoc = exported.reports[`${run}/${name}`] ?? "The report is not part of this file.";
  else frame.src = `api/${runPath(run)}/reports/${encodeURIComponent(name)}`;
  openDialog(name, frame);
}
