// A model and its tools to talk to. What the endpoint streams is put into a record that grows, and drawn as stored ones are.

import { get, isCopy, stream } from "./api.js";
import { copy, count, fit, h, kept, longText, replace, seconds, shown } from "./dom.js";
import { besides, conversation } from "./trajectory.js";

const DRAW_MS = 100;
const NEAR_END = 120; // Pixels; who reads further up is not moved.
const talk = { exchanges: [], beside: null, model: "", system: "", temperature: "", max_tokens: "", max_turns: "", draft: "" }; // Until the page is loaded anew.

export async function showLive(place) {
  if (isCopy) return void replace(place, h("p", {}, "This is a copy without a server, from which no model can be reached."), howTo());
  const told = await get("endpoint");
  if (!told.url) return void replace(place, h("h1", {}, "No endpoint to talk to"), howTo());
  if (told.error) {
    const again = h("button", { onclick: () => window.dispatchEvent(new HashChangeEvent("hashchange")) }, "look again");
    return void replace(place, h("div", { class: "bar" }, h("h1", {}, told.url), again), h("p", { class: "error" }, shown(told.error)));
  }
  const view = drawn(place, told);
  return { keys: { i: ["write a message", () => view.input.focus()] }, leave: view.leave, shown: () => { view.draw(); view.input.focus(); } };
}

function howTo() {
  const command = (text) => h("pre", { class: "text" }, text);
  return h("div", {}, h("p", {}, "Start an endpoint, which serves a model with its tools:"), command("bash eval_service/scripts/start_api_service.sh --from_run outputs/calculator/grpo"),
    h("p", {}, "and the viewer with its address:"), command("python -m verl_tool.viewer outputs --endpoint http://127.0.0.1:8000/v1"));
}

function drawn(place, told) {
  const names = told.models.map((model) => model.name);
  if (!names.includes(talk.model)) talk.model = names[0] || "";
  const models = h("select", { id: "model", onchange: () => { talk.model = models.value; } }, names.map((name) => h("option", { value: name, selected: name === talk.model }, name)));
  const box = h("div", { class: "conversation" });
  const side = h("aside", {});
  const input = h("textarea", { id: "say", rows: "2", placeholder: "Ask something. Enter sends, Shift+Enter begins a new line.", "aria-label": "message", value: talk.draft });
  const button = h("button", { id: "send", onclick: () => (writing() ? writing().stopper.abort() : send()) });
  let timer = null;
  const draw = () => {
    const atEnd = window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - NEAR_END;
    tick(writing());
    fit(box, talk.exchanges.length ? talk.exchanges.flatMap((exchange) => orWhyNot(() => nodesOf(exchange, draw))) : [h("p", { class: "faint" }, "Nothing has been said yet.")]);
    fit(side, talk.beside ? orWhyNot(() => besides(talk.beside.record, talk.beside.known)) : []);
    button.textContent = writing() ? "Stop" : "Send";
    place.dataset.state = writing() ? "writing" : talk.exchanges.at(-1)?.state || "";
    if (atEnd) window.scrollTo(0, document.documentElement.scrollHeight);
  };
  const send = async () => {
    const question = input.value.trim();
    if (!question || writing()) return;
    input.value = talk.draft = "";
    timer = setInterval(draw, DRAW_MS);
    const asked = ask(question, told.models.find((model) => model.name === talk.model)?.trajectories);
    draw();
    const exchange = await asked;
    clearInterval(timer);
    if (exchange.state === "failed" && !input.value) input.value = talk.draft = question;
    draw();
  };
  input.addEventListener("input", () => { talk.draft = input.value; });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  const anew = () => { writing()?.stopper.abort(); Object.assign(talk, { exchanges: [], beside: null }); draw(); };
  replace(place,
    h("div", { class: "bar" }, h("h1", {}, names.length > 1 ? models : shown(talk.model)), h("span", { class: "faint" }, told.url), h("span", { class: "grow" }),
      h("button", { onclick: () => talk.beside && copy(JSON.stringify(talk.beside.record), "record"), title: "a line of JSON, as in a file of records" }, "copy record"), h("button", { id: "anew", onclick: anew }, "new conversation")),
    settings(), h("div", { class: "two" }, box, side), h("div", { class: "say" }, input, button));
  return { input, draw, leave: () => { clearInterval(timer); writing()?.stopper.abort(); } };
}

