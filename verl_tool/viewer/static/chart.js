// Charts as SVG.

import { formatted, h, svg } from "./dom.js";

export const COLOURS = 8;
export const colour = (number) => `var(--c${number % COLOURS})`;
const HEIGHT = 132;
const EDGE = { left: 46, right: 8, top: 8, bottom: 18 };

function ticks(least, most, wanted = 4) {
  const raw = (most - least) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(least / step - 1e-9) * step; at <= most + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

export function sparkline(values) {
  const known = values.filter((v) => Number.isFinite(v));
  const picture = svg("svg", { class: "sparkline", width: 90, height: 18, viewBox: "0 0 90 18", "aria-hidden": "true" });
  if (known.length < 2) return picture;
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const path = known.map((v, i) => `${(i ? "L" : "M")}${((i / (known.length - 1)) * 88 + 1).toFixed(1)} ${(16 - ((v - least) / (most - least || 1)) * 14).toFixed(1)}`).join("");
  picture.append(svg("path", { d: path }));
  return picture;
}

function smoothed(values, weight) {
  let mean = null;
  return values.map((v) => (v === null ? null : (mean = mean === null ? v : weight * mean + (1 - weight) * v)));
}

// Lines over steps. `series`: [{name, colour, steps, values, dashed}]; `onPick(step, series)` is called for a click.
export function lineChart({ title, series, form = "number", width = 340, smooth = 0, onPick, stacked = false }) {
  const told = series.filter((s) => s.values.some((v) => Number.isFinite(v)));
  if (stacked) stack(told);
  const xs = told.flatMap((s) => s.steps.filter((_, i) => Number.isFinite(s.values[i])));
  const ys = told.flatMap((s) => s.values.filter((v) => Number.isFinite(v)));
  let [x0, x1] = [min(xs), max(xs)];
  let [y0, y1] = [stacked ? 0 : min(ys), max(ys)];
  if (form === "share") y1 = Math.max(y1 > 0.5 ? 1 : 0.01, y1);
  if (y0 > 0 && (form === "share" || y0 < (y1 - y0) * 2)) y0 = 0;
  if (y0 === y1) [y0, y1] = y0 === 0 ? [0, 1] : [y0 - Math.abs(y0) * 0.1, y1 + Math.abs(y1) * 0.1];
  if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
  const x = (v) => EDGE.left + ((v - x0) / (x1 - x0)) * (width - EDGE.left - EDGE.right);
  const y = (v) => HEIGHT - EDGE.bottom - ((v - y0) / (y1 - y0)) * (HEIGHT - EDGE.top - EDGE.bottom);
  const last = told.length === 1 ? told[0].values.findLast((v) => Number.isFinite(v)) : null;
  const value = h("span", { class: "value" }, last === null ? "" : formatted(last, form));
  const picture = svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const at of ticks(y0, y1)) {
    picture.append(svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(at), y2: y(at) }));
    picture.append(svg("text", { class: "tick", x: EDGE.left - 5, y: y(at) + 3.5, "text-anchor": "end" }, formatted(at, form)));
  }
  for (const at of ticks(x0, x1, 5).filter(Number.isInteger)) picture.append(svg("text", { class: "tick", x: x(at), y: HEIGHT - 4, "text-anchor": "middle" }, String(at)));
  for (const one of told) {
    const shape = (values) => line(one.steps, values, x, y);
    if (stacked) picture.append(svg("path", { class: "area", d: area(one, x, y), style: { fill: one.colour } }));
    else if (smooth) picture.append(svg("path", { class: "line raw", d: shape(one.values), style: { stroke: one.colour } }));
    if (!stacked) picture.append(svg("path", { class: "line", d: shape(smooth ? smoothed(one.values, smooth) : one.values), style: { stroke: one.colour } }));
    const alone = one.values.filter((v) => Number.isFinite(v)).length < 12 && !stacked;
    if (alone) one.values.forEach((v, i) => Number.isFinite(v) && picture.append(svg("circle", { cx: x(one.steps[i]), cy: y(v), r: 2, style: { fill: one.colour } })));
  }
  const cross = svg("line", { class: "cross", y1: EDGE.top, y2: HEIGHT - EDGE.bottom, visibility: "hidden" });
  picture.append(cross);
  const figure = h("figure", { class: "chart", style: { width: `${width + 18}px` } }, h("figcaption", {}, h("span", { title }, title), value), picture);
  const stepAt = (event) => {
    const box = picture.getBoundingClientRect();
    const wanted = x0 + (((event.clientX - box.left) * width / box.width - EDGE.left) / (width - EDGE.left - EDGE.right)) * (x1 - x0);
    return xs.reduce((best, at) => (Math.abs(at - wanted) < Math.abs(best - wanted) ? at : best), xs[0]);
  };
  figure.mark = (step) => {
    cross.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step === null) { value.textContent = last === null ? "" : formatted(last, form); return; }
    cross.setAttribute("x1", x(step));
    cross.setAttribute("x2", x(step));
    const at = told.map((s) => [s, (s.own || s.values)[s.steps.indexOf(step)]]).filter(([, v]) => Number.isFinite(v));
    value.replaceChildren(`${step}: `, ...at.slice(0, 6).map(([s, v]) => h("b", { style: { color: s.colour } }, formatted(v, form) + " ")));
  };
  const tell = (step) => figure.dispatchEvent(new CustomEvent("mark", { bubbles: true, detail: step }));
  picture.addEventListener("mousemove", (event) => xs.length && tell(stepAt(event)));
  picture.addEventListener("mouseleave", () => tell(null));
  if (onPick) picture.addEventListener("click", (event) => xs.length && onPick(stepAt(event)));
  if (told.length > 1) {
    const short = withoutCommon(told.map((s) => s.name));
    figure.append(h("div", { class: "legend" }, told.map((s, i) => h("span", { title: s.name }, h("i", { style: { background: s.colour } }), short[i]))));
  }
  return figure;
}

