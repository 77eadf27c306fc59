// A run, or several over one another: curves, time by phase, config.

import { get, link } from "./api.js";
import { colour, columns, lineChart, together } from "./chart.js";
import { showComparison } from "./comparison.js";
import { count, h, number, replace, seconds, share } from "./dom.js";

export async function showRun(place, params, stillHere) {
  const names = params.run.split(",");
  const kinds = Object.fromEntries((await get("runs")).map((run) => [run.name, run.kind]));
  if (names.length > 1 && names.every((name) => kinds[name] && kinds[name] !== "training")) return showComparison(place, params);
  const extra = params.names || "";
  const load = () => Promise.all(names.map((run) => get("metrics", { run, names: extra })));
  let told = await load();
  const others = (await get("runs")).filter((run) => run.kind === "training" && !names.includes(run.name));
  const curves = h("div", { class: "charts" });
  const phases = h("div", { class: "charts" });
  const tiles = h("div", { class: "tiles" });
  together(curves);
  const smooth = h("input", { type: "checkbox", checked: localStorage.smooth === "1", onchange: () => { localStorage.smooth = smooth.checked ? "1" : "0"; draw(); } });
  const goto = (changed) => { location.hash = link("run", { ...params, ...changed }); };
  const draw = () => {
    replace(tiles, told.length === 1 ? summary(told[0]) : []);
    const width = columns(curves);
    const options = { width, smooth: smooth.checked ? 0.8 : 0, onPick: (step) => { location.hash = link("table", { run: names[0], files: `step_${step}` }); } };
    replace(curves, titles(told, extra).map((curve) => lineChart({ ...options, ...curve, series: seriesOf(curve, told, names) })));
    replace(phases, told.map((one, i) => phaseChart(one, names[i], told.length > 1, Math.min(640, columns(phases, 280 * 2)))));
  };
  const added = h("input", { list: "names", placeholder: "add a metric", size: 24, onchange: (e) => told.some((one) => one.names.includes(e.target.value)) && goto({ names: [...extra.split(",").filter(Boolean), e.target.value].join(",") }) });
  replace(place,
    h("div", { class: "bar" },
      names.length > 1 && names.map((name, i) => h("span", { class: "chip" }, h("i", { style: { background: colour(i) } }), name, h("button", { title: "take out", onclick: () => goto({ run: names.filter((n) => n !== name).join(",") }) }, "×"))),
      others.length > 0 && h("select", { onchange: (e) => e.target.value && goto({ run: [...names, e.target.value].join(",") }) }, h("option", { value: "" }, "compare with …"), others.map((run) => h("option", { value: run.name }, run.name))),
      h("label", {}, smooth, "smooth"), added, h("datalist", { id: "names" }, [...new Set(told.flatMap((one) => one.names))].map((name) => h("option", { value: name }))),
      extra && h("button", { onclick: () => goto({ names: "" }) }, "only the usual curves")),
    tiles, curves, h("h2", {}, "Time by phase"), phases, await configTable(names));
  const resized = () => draw();
  window.addEventListener("resize", resized);
  return {
    shown: draw,
    leave: () => window.removeEventListener("resize", resized),
    follow: async () => {
      const before = JSON.stringify(told.map((one) => one.steps.length));
      told = await load();
      if (stillHere() && JSON.stringify(told.map((one) => one.steps.length)) !== before) draw();
      return (await get("runs")).some((run) => names.includes(run.name) && Date.now() / 1000 - run.changed < 120);
    },
  };
}

function titles(told, extra) {
  const found = new Map();
  for (const one of told) for (const curve of one.curves) found.set(curve.title, curve);
  const more = extra.split(",").filter(Boolean).map((name) => ({ title: name, form: "number", names: [name] }));
  return [...more, ...found.values()];
}

function seriesOf(curve, told, runs) {
  const alone = told.length === 1;
  return told.flatMap((one, i) => {
    const names = one.curves.find((c) => c.title === curve.title)?.names || curve.names;
    return names.filter((name) => one.series[name]).map((name, j) => {
      const kept = one.steps.map((step, k) => [step, one.series[name][k]]).filter(([, v]) => v !== null);
      return { name: alone ? name : runs[i], colour: colour(alone ? j : i), steps: kept.map(([s]) => s), values: kept.map(([, v]) => v) };
    });
  });
}

