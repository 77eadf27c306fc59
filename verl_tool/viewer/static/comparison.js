// Two evaluations of the same problems: their difference, and the problems that only one of them solves.

import { get, link } from "./api.js";
import { count, excerpt, h, replace, share } from "./dom.js";

export async function showComparison(place, params) {
  const names = params.run.split(",");
  const told = await get("compare", { run: params.run });
  const signed = (value, digits = 1) => `${value >= 0 ? "+" : ""}${(100 * value).toFixed(digits)}%`;
  const plain = (value) => `${value >= 0 ? "+" : ""}${value.toFixed(4)}`;
  const interval = (difference, form) => `${form(difference.value)} [${form(difference.low)}, ${form(difference.high)}]`;
  const test = (difference) => `${difference.p.toPrecision(2)} (${difference.test})`;
  const row = (title, ...cells) => h("tr", {}, h("td", {}, title), cells.map((cell) => h("td", { class: "n" }, cell)));
  replace(place,
    h("div", { class: "bar" }, h("h1", {}, "Two evaluations"),
      h("a", { href: link("run", { run: `${names[1]},${names[0]}` }) }, "the other way round")),
    h("div", { class: "scroll" }, h("table", { class: "list comparison" },
      h("thead", {}, h("tr", {}, ["", `A: ${names[0]}`, `B: ${names[1]}`, "B − A (95% interval)", "p"].map((title, i) => h("th", { class: i ? "n" : "" }, title)))),
      h("tbody", {},
        row("right answers", share(told.first_accuracy), share(told.second_accuracy), interval(told.accuracy, signed), test(told.accuracy)),
        told.score && row("reward", "", "", interval(told.score, plain), test(told.score)),
        row("problems", count(told.problems), count(told.problems), "", ""),
        row("only this one solves", count(told.lost.length), count(told.solved.length), "", ""),
        told.left_out > 0 && row("left out: no score in one", count(told.left_out), count(told.left_out), "", "")))),
    told.remarks.map((remark) => h("p", { class: "warn" }, remark)),
    flips("Only B solves", told.solved, names), flips("Only A solves", told.lost, names));
}

function flips(title, found, names) {
  if (!found.length) return h("p", { class: "faint" }, `${title}: no problem`);
  const answers = (flip, i) => link("table", { run: names[i], files: "records", index_min: flip.index, index_max: flip.index });
  const rows = found.slice(0, 500).map((flip) => h("tr", {},
    h("td", { class: "n" }, String(flip.index)),
    h("td", { class: "n" }, h("a", { href: answers(flip, 0) }, share(flip.first))), h("td", { class: "n" }, h("a", { href: answers(flip, 1) }, share(flip.second))),
    [flip.question, flip.first_answer, flip.second_answer].map((text) => h("td", {}, excerpt(text)))));
  const heads = ["problem", "A", "B", "the question ends in", "A's answer", "B's answer"];
  return h("section", {}, h("h2", {}, `${title}: ${count(found.length)} problems`),
    h("div", { class: "scroll" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, heads.map((head, i) => h("th", { class: i < 3 ? "n" : "" }, head)))), h("tbody", {}, rows))));
}
