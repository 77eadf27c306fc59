// One trajectory: what was said, token by token if wished, and what each call cost. One that is still written (live.js) has
// segments with a `note` in place of the number of their tokens, of which one may be `growing`, and calls that are `waiting`.

import { branchTree, origin, valueBar } from "./branches.js";
import { addBranching, mayBranch, valuesButton } from "./branching.js";
import { get, imageAddress, link, tableParams } from "./api.js";
import { copy, count, growingText, h, kept, longText, number, replace, seconds, share, shown, svg } from "./dom.js";
import { sessionTree } from "./session.js";

const COLOURINGS = { author: "author", mask: "loss mask", log_prob: "log-probability", difference: "trainer − rollout", advantage: "advantage" };
const TOKENS_FIRST = 3000;
const LETTER = 5.2; // Width of a letter in the waterfall, on average.

export async function showTrajectory(place, params, stillHere) {
  const told = await get("trajectory", params);
  const table = tableParams(params);
  const at = (address) => link("trajectory", { run: params.run, ...table, ...address });
  const to = (address) => address && (location.hash = at(address));
  const group = link("group", { run: params.run, ...table, file: params.file, line: params.line });
  const step = (title, key, address) => h("a", { class: "button", href: address ? at(address) : null, "aria-disabled": address ? null : "true", title: `key ${key}` }, title);
  const failure = told.next_failure;
  const bar = h("div", { class: "bar" },
    h("a", { class: "button", href: link("table", { run: params.run, files: params.file, ...table }) }, "↑ table"),
    step("← previous", "k", told.previous), step("next →", "j", told.next), step("next failure", "f", failure),
    h("a", { class: "button", href: group, title: "key g" }, "group"),
    h("span", { class: "faint" }, told.place === null ? "" : `${count(told.place + 1)} of ${count(told.of)}`));
  const keys = {
    j: ["next", () => to(told.next)], ArrowRight: ["next", () => to(told.next)], k: ["previous", () => to(told.previous)], ArrowLeft: ["previous", () => to(told.previous)],
    f: ["next failure", () => to(failure)], g: ["its group side by side", () => { location.hash = group; }], l: ["copy the link", () => copy(location.href, "link")],
  };
  if (told.record.unreadable !== undefined) {
    replace(place, bar, h("p", { class: "error" }, "This line is no record."), longText(told.record.unreadable));
    return { keys };
  }
  const record = told.record.trajectory || told.record;
  const answer = told.record.trajectory === undefined ? null : told.record;
  const body = h("div", { class: "conversation" });
  const mode = { tokens: params.tokens === "1", colouring: sessionStorage.colouring || "author" };
  let pieces = null;
  const branching = told.record.trajectory !== null && (await mayBranch());
  const own = { run: params.run, file: params.file, line: Number(params.line) };
  const tree = h("div", {}, branchTree(params.run, told.branches));
  // What was stored is shown once the server has read it.
  const drawBranches = async (then, tries = 20) => {
    const now = await get("trajectory", params);
    if (!stillHere()) return;
    if (now.branches.total === told.branches.total && tries) return setTimeout(drawBranches, 500, then, tries - 1);
    Object.assign(told, { branches: now.branches, values: now.values });
    replace(tree, branchTree(params.run, told.branches));
    then?.();
  };
  const draw = async () => {
    if (mode.tokens && !pieces) pieces = await get("pieces", params);
    if (!stillHere()) return;
    replace(body, told.record.trajectory === null ? [h("p", { class: "faint" }, "The endpoint gave no trajectory, only the answer."), longText(answer.content || answer.error || "")]
      : mode.tokens ? tokensView(record, told.trainer, pieces, mode, draw) : conversation(record, besideRecords(params.run), undefined, (turn) => valueBar(told.values, turn)));
    if (branching && !mode.tokens) addBranching(body, record, own, () => drawBranches());
  };
  const toggle = () => { mode.tokens = !mode.tokens; history.replaceState(null, "", link("trajectory", { ...params, tokens: mode.tokens ? "1" : "" })); params.tokens = mode.tokens ? "1" : ""; button.textContent = mode.tokens ? "text" : "tokens"; draw(); };
  const button = h("button", { id: "tokens", title: "key t", onclick: toggle }, mode.tokens ? "text" : "tokens");
  bar.append(h("span", { class: "grow" }), button, h("button", { onclick: keys.l[1], title: "key l" }, "copy link"),
    h("button", { title: "key c: ask the eval endpoint the same", onclick: () => copy(askAsCurl(record), "curl command") }, "copy as curl"));
  const [estimate, values] = branching ? valuesButton(own, () => drawBranches(draw)) : [];
  if (estimate) bar.append(estimate);
  await draw();
  replace(place, bar, values, facts(told.row, record, answer), origin(params.run, record.extra?.branch), h("div", { class: "two" }, body, h("aside", {}, tree, sessionTree(record), besides(record))));
  return { keys: { ...keys, t: ["tokens or text", toggle], c: ["copy as curl", () => copy(askAsCurl(record), "curl command")] } };
}