function settings() {
  const field = (name, title, attributes) => h("label", {}, `${title} `, h("input", { id: name, type: "number", min: "0", class: "bound", placeholder: "default", value: talk[name], oninput: (event) => { talk[name] = event.target.value; }, ...attributes }));
  return h("details", { class: "settings" }, h("summary", { class: "faint" }, "settings"), h("div", { class: "bar" }, field("temperature", "temperature", { step: "0.1" }), field("max_tokens", "most tokens", { min: "1" }), field("max_turns", "most calls")),
    h("textarea", { id: "system", rows: "2", placeholder: "System message", "aria-label": "system message", value: talk.system, oninput: (event) => { talk.system = event.target.value; } }));
}

const writing = () => talk.exchanges.find((exchange) => exchange.state === "writing");
const now = () => performance.now() / 1000;

// Asks the endpoint, and fills an exchange with what it streams. It is never raised why that ended: the exchange tells.
async function ask(question, trajectories) {
  const order = { model: talk.model, messages: messagesWith(question), return_trajectory: Boolean(trajectories) };
  for (const name of ["temperature", "max_tokens", "max_turns"]) if (talk[name] !== "") order[name] = Number(talk[name]);
  const record = { growing: true, prompt_segments: 0, segments: [], calls: [], timings: { generate: 0, total: 0, turns: [] } };
  const exchange = { question, record, state: "writing", answer: "", error: "", stop: "", images: {}, known: new Map(), stopper: new AbortController(), began: now() };
  turnBegins(exchange);
  talk.exchanges.push(exchange);
  talk.beside = exchange;
  try {
    await stream("chat", order, exchange.stopper.signal, (event) => take(exchange, event));
    if (exchange.state === "writing") throw new Error("the answer broke off before its end");
  } catch (error) {
    exchange.state = exchange.stopper.signal.aborted ? "stopped" : "failed";
    exchange.error = error.message;
  } finally {
    exchange.stopper.abort(); // After an error the stream may go on.
  }
  ended(exchange);
  return exchange;
}

// What was said so far, as far as it has come to its end.
function messagesWith(question) {
  const said = talk.exchanges.filter((exchange) => exchange.state === "done").flatMap((exchange) => [{ role: "user", content: exchange.question }, { role: "assistant", content: exchange.answer }]);
  return [...(talk.system.trim() ? [{ role: "system", content: talk.system }] : []), ...said, { role: "user", content: question }];
}

function take(exchange, event) {
  if (event.error) throw new Error(event.error.message || "the endpoint tells of an error without a word");
  const choice = event.choices?.[0];
  if (!choice) return;
  const { content, tool_calls: calls, tool_messages: messages } = choice.delta || {};
  if (content) {
    exchange.turn.text += content;
    exchange.answer += content;
  }
  if (calls) called(exchange, calls.map((call) => call.function?.name).filter(Boolean));
  messages?.forEach((message) => answered(exchange, message.content));
  if (!choice.finish_reason) return;
  exchange.state = "done";
  exchange.stop = choice.stop_reason || choice.finish_reason;
  Object.assign(exchange.images, choice.images);
  exchange.told = choice.trajectory;
}

function turnBegins(exchange) {
  exchange.turn = { author: "model", tokens: [], text: "", note: "writing …", growing: true };
  exchange.record.segments.push(exchange.turn);
  exchange.from = now();
}

function turnEnds(exchange) {
  tick(exchange);
  Object.assign(exchange.turn, { note: "", growing: false });
  if (!exchange.turn.text && exchange.record.segments.at(-1) === exchange.turn) {
    exchange.record.segments.pop();
    exchange.record.timings.turns.pop();
  }
}

