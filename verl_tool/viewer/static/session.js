// The session of an agent that ran its tools itself: its answers as a tree, and how its program ended.

import { count, excerpt, h, longText, number, seconds, shown } from "./dom.js";

const INDENTS = 8;
const UNUSED = {
  auxiliary: "an answer without tools that is used nowhere, such as a title: in no row", dropped: "the agent threw it away or sampled it again: in no row",
  undelivered: "the agent did not receive it: in no row", empty: "no token: in no row",
};
const list = (value) => Array.isArray(value) ? value : [];
const plain = (value) => shown(String(value ?? "").slice(0, 200));

// In the order of the tree: what was sampled in place of an answer stands before the one that the longest branch has.
function inOrder(answers) {
  const parents = answers.map((answer, i) => Number.isInteger(answer?.parent) && answer.parent >= 0 && answer.parent < i ? answer.parent : -1);
  const length = answers.map(() => 1);
  for (let i = answers.length - 1; i > 0; i--) if (parents[i] >= 0) length[parents[i]] = Math.max(length[parents[i]], length[i] + 1);
  const children = answers.map(() => []);
  const roots = [];
  parents.forEach((parent, i) => (parent < 0 ? roots : children[parent]).push(i));
  const order = [];
  const open = roots.reverse().map((i) => [i, 0]);
  while (open.length) {
    const [i, depth] = open.pop();
    order.push([i, depth]);
    const main = children[i].reduce((best, child) => best < 0 || length[child] >= length[best] ? child : best, -1);
    if (main >= 0) open.push([main, depth]);
    children[i].filter((child) => child !== main).reverse().forEach((child) => open.push([child, depth + 1]));
  }
  return order;
}

function goTo(segment) {
  document.querySelectorAll(".conversation > .segment")[segment]?.scrollIntoView({ block: "start" });
}

function answerLine(record, session, i, depth) {
  const answer = session.answers[i] || {};
  const segment = record.segments[answer.segment];
  const name = answer.agent ? ["sub-agent ", ...plain(list(session.agents)[answer.agent - 1] ?? answer.agent)] : "main";
  const mark = (title, words) => h("em", { class: "mark", title: words }, title);
  const marks = [
    answer.parent === null && i > 0 && mark("new conversation", "its request repeats no recorded answer"),
    answer.unused && mark(String(answer.unused).slice(0, 20), UNUSED[answer.unused] || "in no row"), answer.edited && mark("came back edited", "the agent sent it back changed; the sampled tokens were kept"),
    answer.foreign > 0 && mark(`behind ${count(answer.foreign)} foreign`, "its request has messages of an assistant that are no recorded answers"), answer.retries > 0 && mark(`${count(answer.retries)} retries`, "the agent asked again after a broken connection, and got the same answer"),
    answer.finish === "length" && mark("cut", "a limit of tokens cut it"),
  ].filter(Boolean);
  const label = segment ? h("button", { onclick: () => goTo(answer.segment), title: "go to its text" }, `${i + 1}`) : h("b", {}, `${i + 1}`);
  return h("li", { style: { marginLeft: `${12 * Math.min(depth, INDENTS)}px` } }, label, " ", h("span", {}, name), h("span", { class: "faint" }, ` ${String(answer.dialect ?? "").slice(0, 20)}, ${number(answer.prompt_tokens)} + ${number(answer.tokens)} tokens${segment ? `, row ${(segment.row || 0) + 1}` : ""} `),
    list(answer.calls).length > 0 && h("span", {}, plain(list(answer.calls).join(", "))), " ", marks, answer.text && h("div", {}, excerpt(String(answer.text))));
}

function program(result) {
  const code = result.exit_code;
  const state = result.error ? "did not run" : code === null || code === undefined ? "killed at its time limit" : `exit ${String(code).slice(0, 20)}`;
  const files = Object.entries(result.files || {});
  return h("div", { class: `call program${code === 0 ? "" : " failed"}` }, h("h3", {}, `Program: ${state}`, typeof result.seconds === "number" && h("span", { class: "faint" }, ` ${seconds(result.seconds)}`)),
    result.settings?.command && h("p", { class: "faint" }, excerpt(list(result.settings.command).join(" "))), result.error && h("p", { class: "error" }, plain(result.error)),
    result.output && h("div", {}, h("div", { class: "label" }, "end of its output"), longText(String(result.output).slice(-20000))),
    files.map(([name, content]) => h("details", { open: files.length < 3 }, h("summary", {}, plain(name)), longText(String(content)))));
}

export function sessionTree(record) {
  const { session, agent_program: result } = record.extra || {};
  if (!list(session?.answers).length && !result) return null;
  const answers = list(session?.answers);
  const settings = Object.entries(session?.policy || {}).map(([name, value]) => `${name}=${value}`).join(", ").slice(0, 200);
  return h("div", { class: "session" }, answers.length > 0 && h("h3", {}, `Session: ${count(answers.length + (session.more_answers || 0))} answers`),
    answers.length > 0 && h("ul", {}, inOrder(answers).map(([i, depth]) => answerLine(record, session, i, depth))),
    session?.more_answers > 0 && h("p", { class: "faint" }, `${count(session.more_answers)} more are not described`),
    settings && h("p", { class: "faint" }, settings), list(session?.rejected).map((words) => h("p", { class: "error" }, "rejected: ", plain(words))), result && program(result));
}