// Names without the parts between slashes that all begin and end with.
function withoutCommon(names) {
  const parts = names.map((name) => name.split("/"));
  const shortest = Math.min(...parts.map((part) => part.length));
  let [from, to] = [0, 0];
  while (from < shortest - 1 && parts.every((part) => part[from] === parts[0][from])) from++;
  while (to < shortest - from - 1 && parts.every((part) => part.at(-1 - to) === parts[0].at(-1 - to))) to++;
  return parts.map((part) => part.slice(from, part.length - to).join("/"));
}

// Charts in `place` show the same step.
export function together(place) {
  place.addEventListener("mark", (event) => place.querySelectorAll("figure.chart").forEach((figure) => figure.mark(event.detail)));
}

export function columns(place, least = 330) {
  const width = Math.max(280, (place.clientWidth || document.getElementById("main").clientWidth) - 2);
  const number = Math.max(1, Math.floor(width / least));
  return Math.floor((width - (number - 1) * 12) / number) - 18;
}

function min(values) { return values.reduce((a, b) => (b < a ? b : a), values[0] ?? 0); }
function max(values) { return values.reduce((a, b) => (b > a ? b : a), values[0] ?? 1); }

function line(steps, values, x, y) {
  let path = "";
  values.forEach((v, i) => {
    if (Number.isFinite(v)) path += `${path ? "L" : "M"}${x(steps[i]).toFixed(1)} ${y(v).toFixed(1)}`;
  });
  return path;
}

function stack(series) {
  const below = {};
  for (const one of series) {
    one.own = one.values;
    one.floor = one.steps.map((step) => below[step] || 0);
    one.values = one.values.map((v, i) => (below[one.steps[i]] = (below[one.steps[i]] || 0) + (v || 0)));
  }
}

function area(one, x, y) {
  const up = one.steps.map((s, i) => `${i ? "L" : "M"}${x(s).toFixed(1)} ${y(one.values[i]).toFixed(1)}`);
  const down = one.steps.map((s, i) => `L${x(s).toFixed(1)} ${y(one.floor[i]).toFixed(1)}`).reverse();
  return up.join("") + down.join("") + "Z";
}