function called(exchange, names) {
  if (exchange.call) return void exchange.call.names.push(...names);
  const action = exchange.turn.text;
  turnEnds(exchange);
  exchange.call = { step: exchange.record.calls.length, action, names, observation: "", valid: true, waiting: true, seconds: 0 };
  exchange.record.calls.push(exchange.call);
  exchange.from = now();
}

// A tool's message: a text, or parts of which some are images.
function answered(exchange, content) {
  if (!exchange.call) called(exchange, []);
  tick(exchange);
  exchange.call.waiting = false;
  for (const part of typeof content === "string" ? [{ text: content }] : content || []) {
    const image = part.image_url && `shown-${Object.keys(exchange.images).length}`;
    if (image) exchange.images[image] = part.image_url.url;
    exchange.call.observation += part.text || "";
    exchange.record.segments.push({ author: "tool", tokens: [], text: part.text || "", image, note: "" });
  }
  exchange.call = null;
  exchange.answer = "";
  turnBegins(exchange);
}

// The seconds so far, by the page's clock; the endpoint's own come with its record.
function tick(exchange) {
  if (!exchange) return;
  const { timings, segments } = exchange.record;
  const turns = segments.filter((segment) => segment.author === "model").length;
  if (exchange.call) exchange.call.seconds = now() - exchange.from;
  else timings.turns[turns - 1] = now() - exchange.from;
  timings.generate = timings.turns.reduce((sum, one) => sum + one, 0);
  timings.total = now() - exchange.began;
}

function ended(exchange) {
  if (exchange.call) exchange.call.waiting = false;
  else turnEnds(exchange);
  exchange.record.growing = false;
  if (exchange.told) exchange.record = exchange.told;
}

// What an endpoint sends may be no record at all.
function orWhyNot(draw) {
  try {
    return draw();
  } catch (error) {
    return [h("p", { class: "error" }, `what the endpoint sent cannot be drawn: ${error.message}`)];
  }
}

function nodesOf(exchange, draw) {
  const { record, known } = exchange;
  const picture = (name) => pictureOf(exchange.images[name] || "");
  const prompt = record.segments.slice(0, record.prompt_segments);
  const tokens = prompt.reduce((sum, segment) => sum + segment.tokens.length, 0);
  return [
    kept(known, "question", "", () => h("div", { class: "segment prompt" }, h("div", { class: "author" }, h("span", {}, "you")), longText(exchange.question))),
    prompt.length > 0 && kept(known, "prompt", "", () => h("details", { class: "faint" }, h("summary", {}, `the prompt as the model read it, ${count(tokens)} tokens`), conversation({ segments: prompt, prompt_segments: prompt.length }, picture))),
    ...conversation({ ...record, segments: record.segments.slice(record.prompt_segments), prompt_segments: 0 }, picture, known),
    exchange.state !== "writing" && kept(known, "end", talk.beside === exchange, () => endOf(exchange, draw)),
  ].filter(Boolean);
}

function endOf(exchange, draw) {
  const { timings, calls } = exchange.record;
  const beside = talk.beside !== exchange && h("button", { onclick: () => { talk.beside = exchange; draw(); } }, "its calls and times");
  const words = exchange.state === "done" ? `ended: ${exchange.stop}` : `${exchange.state}: what follows does not build on it`;
  return h("div", { class: "end" }, exchange.state === "failed" && h("p", { class: "error" }, shown(exchange.error)),
    h("p", { class: "faint" }, ...shown([words, `${count(calls.length)} call${calls.length === 1 ? "" : "s"}`, seconds(timings.total)].join(" · ")), " ", beside));
}

// An image as pixels: the page may load no picture but the server's own (Content-Security-Policy).
function pictureOf(address) {
  const canvas = h("canvas", {});
  const draw = async () => {
    const bytes = Uint8Array.from(atob(address.split(",")[1]), (character) => character.charCodeAt(0));
    const bitmap = await createImageBitmap(new Blob([bytes]));
    Object.assign(canvas, { width: bitmap.width, height: bitmap.height });
    canvas.getContext("2d").drawImage(bitmap, 0, 0);
  };
  draw().catch((error) => canvas.replaceWith(h("p", { class: "faint" }, `the image cannot be shown: ${error.message}`)));
  return canvas;
}
