// The samples of one prompt side by side: what did the winners do that the others did not.

import { get, link, tableParams } from "./api.js";
import { count, h, longText, number, replace, share } from "./dom.js";
import { besideRecords, conversation, failed } from "./trajectory.js";

const MOST = 16;

export async function showGroup(place, params) {
  const { rows } = await get("group", params);
  const mean = average(rows.map((row) => row.reward));
  const recorded = rows.some((row) => row.advantage !== null);
  const sorted = [...rows].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)).slice(0, MOST);
  const told = await Promise.all(sorted.map((row) => get("trajectory", { run: params.run, file: row.file, line: row.line })));
  const records = told.map(({ record }) => record.trajectory || record);
  const best = sorted[0]?.reward;
  const won = sorted.map((row) => row.reward !== null && row.reward > mean && row.reward >= best - 1e-6 * Math.abs(best) - (best - mean) / 2);
  const prompt = records[0]?.segments?.slice(0, records[0].prompt_segments).map((segment) => segment.text).join("") || "";
  const cards = sorted.map((row, i) => h("article", { class: won[i] ? "won" : "" },
    h("header", {}, h("a", { href: link("trajectory", { run: params.run, ...tableParams(params), file: row.file, line: row.line }) }, `line ${row.line + 1}`),
      h("b", { class: row.reward > mean ? "good" : row.reward < mean ? "bad" : "" }, number(row.reward)), h("span", { title: recorded ? "advantage, as the trainer has recorded it" : "reward less the group's mean; the trainer's advantage is not recorded" }, `${recorded ? "advantage" : "− mean"} ${number(recorded ? row.advantage : row.reward - mean)}`)),
    h("p", { class: "faint" }, [row.stop, `${row.calls} calls${row.failed_calls ? `, ${row.failed_calls} failed` : ""}`, `${count(row.model_tokens)} tokens`, row.excluded && `left out: ${row.excluded}`].filter(Boolean).join(" · ")),
    records[i].segments ? conversation({ ...records[i], segments: records[i].segments.slice(records[i].prompt_segments), prompt_segments: 0 }, besideRecords(params.run)) : h("p", { class: "error" }, "no record")));
  replace(place,
    h("div", { class: "bar" }, h("a", { class: "button", href: link("table", { run: params.run, files: params.file, ...tableParams(params) }) }, "↑ table"), h("h1", {}, `${rows.length} samples of one prompt`),
      rows.length > MOST && h("span", { class: "faint" }, `the ${MOST} with the highest rewards are shown`), rows[0] && h("a", { class: "button", href: link("table", { run: params.run, prompt: rows[0].prompt, sort: "step" }) }, "this prompt at all steps")),
    longText(prompt, { class: "prompt-text" }), comparison(sorted, records, won), h("div", { class: "side" }, cards));
  return { keys: {} };
}

function comparison(rows, records, won) {
  const winners = rows.filter((_, i) => won[i]).length;
  if (!winners || winners === rows.length) return h("p", { class: "faint" }, rows.length > 1 ? "All rewards are alike: the group tells nothing, and its advantages are 0." : "");
  const split = (values) => [true, false].map((side) => average(values.filter((_, i) => won[i] === side)));
  const lines = [["calls", rows.map((row) => row.calls)], ["failed calls", rows.map((row) => row.failed_calls)], ["turns", rows.map((row) => row.turns)], ["tokens of the model", rows.map((row) => row.model_tokens)], ["seconds", rows.map((row) => row.seconds)]]
    .map(([title, values]) => [title, ...split(values).map((v) => number(v, 1))]);
  const names = [...new Set(records.flatMap((record) => (record.calls || []).flatMap((call) => call.names || [])))];
  for (const name of names) lines.push([`called ${name}`, ...split(records.map((record) => Number((record.calls || []).some((call) => call.names?.includes(name))))).map(share)]);
  const actions = new Map();
  records.forEach((record, i) => new Set((record.calls || []).filter((call) => !failed(call)).map((call) => call.action.trim())).forEach((action) => {
    const seen = actions.get(action) || [0, 0];
    seen[won[i] ? 0 : 1] += 1;
    actions.set(action, seen);
  }));
  const only = [...actions].filter(([, [yes, no]]) => yes > 0 && no === 0).sort((a, b) => b[1][0] - a[1][0]).slice(0, 5);
  return h("div", { class: "comparison" }, h("div", { class: "scroll" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, h("th", {}, "mean of"), h("th", { class: "n" }, `${winners} with the best reward`), h("th", { class: "n" }, `${rows.length - winners} others`))), h("tbody", {}, lines.map(([title, a, b]) => h("tr", {}, h("td", {}, title), h("td", { class: "n" }, a), h("td", { class: "n" }, b)))))),
    only.length > 0 && h("div", {}, h("h3", {}, "Calls that only those made"), only.map(([action, [n]]) => h("div", { class: "only" }, h("span", { class: "faint" }, `${n}×`), longText(action)))));
}

function average(values) {
  const known = values.filter((v) => v !== null && v !== undefined);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}