export function facts(row, record, answer) {
  const fact = (title, value, shade = "") => value !== "" && value !== null && value !== undefined && h("div", {}, h("span", {}, title), h("b", { class: shade }, value));
  const info = { ...(record.extra?.reward_extra_info || answer?.details || {}) };
  const faults = [record.fault && `${record.fault.kind}: ${record.fault.message}`, record.extra?.reward_fault, record.extra?.provoked, answer?.error, answer?.reward_fault].filter(Boolean);
  return h("div", {}, h("div", { class: "tiles" },
    fact("reward", number(row.reward), row.reward > 0 ? "good" : "bad"), row.correct !== null && fact("right", row.correct >= 0.5 ? "yes" : "no", row.correct >= 0.5 ? "good" : "bad"),
    row.advantage !== null && fact("advantage", number(row.advantage)), fact("ended", row.stop), fact("left out of the loss", row.excluded, "warn"), fact("turns", count(row.turns)),
    fact("calls", row.failed_calls ? `${row.calls} (${row.failed_calls} failed)` : count(row.calls)), fact("tokens", `${count(row.prompt_tokens)} + ${count(row.model_tokens)} + ${count(row.tool_tokens)}`),
    fact("time", seconds(row.seconds)), row.index >= 0 && fact("problem", row.index), fact("file", `${row.file}:${row.line + 1}`),
    Object.entries(info).filter(([name]) => name !== "acc").map(([name, value]) => fact(name, typeof value === "number" ? number(value) : String(value)))),
    faults.map((text) => h("p", { class: "error" }, shown(text))));
}

// Whether it is a turn of the main agent.
export const isTurn = (segment) => segment.author === "model" && !segment.summary && !segment.agent;

// `picture`: from an image's hash to its element. `known`: for what is drawn again and again, see `kept`. `value`: from the
// number of a turn to what is shown of its value.
export function conversation(record, picture, known, value) {
  let turn = 0;
  const inPrompt = record.prompt_segments ?? 1;
  return record.segments.flatMap((segment, i) => {
    const model = isTurn(segment);
    if (model) turn += 1;
    if (!segment.text && segment.image) return [kept(known, segment, "image", () => imageBlock(segment, picture))];
    const name = i < inPrompt && !model ? "prompt" : model ? `model, turn ${turn}` : (segment.agent ? `sub-agent ${segment.agent}, ` : "") + (segment.summary ? "model, summary" : segment.author);
    return [rowStart(record, i), kept(known, segment, `${name} ${segment.note} ${segment.text.length}`, () => h("div", { class: `segment ${segment.author}` }, header(name, segment, model && value?.(turn)), segment.image && imageBlock(segment, picture),
      segment.growing ? growingText(segment.text) : segment.text ? longText(segment.text) : h("p", { class: "faint" }, segment.image ? "" : "no text is recorded; look at the tokens")))].filter(Boolean);
  });
}

