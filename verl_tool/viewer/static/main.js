// The frame around the views: header, addresses, keys, and following a run that grows.

import { here, isCopy, link } from "./api.js";
import { h, replace } from "./dom.js";
import { showGroup } from "./group.js";
import { showLive } from "./live.js";
import { showOverTime } from "./over_time.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { showTable } from "./table.js";
import { showTrajectory } from "./trajectory.js";

const VIEWS = { runs: showRuns, run: showRun, table: showTable, trajectory: showTrajectory, group: showGroup, time: showOverTime, live: showLive };
const FOLLOW_MS = 3000;
let current = {};
let shownNow = 0;

async function show() {
  const { view, params } = here();
  const number = ++shownNow;
  current.leave?.();
  current = {};
  const main = document.getElementById("main");
  document.body.dataset.view = view;
  header(view, params);
  const place = h("div", { class: `view ${view}` });
  try {
    if (!VIEWS[view]) throw new Error(`there is no view ${view}`);
    const got = (await VIEWS[view](place, params, () => number === shownNow)) || {};
    if (number !== shownNow) return got.leave?.();
    current = got;
  } catch (error) {
    replace(place, h("p", { class: "error" }, error.message));
  }
  replace(main, place);
  current.shown?.();
  main.dataset.ready = `${view} ${number}`;
}

function header(view, params) {
  const run = params.run?.split(",")[0];
  const tab = (name, title, more = {}) => h("a", { href: link(name, { run: name === "run" ? params.run : run, ...more }), class: view === name ? "on" : "" }, title);
  document.title = run ? `${run} · viewer` : "verl-tool viewer";
  replace(
    document.getElementById("header"),
    h("a", { class: "home", href: "#/runs" }, "verl-tool"),
    run && h("a", { class: "name", href: link("run", { run: params.run }), title: run }, run),
    run && h("nav", {}, tab("run", "Run"), tab("table", "Trajectories"), tab("time", "Over time")),
    h("span", { class: "grow" }),
    !isCopy && h("a", { class: view === "live" ? "talk on" : "talk", href: "#/live", title: "A model and its tools to talk to" }, "Live"),
    h("span", { id: "live", title: "The page follows runs that still go" }),
    h("button", { class: "help", title: "Keys (?)", onclick: keysHelp }, "?"),
  );
}

const GENERAL = { "?": ["these keys", keysHelp], u: ["one level up", up] };

function up() {
  const { view, params } = here();
  const back = { trajectory: "table", group: "table", table: "run", time: "run", run: "runs", live: "runs" }[view];
  const { file, line, ...rest } = params;
  if (back) location.hash = link(back, back === "run" ? { run: params.run } : back === "runs" ? {} : { files: file, ...rest });
}

function keysHelp() {
  const known = document.querySelector("dialog");
  if (known) return known.remove();
  const rows = Object.entries({ ...current.keys, ...GENERAL }).map(([key, [title]]) => h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, title)));
  const box = h("dialog", { onclick: () => box.remove() }, h("table", {}, rows));
  document.body.append(box);
  box.show();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(input|select|textarea)$/i.test(event.target.tagName);
  if (event.key === "Escape") {
    document.querySelector("dialog")?.remove();
    event.target.blur?.();
    return;
  }
  const entry = !typing && ({ ...GENERAL, ...current.keys })[event.key];
  if (!entry) return;
  event.preventDefault();
  entry[1]();
});

async function follow() {
  const live = document.getElementById("live");
  if (!document.hidden && current.follow) {
    const before = current;
    try {
      const grows = await current.follow();
      if (live && before === current) live.className = grows ? "on" : "";
    } catch {
      if (live) live.className = "lost";
    }
  }
  setTimeout(follow, FOLLOW_MS);
}

window.addEventListener("hashchange", show);
show();
setTimeout(follow, FOLLOW_MS);
