// Parallel coordinates: an axis for each setting that differs and each result, a line for each run. Dragging along an axis
// keeps the runs of that range; a press on its name clears it.
import { el, show } from "./dom.js";
import { lineColour } from "./charts.js";

const NS = "http://www.w3.org/2000/svg", HEIGHT = 300, TOP = 34, BOTTOM = 16, STEP = 132, MOST_AXES = 12;

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Numbers have their place on a scale, logarithmic over more than two decades; other values stand in order.
export function makeAxis({ key, values }) {
  const numbers = values.filter((value) => typeof value === "number"), words = values.map((value) => (value === null || value === undefined ? null : typeof value === "object" ? JSON.stringify(value) : String(value)));
  if (numbers.length && numbers.length === values.filter((value) => value !== null && value !== undefined).length) {
    const [low, high] = [Math.min(...numbers), Math.max(...numbers)], log = low > 0 && high / low >= 100, scale = log ? Math.log : (value) => value;
    const share = (value) => (high > low ? (scale(value) - scale(low)) / (scale(high) - scale(low)) : 0.5);
    return { key, shares: values.map((value) => (typeof value === "number" ? share(value) : null)), ticks: [...new Set([low, high])].map((value) => [share(value), show(key, value)]) };
  }
  const levels = [...new Set(words.filter((word) => word !== null))].sort(), place = (word) => (levels.length > 1 ? levels.indexOf(word) / (levels.length - 1) : 0.5);
  return { key, shares: words.map((word) => (word === null ? null : place(word))), ticks: levels.slice(0, 8).map((word) => [place(word), word]) };
}

export function parallelCoordinates(runs, settings, results) {
  // Settings that only some runs have, such as those of a source, are left to the table.
  const asked = settings.filter(({ key }) => !key.startsWith("plan: ") && key !== "name"), shared = asked.filter(({ values }) => values.every((value) => value !== null && value !== undefined));
  const axes = [...(shared.length ? shared : asked).slice(0, MOST_AXES - results.length), ...results].map(makeAxis);
  if (runs.length < 2 || axes.length < 2) return null;
  const width = STEP * axes.length, x = (i) => STEP * (i + 0.5), y = (share) => TOP + (1 - share) * (HEIGHT - TOP - BOTTOM), kept = new Map();
  const read = el("span", { class: "read" }), picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, class: "parallel", role: "img", "aria-label": `${runs.length} runs over ${axes.map((axis) => axis.key).join(", ")}` });
  const lines = runs.map((name, index) => {
    const points = axes.map((axis, i) => (axis.shares[index] === null ? null : `${x(i)},${y(axis.shares[index])}`)).filter(Boolean);
    const line = svg("polyline", { points: points.join(" "), stroke: lineColour(index), "data-run": name });
    line.addEventListener("pointerenter", () => { picture.classList.add("one"); line.classList.add("chosen"); read.textContent = name; });
    line.addEventListener("pointerleave", () => { picture.classList.remove("one"); line.classList.remove("chosen"); read.textContent = ""; });
    return line;
  });
  picture.append(...lines);
  const filter = () => lines.forEach((line, index) => line.classList.toggle("out", [...kept].some(([i, [low, high]]) => { const share = axes[i].shares[index]; return share === null || share < low || share > high; })));
  axes.forEach((axis, i) => {
    const range = svg("rect", { x: x(i) - 7, width: 14, y: TOP, height: 0, class: "range" }), hit = svg("rect", { x: x(i) - 14, width: 28, y: TOP - 4, height: HEIGHT - TOP - BOTTOM + 8, class: "hit", "data-axis": axis.key });
    const label = svg("text", { x: x(i), y: 14, class: "name" }, axis.key.length > 20 ? `…${axis.key.slice(-19)}` : axis.key), title = svg("title", {}, axis.key);
    label.append(title);
    const ticks = axis.ticks.map(([share, text]) => svg("text", { x: x(i) + 6, y: y(share) + (share > 0.99 ? -5 : share < 0.01 ? 13 : 4) }, text.length > 16 ? `${text.slice(0, 15)}…` : text));
    const at = (press) => { const box = picture.getBoundingClientRect(); return Math.min(1.02, Math.max(-0.02, 1 - ((press.clientY - box.top) * (HEIGHT / box.height) - TOP) / (HEIGHT - TOP - BOTTOM))); };
    let from = null;
    const mark = (low, high) => { range.setAttribute("y", y(high)); range.setAttribute("height", y(low) - y(high)); };
    hit.addEventListener("pointerdown", (press) => { from = at(press); hit.setPointerCapture(press.pointerId); });
    hit.addEventListener("pointermove", (press) => { if (from !== null) { const to = at(press); kept.set(i, [Math.min(from, to), Math.max(from, to)]); mark(...kept.get(i)); filter(); } });
    hit.addEventListener("pointerup", () => { from = null; });
    label.addEventListener("click", () => { kept.delete(i); range.setAttribute("height", 0); filter(); });
    picture.append(svg("line", { x1: x(i), x2: x(i), y1: y(0), y2: y(1), class: "axis" }), range, ...ticks, label, hit);
  });
  const names = el("div", { class: "legend" }, runs.map((name, index) => { const swatch = el("i"); swatch.style.background = lineColour(index); return el("span", {}, swatch, name); }));
  return el("section", { class: "chart wide" }, el("header", {}, el("h3", {}, "Settings and results"), read), names, el("div", { class: "wrap" }, picture), el("p", { class: "note" }, "Drag along an axis to keep the runs of a range; press its name to clear it."));
}