// Where a further training row begins: what the model was fed there.
function rowStart(record, i) {
  const row = record.segments[i].row || 0;
  const context = row > (record.segments[i - 1]?.row || 0) && record.contexts?.[row - 1];
  return context && h("p", { class: "row-start faint" }, `training row ${row + 1} (${context.reason}): the model was fed ${count(context.tokens.length)} tokens here`);
}

function header(name, segment, value) {
  return h("div", { class: "author" }, h("span", {}, name, segment.edited && h("em", { title: "written by somebody in the place of what was there; in no loss" }, " edited")), value, h("span", {}, segment.note ?? `${count(segment.tokens.length)} tokens`));
}

function imageBlock(segment, picture) {
  return h("div", { class: "segment image" }, header(`image, ${segment.author}`, segment), picture(segment.image));
}

// Pictures of a run's images.
export const besideRecords = (run) => (sha256) => {
  const picture = h("img", { src: imageAddress(run, sha256), alt: `image ${sha256.slice(0, 12)}`, loading: "lazy" });
  picture.addEventListener("error", () => picture.replaceWith(h("p", { class: "faint" }, `the image ${sha256.slice(0, 12)}… is not beside the records`)));
  return picture;
};

// Each token's numbers: by whom, whether in the loss, log-probabilities of engine and trainer, advantage.
function numbered(record, trainer) {
  let behind = 0;
  return record.segments.map((segment, i) => segment.tokens.map((id, k) => {
    const response = i >= record.prompt_segments;
    const place = response ? behind++ : -1;
    const mask = !response ? 0 : trainer?.mask ? trainer.mask[place] : record.excluded ? 0 : Number(record.loss_on_observations || (segment.author === "model" && !segment.edited));
    const logProb = segment.log_probs ? Number(segment.log_probs[k]) : null;
    const own = response && trainer?.log_probs && segment.author === "model" ? trainer.log_probs[place] : null;
    return { id, author: segment.author, mask, log_prob: logProb, trainer: own, difference: own === null || logProb === null ? null : own - logProb, advantage: response && trainer?.advantages && mask ? trainer.advantages[place] : null };
  }));
}

function tokensView(record, trainer, pieces, mode, draw) {
  const tokens = numbered(record, trainer);
  const all = tokens.flat();
  const has = (name) => name === "author" || name === "mask" || all.some((token) => token[name] !== null);
  const chosen = has(mode.colouring) ? mode.colouring : "author";
  const most = Math.max(1e-9, ...all.map((token) => Math.abs(token[chosen] ?? 0)).filter(Number.isFinite));
  const choose = h("select", { id: "colouring", onchange: (e) => { mode.colouring = sessionStorage.colouring = e.target.value; draw(); } },
    Object.entries(COLOURINGS).map(([name, title]) => h("option", { value: name, selected: name === chosen, disabled: !has(name) }, title + (has(name) ? "" : " (not recorded)"))));
  const under = h("p", { class: "under faint" }, "Point at a token.");
  const tell = (event) => {
    const token = event.target.token;
    if (!token) return;
    const told = [["id", token.id], ["author", token.author], ["in the loss", token.mask ? "yes" : "no"], ["log-probability", token.log_prob], ["probability", token.log_prob === null ? null : share(Math.exp(token.log_prob))], ["trainer's", token.trainer], ["difference", token.difference], ["advantage", token.advantage]];
    replace(under, told.filter(([, v]) => v !== null).map(([title, v]) => h("span", {}, `${title} `, h("b", {}, typeof v === "number" && title !== "id" ? number(v, 4) : String(v)), "  ")));
  };
  const segments = record.segments.map((segment, i) => {
    const box = h("div", { class: "tokens", dir: "ltr", onmouseover: tell, onclick: tell });
    const add = (from) => {
      const to = Math.min(segment.tokens.length, from + TOKENS_FIRST);
      for (let k = from; k < to; k++) box.append(...tokenNodes(tokens[i][k], pieces.pieces?.[i]?.[k], chosen, most));
      if (to < segment.tokens.length) {
        const more = h("button", { class: "more", onclick: () => { more.remove(); add(to); } }, `${count(segment.tokens.length - to)} more tokens`);
        box.append(more);
      }
    };
    add(0);
    return h("div", { class: `segment ${segment.author}` }, header(segment.author, segment), box);
  });
  return [h("div", { class: "bar token-bar" }, "colour by", choose, legend(chosen, most), pieces.reason && h("span", { class: "faint" }, `ids only: ${pieces.reason}`), under), ...segments];
}

