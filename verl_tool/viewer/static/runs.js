// All runs, of which some may be laid over one another.

import { get, link } from "./api.js";
import { sparkline } from "./chart.js";
import { count, h, number, replace, since } from "./dom.js";

export async function showRuns(place) {
  const chosen = new Set();
  const compare = h("button", { disabled: true, onclick: () => { location.hash = link("run", { run: [...chosen].join(",") }); } }, "Compare");
  const body = h("tbody", {});
  const words = h("input", { type: "search", placeholder: "filter runs", oninput: () => draw() });
  let runs = [];
  const choose = (name, on) => {
    chosen[on ? "add" : "delete"](name);
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Compare";
  };
  const draw = () => replace(body, runs.filter((run) => run.name.toLowerCase().includes(words.value.toLowerCase())).map((run) =>
    h("tr", {},
      h("td", {}, h("input", { type: "checkbox", "aria-label": `compare ${run.name}`, checked: chosen.has(run.name), onchange: (e) => choose(run.name, e.target.checked) })),
      h("td", { class: "wide" }, h("a", { href: run.kind === "training" ? link("run", { run: run.name }) : link("table", { run: run.name }), title: run.folder }, run.name), run.problem && h("span", { class: "warn" }, ` ${run.problem}`)),
      h("td", {}, run.kind),
      h("td", { class: "n" }, run.steps ? count(run.steps) : ""),
      h("td", { class: "n" }, run.rewards.length ? number(run.rewards.at(-1)) : ""),
      h("td", {}, sparkline(run.rewards)),
      h("td", { class: "faint", title: "what --from_run serves" }, run.checkpoint === null ? "" : `step ${count(run.checkpoint)}`),
      h("td", { class: "faint" }, run.changed ? since(run.changed) : ""),
    )));
  const load = async () => {
    runs = await get("runs");
    draw();
    return runs.some((run) => Date.now() / 1000 - run.changed < 120);
  };
  await load();
  replace(place,
    h("div", { class: "bar" }, h("h1", {}, "Runs"), words, compare),
    runs.length ? h("table", { class: "list runs" }, h("thead", {}, h("tr", {}, ["", "run", "kind", "steps", "reward", "", "checkpoint", "changed"].map((t, i) => h("th", { class: i === 3 || i === 4 ? "n" : "" }, t)))), body)
      : h("p", { class: "faint" }, "No run is here yet. A training leaves one in outputs/."));
  return { follow: load };
}
