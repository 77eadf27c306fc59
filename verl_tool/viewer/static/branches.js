// What went on from a trajectory (python -m verl_tool.replay.branch), and what each of its turns is worth.

import { link } from "./api.js";
import { count, excerpt, h, number, share } from "./dom.js";

const OPEN = 4;

const told = (mean, form) => mean.value === null ? "unknown" : `${form(mean.value)}${mean.error === null ? "" : ` ± ${form(mean.error)}`}`;

// A bar beside the model's turn: how often continuations from before it were right.
export function valueBar(values, turn) {
  const value = values?.find((one) => one.turn === turn);
  const height = value?.success.value ?? value?.score.value ?? null;
  if (height === null) return null;
  const words = `before this turn: right ${told(value.success, share)}, score ${told(value.score, number)}, of ${count(value.samples)} continuations`;
  const fill = h("i", { style: { width: `${100 * Math.min(1, Math.max(0, height))}%` } });
  return h("span", { class: "value", title: words, "aria-label": words }, h("span", { class: "value-bar" }, fill), value.success.value === null ? number(height) : share(height));
}

// Where a branch comes from.
export function origin(run, branch) {
  if (!branch?.file) return null;
  const file = String(branch.file).replace(/^branches\//, "").replace(/\.jsonl$/, "");
  const address = link("trajectory", { run, files: file, file, line: Number(branch.line) - 1 });
  return h("p", { class: "origin" }, "goes on from turn ", h("b", {}, String(branch.turn)), " of ", h("a", { href: address }, `${file}:${branch.line}`), branch.edited ? `, its ${branch.edited} edited` : "",
    branch.drift?.length > 0 && h("span", { class: "warn" }, `, ${branch.drift.length} calls answered differently`));
}

export function branchTree(run, { total, branches }) {
  if (!branches?.length) return null;
  const left = total - branches.length;
  return h("div", { class: "branches" }, h("h3", {}, total === 1 ? "1 branch" : `${count(total)} branches`), groups(run, branches), left > 0 && h("p", { class: "faint" }, `${count(left)} more are not shown`));
}

function groups(run, branches) {
  const found = new Map();
  for (const branch of [...branches].sort((a, b) => a.turn - b.turn)) {
    const key = JSON.stringify([branch.turn, branch.edited, branch.text]);
    found.set(key, [...(found.get(key) || []), branch]);
  }
  return [...found.values()].map((group) => {
    const { turn, edited, text } = group[0];
    const known = group.map((branch) => branch.reward).filter((reward) => reward !== null);
    const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
    return h("details", { open: group.length <= OPEN || group.some((branch) => branch.branches.length) },
      h("summary", {}, `turn ${turn} `, edited ? `${edited} edited` : "as it was", h("span", { class: "faint" }, ` ${count(group.length)}×, mean ${number(mean)}`), edited && h("div", {}, excerpt(text))),
      h("ul", {}, group.map((branch) => leaf(run, branch))));
  });
}

function leaf(run, branch) {
  const shade = branch.correct === null ? "" : branch.correct >= 0.5 ? "good" : "bad";
  return h("li", {}, h("a", { href: link("trajectory", { run, files: branch.file, file: branch.file, line: branch.line }) }, `${branch.file}:${branch.line + 1}`), " ", h("b", { class: shade }, number(branch.reward)),
    h("span", { class: "faint" }, ` ${branch.fault || branch.stop} `), excerpt(branch.answer), branch.branches.length > 0 && groups(run, branch.branches));
}