function tokenNodes(token, text, chosen, most) {
  const node = h("span", { class: "token", style: shade(token, chosen, most) }, text === undefined ? `${token.id} ` : text === "" ? "·" : shown(text.replace(/\n/g, "⏎\n")));
  node.token = token;
  return [node];
}

const AUTHORS = { prompt: "var(--prompt)", model: "var(--model)", tool: "var(--tool)", template: "var(--template)" };

function shade(token, chosen, most) {
  const mixed = (name, part) => ({ background: `color-mix(in srgb, ${name} ${Math.round(8 + 72 * Math.min(1, part))}%, transparent)` });
  if (chosen === "author") return { background: `color-mix(in srgb, ${AUTHORS[token.author]} 22%, transparent)` };
  if (chosen === "mask") return token.mask ? mixed("var(--good)", 0.3) : { opacity: "0.55" };
  const value = token[chosen];
  if (value === null || !(Math.abs(value) > 0)) return {};
  if (chosen === "log_prob") return mixed("var(--bad)", 1 - Math.exp(value));
  return mixed(value > 0 ? "var(--good)" : "var(--bad)", Math.abs(value) / most);
}

function legend(chosen, most) {
  const entry = (title, style) => h("span", { class: "token", style }, title);
  if (chosen === "author") return Object.keys(AUTHORS).map((author) => entry(author, shade({ author }, "author")));
  if (chosen === "mask") return [entry("in the loss", shade({ mask: 1 }, "mask")), entry("not", shade({ mask: 0 }, "mask"))];
  if (chosen === "log_prob") return [1, 0.5, 0.05].map((p) => entry(share(p), shade({ log_prob: Math.log(p) - 1e-9 }, chosen)));
  return [-most, -most / 2, most / 2, most].map((v) => entry(number(v, 4), shade({ [chosen]: v }, chosen, most)));
}

// What stands beside the conversation. `known` as there.
export function besides(record, known) {
  const title = record.calls.length === 1 ? "1 call" : `${record.calls.length} calls`;
  return [waterfall(record), record.calls.length > 0 && kept(known, "calls", title, () => h("h3", {}, title)),
    ...record.calls.map((call, i) => kept(known, call, call.waiting, () => callCard(call, i))),
    record.verdict && h("div", { class: "call" }, h("h3", {}, "verifier"), longText(JSON.stringify(record.verdict, null, 1))),
    !record.growing && kept(known, "rest", record.trajectory_id, () => h("details", {}, h("summary", {}, "rest of the record"), longText(JSON.stringify({ ...record, segments: undefined, calls: undefined }, null, 1)))),
  ].filter(Boolean);
}

export function failed(call) {
  return !!call.fault || !call.valid || call.metrics?.error > 0 || call.metrics?.timed_out > 0;
}

