// Going on from a turn: the form at it, and what the command says that the server runs for it (branch_jobs.py).

import { get, isCopy, stream } from "./api.js";
import { h, replace, shown } from "./dom.js";

const FIRST = 20000; // Characters of the command's words that are kept in sight.
let enabled = null;

export async function mayBranch() {
  if (isCopy) return false;
  enabled ??= get("branching").then((told) => told.enabled, () => false);
  return enabled;
}

// A button at each turn of the model in `body`, which shows `record`; and one for the values of all turns.
// `done` draws anew what may have changed.
export function addBranching(body, record, at, done) {
  if (record.segments.some((segment) => segment.agent)) return; // The server refuses records with sub-agents.
  const turns = record.segments.slice(record.prompt_segments).map((segment, i, all) => [segment, all[i + 1]]).filter(([segment]) => segment.author === "model" && !segment.summary);
  body.querySelectorAll(".segment.model").forEach((place, k) => {
    const open = h("button", { class: "branch", title: "Go on from this turn, as it was or edited", onclick: () => { open.disabled = true; place.append(form(at, k + 1, ...turns[k], close, done)); } }, "go on from here");
    const close = () => { open.disabled = false; };
    place.querySelector(".author").append(open);
  });
}

export function valuesButton(at, done) {
  const place = h("div", {});
  const button = h("button", { class: "values", title: "Go on from every turn, to see how the chance of success moves", onclick: () => {
    button.disabled = true;
    replace(place, job({ ...at, samples: 8 }, () => { button.disabled = false; replace(place); }, done));
  } }, "values of the turns");
  return [button, place];
}

const KINDS = { anew: "let the model write this turn anew", action: "write this turn myself", observation: "answer this turn's call myself" };

function form(at, turn, segment, next, close, done) {
  const texts = { action: segment.text, observation: next?.author === "tool" ? next.text : "" };
  const text = h("textarea", { rows: 4, "aria-label": "text", hidden: true });
  const kind = h("select", { "aria-label": "what to change", onchange: () => { text.hidden = kind.value === "anew"; text.value = texts[kind.value] ?? ""; } }, Object.entries(KINDS).map(([value, title]) => h("option", { value }, title)));
  const samples = h("input", { type: "number", min: 1, max: 64, value: 1, "aria-label": "continuations" });
  const place = h("form", { class: "branching", onsubmit: (event) => {
    event.preventDefault();
    const edit = kind.value === "anew" ? {} : { [kind.value]: text.value };
    replace(place, job({ ...at, turn, samples: Number(samples.value), ...edit }, leave, done));
  } }, kind, text, h("div", { class: "bar" }, "continuations", samples, h("button", { type: "submit" }, "go on"), h("button", { type: "button", onclick: () => leave() }, "cancel")));
  const leave = () => { place.remove(); close(); };
  return place;
}

// What the command says, as it says it; leaving it ends the command.
function job(order, leave, done) {
  const stop = new AbortController();
  const words = h("pre", { class: "text" }, "starting; a model may take a while to load …");
  const button = h("button", { type: "button", onclick: () => { stop.abort(); leave(); } }, "stop");
  const state = h("span", { class: "faint" }, "runs");
  const place = h("div", { class: "job", "data-state": "runs" }, h("div", { class: "bar" }, state, button), words);
  window.addEventListener("hashchange", () => stop.abort(), { once: true });
  run(order, stop.signal, words).then((code) => {
    place.dataset.state = code === 0 ? "done" : "failed";
    state.textContent = code === 0 ? "stored" : code === 1 ? "the tools answer differently; --branch_options='--accept_drift' goes on nevertheless" : "not done";
    button.textContent = "close";
    if (code === 0) done();
  }).catch((error) => {
    if (stop.signal.aborted) return;
    place.dataset.state = "failed";
    state.textContent = "not done";
    button.textContent = "close";
    words.append(h("span", { class: "error" }, shown(`\n${error.message}`)));
  });
  return place;
}

async function run(order, signal, words) {
  let said = "", code = null;
  await stream("branch", order, signal, (event) => {
    if (event.error) throw new Error(event.error.message);
    if (event.text !== undefined) replace(words, shown((said += event.text).slice(-FIRST)));
    if (event.exit !== undefined) code = event.exit;
  });
  if (code === null) throw new Error("the viewer ended before the command did");
  return code;
}