function summary(one) {
  const last = (name) => one.series[name]?.findLast((v) => v !== null && v !== undefined);
  const tile = (title, text) => h("div", {}, h("span", {}, title), h("b", {}, text));
  const total = one.series["timing_s/step"]?.reduce((sum, v) => sum + (v || 0), 0);
  return [
    tile("steps", count(one.steps.at(-1))), tile("reward", number(last("critic/score/mean"))), tile("success", share(last("agent/success/mean"))),
    tile("calls", number(last("agent/tool_calls/mean"), 2)), tile("faults", share(last("agent/faulted"))), tile("tokens", count(last("response_length/mean"))),
    tile("a step", seconds(last("timing_s/step"))), tile("all steps", seconds(total)),
  ];
}

function phaseChart(one, run, named, width) {
  const series = Object.entries(one.phases).map(([phase, timers], i) => ({
    name: phase, colour: colour(i), steps: one.steps,
    values: one.steps.map((_, k) => timers.reduce((sum, timer) => sum + (one.series[timer]?.[k] || 0), 0)),
  })).filter((s) => s.values.some((v) => v > 0));
  const totals = series.map((s) => [s.name, s.colour, s.values.reduce((a, b) => a + b, 0)]);
  const whole = totals.reduce((sum, [, , value]) => sum + value, 0) || 1;
  const chart = lineChart({ title: named ? run : "seconds of each step", series: series.filter((s) => s.name !== "set-up"), form: "seconds", stacked: true, width });
  const table = h("table", { class: "phases" }, totals.map(([name, shade, value]) => h("tr", {}, h("td", {}, h("i", { style: { background: shade } }), name), h("td", { class: "n" }, seconds(value)), h("td", { class: "n" }, share(value / whole)),
    h("td", {}, h("div", { class: "meter", style: { width: `${(100 * value) / whole}px`, background: shade } })))));
  return h("div", { class: "phase" }, chart, table);
}

async function configTable(names) {
  const configs = await Promise.all(names.map((run) => get("config", { run })));
  const keys = [...new Set(configs.flatMap(Object.keys))].sort();
  if (!keys.length) return h("p", { class: "faint" }, "The run has left no config.");
  const differs = (key) => configs.some((config) => config[key] !== configs[0][key]);
  const different = keys.filter(differs).length;
  const body = h("tbody", {});
  const words = h("input", { type: "search", placeholder: "filter options", oninput: () => draw() });
  const only = h("input", { type: "checkbox", checked: names.length > 1, onchange: () => draw() });
  const draw = () => {
    const wanted = words.value.toLowerCase();
    const found = keys.filter((key) => (!only.checked || names.length === 1 || differs(key)) && (`${key}=${configs[0][key]}`).toLowerCase().includes(wanted));
    const short = !wanted && names.length === 1 ? found.filter((key) => USUAL.some((usual) => key.startsWith(usual))) : found;
    replace(body, short.slice(0, 400).map((key) => h("tr", { class: names.length > 1 && differs(key) ? "differs" : "" }, h("td", {}, key), configs.map((config) => h("td", {}, config[key] ?? "–")))));
  };
  draw();
  return h("section", {}, h("h2", {}, "Config"), h("div", { class: "bar" }, words, names.length > 1 && h("label", {}, only, `only differences (${different})`), h("span", { class: "faint" }, `${keys.length} options`)),
    h("div", { class: "scroll" }, h("table", { class: "list config" }, names.length > 1 && h("thead", {}, h("tr", {}, h("th", {}, "option"), names.map((name) => h("th", {}, name)))), body)));
}

const USUAL = ["actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.agent.", "actor_rollout_ref.model.path", "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.temperature", "algorithm.adv_estimator", "data.train_batch_size", "data.train_files", "reward.reward_manager.name", "tool_server.", "trainer.total_"];