function callCard(call, i) {
  const name = call.names?.join(", ") || "no call found";
  const state = call.fault ? `fault: ${call.fault.kind}` : !call.valid ? "not valid" : call.metrics?.timed_out > 0 ? "timed out" : call.metrics?.error > 0 ? "error" : "";
  return h("details", { class: `call${failed(call) ? " failed" : ""}`, open: failed(call) || i < 3 },
    h("summary", {}, h("b", {}, `${call.step}  ${name}`), h("span", { class: "faint" }, call.waiting ? "runs" : seconds(call.seconds)), state && h("span", { class: "bad" }, state), call.done && h("span", { class: "faint" }, "ends the trajectory"), call.truncated && h("span", { class: "warn", title: "the model was shown less" }, "cut")),
    (call.invalid_reason || call.fault) && h("p", { class: "error" }, shown(call.invalid_reason || call.fault.message)),
    h("div", { class: "label" }, "action", h("button", { onclick: () => copy(callAsCurl(call), "curl command") }, "copy as curl")), longText(call.action), !call.waiting && [h("div", { class: "label" }, "observation"), longText(call.observation || "")],
    h("p", { class: "faint" }, [call.reward !== null && call.reward !== undefined && `reward ${number(call.reward)}`, ...Object.entries(call.metrics || {}).map(([key, v]) => `${key} ${number(v)}`)].filter(Boolean).join("  ·  ")));
}

// Bars of generating and of waiting for tools. Older records tell the sum of generating only: it is divided by tokens.
function waterfall(record) {
  const { generate = 0, total = 0, turns: told = [] } = record.timings || {};
  if (!total) return null;
  const turns = record.segments.slice(record.prompt_segments).filter(isTurn);
  const written = turns.reduce((sum, segment) => sum + segment.tokens.length, 0) || 1;
  const measured = told.length === turns.length;
  const took = measured ? told : turns.map((segment) => (generate * segment.tokens.length) / written);
  const bars = [];
  let at = 0;
  const add = (kind, title, length) => { if (length > 1e-6) bars.push({ kind, title, from: at, length }); at += Math.max(0, length); };
  const calls = record.calls.filter((call) => !call.agent);
  const own = calls.length > turns.length ? calls.slice(0, calls.length - turns.length) : [];
  own.forEach((call) => add("tool", call.names?.join() || "call", call.seconds));
  turns.forEach((segment, i) => {
    add("model", `turn ${i + 1}${segment.note === undefined ? `, ${count(segment.tokens.length)} tokens` : ":"}`, took[i]);
    const call = calls[own.length + i];
    if (call) add(failed(call) ? "tool failed" : "tool", call.names?.join() || "call", call.seconds);
  });
  if (measured) add("model", calls.length < record.calls.length ? "sub-agents" : "turns without a token", generate - took.reduce((sum, one) => sum + one, 0));
  add("other", "other: waiting, rendering", total - at);
  const whole = Math.max(at, total);
  const height = 15;
  const drawn = bars.slice(0, 60);
  const picture = svg("svg", { class: "waterfall", viewBox: `0 0 320 ${drawn.length * height}`, role: "img", "aria-label": "time of the trajectory" }, drawn.flatMap((bar, i) => {
    const [x, width] = [(bar.from / whole) * 316, Math.max(1.5, (bar.length / whole) * 316)];
    const end = x + width;
    const label = `${bar.title.slice(0, 30)} ${seconds(bar.length)}`;
    const room = LETTER * label.length + 4;
    const place = end + room < 320 ? { x: end + 4 } : x > room ? { x: x - 4, "text-anchor": "end" } : { x: x + 4, class: "inside-bar" };
    return [svg("rect", { class: bar.kind, x, y: i * height + 2, width, height: height - 4, rx: 1.5 }), svg("text", { ...place, y: i * height + 11 }, label)];
  }));
  return h("div", {}, h("h3", {}, `Time: ${seconds(total)}`), picture,
    !record.growing && h("p", { class: "faint" }, measured ? "Generating includes the wait in the engine's queue." : "Generating is divided by the tokens of each turn; the record tells its sum."));
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function callAsCurl(call) {
  return `curl -s http://127.0.0.1:5000/get_observation -d ${quoted(JSON.stringify({ trajectory_ids: ["from-the-viewer"], actions: [call.action] }))}`;
}

function askAsCurl(record) {
  const prompt = record.segments.slice(0, record.prompt_segments).flatMap((segment) => segment.tokens);
  return `curl -s http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' -d ${quoted(JSON.stringify({ model: "NAME", prompt, return_trajectory: true }))}`;
}
