// A run's tools and prompts over its steps.

import { get, link } from "./api.js";
import { colour, columns, lineChart, together } from "./chart.js";
import { count, excerpt, h, number, replace, share } from "./dom.js";

export async function showOverTime(place, params, stillHere) {
  let told = await get("by_file", params);
  const charts = h("div", { class: "charts" });
  const rest = h("div", {});
  together(charts);
  const prompts = await get("prompts", { ...params, kind: told.by_file.some((file) => file.kind === "validation") ? "validation" : "" });
  const draw = () => {
    const steps = told.by_file.filter((file) => file.kind === "step");
    const used = steps.length ? steps : told.by_file.map((file, i) => ({ ...file, step: file.step ?? i }));
    const tools = [...new Set(used.flatMap((file) => Object.keys(file.tools)))];
    const at = used.map((file) => file.step);
    const all = used.map((file) => Object.values(file.tools).reduce((sum, tool) => sum + tool.calls, 0) || 1);
    const series = (read) => tools.map((tool, i) => ({ name: tool, colour: colour(i), steps: at, values: used.map((file, k) => read(file.tools[tool], file, k)) }));
    const options = { width: columns(charts, 420), onPick: (step) => { location.hash = link("table", { run: params.run, files: `step_${step}` }); } };
    replace(charts,
      lineChart({ ...options, title: "share of each tool in all calls", stacked: true, form: "share", series: series((tool, _, k) => (tool?.calls || 0) / all[k]) }),
      lineChart({ ...options, title: "calls a trajectory", series: series((tool, file) => (tool?.calls || 0) / file.rows) }),
      lineChart({ ...options, title: "share of calls that failed", form: "share", series: series((tool) => (tool?.calls ? tool.failed / tool.calls : null)) }),
      lineChart({ ...options, title: "seconds a call", form: "seconds", series: series((tool) => (tool?.calls ? tool.seconds / tool.calls : null)) }));
    replace(rest, failures(used, tools, params.run), promptTable(prompts, params.run));
  };
  replace(place, charts, rest);
  return {
    shown: draw,
    follow: async () => {
      const now = await get("by_file", params);
      if (stillHere() && now.version !== told.version) { told = now; draw(); }
      return now.missing_bytes > 0;
    },
  };
}

// Where calls fail: by tool, and by which call of the trajectory it was.
function failures(files, tools, run) {
  const sums = Object.fromEntries(tools.map((tool) => [tool, { calls: 0, failed: 0, invalid: 0, faults: 0, truncated: 0, turns: [] }]));
  for (const file of files) {
    for (const [tool, counts] of Object.entries(file.tools)) {
      for (const name of ["calls", "failed", "invalid", "faults", "truncated"]) sums[tool][name] += counts[name];
      counts.by_turn.forEach(([calls, failed], i) => {
        const known = (sums[tool].turns[i] ||= [0, 0]);
        known[0] += calls;
        known[1] += failed;
      });
    }
  }
  const most = Math.max(1, ...tools.map((tool) => sums[tool].turns.findLastIndex(([calls]) => calls > 0) + 1));
  const cell = ([calls, failed] = [0, 0]) => h("td", { class: "n heat", title: `${count(failed)} of ${count(calls)}`, style: calls ? { background: `color-mix(in srgb, var(--bad) ${Math.round((70 * failed) / calls)}%, transparent)` } : {} }, calls ? share(failed / calls) : "");
  const rows = tools.sort((a, b) => sums[b].calls - sums[a].calls).map((tool) => h("tr", {},
    h("td", {}, h("a", { href: link("table", { run, tool, failed_calls_min: 1, all: 1 }) }, tool)), ["calls", "failed", "invalid", "faults", "truncated"].map((name) => h("td", { class: "n" }, count(sums[tool][name]))),
    Array.from({ length: most }, (_, i) => cell(sums[tool].turns[i]))));
  return h("section", {}, h("h2", {}, "Where calls fail"), h("div", { class: "scroll" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, ["tool", "calls", "failed", "invalid", "faults", "cut"].map((t, i) => h("th", { class: i ? "n" : "" }, t)), Array.from({ length: most }, (_, i) => h("th", { class: "n" }, i === 15 ? "call 16+" : `call ${i + 1}`)))), h("tbody", {}, rows))));
}

function promptTable(told, run) {
  if (!told.prompts.length) return h("p", { class: "faint" }, "No prompt was sampled at more than one step.");
  const rows = told.prompts.map((prompt) => h("tr", {}, h("td", { class: "n" }, prompt.index < 0 ? "" : prompt.index), h("td", { class: "n" }, count(prompt.steps)), h("td", { class: "n" }, count(prompt.rows)),
    h("td", { class: "n" }, number(prompt.first)), h("td", { class: "n" }, number(prompt.last)), h("td", { class: `n ${prompt.last > prompt.first ? "good" : prompt.last < prompt.first ? "bad" : ""}` }, (prompt.last > prompt.first ? "+" : "") + number(prompt.last - prompt.first)),
    h("td", { class: "wide" }, h("a", { href: link("table", { run, prompt: prompt.prompt, sort: "step" }) }, excerpt(prompt.question)))));
  return h("section", {}, h("h2", {}, `The same prompt at several steps`), h("p", { class: "faint" }, `${count(told.total)} prompts${told.kind ? ` of ${told.kind}` : ""} were sampled at more than one step; those whose mean reward changed most:`),
    h("div", { class: "scroll" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, ["problem", "steps", "samples", "first", "last", "change", "question"].map((t, i) => h("th", { class: i < 6 ? "n" : "" }, t)))), h("tbody", {}, rows))));
}
