// The trajectories of a step, or of all: filtered, sorted, and only those in sight drawn.

import { get, link, tableParams } from "./api.js";
import { count, excerpt, formatted, h, number, replace, share } from "./dom.js";

const ROW = 26;
const BLOCK = 200;
const TALLEST = 10_000_000; // Pixels; browsers bound the height of an element.

const COLUMNS = [
  { name: "step", width: 52, n: true, many: true },
  { name: "line", width: 52, n: true, draw: (row) => String(row.line + 1) },
  { name: "reward", width: 98, n: true, draw: rewardCell },
  { name: "correct", title: "right", width: 50, draw: (row) => (row.correct === null ? "" : h("span", { class: row.correct >= 0.5 ? "good" : "bad" }, row.correct >= 0.5 ? "✓" : "✗")) },
  { name: "advantage", width: 74, n: true, some: true, draw: (row) => number(row.advantage) },
  { name: "stop", width: 128, draw: (row) => h("span", { class: /^(answered|tool_done)$/.test(row.stop) ? "faint" : "warn" }, row.stop) },
  { name: "fault", width: 96, some: true, draw: (row) => h("span", { class: "bad" }, row.fault) },
  { name: "excluded", title: "left out", width: 76, some: true, draw: (row) => h("span", { class: "warn" }, row.excluded) },
  { name: "tools", width: 120 },
  { name: "calls", width: 56, n: true, draw: (row) => [String(row.calls), row.failed_calls > 0 && h("span", { class: "bad", title: "calls that failed" }, ` −${row.failed_calls}`)] },
  { name: "turns", width: 50, n: true },
  { name: "model_tokens", title: "written", width: 64, n: true, hint: "tokens that the model wrote", draw: (row) => count(row.model_tokens) },
  { name: "tool_tokens", title: "shown", width: 62, n: true, hint: "tokens of tools and template", draw: (row) => count(row.tool_tokens) },
  { name: "seconds", width: 72, n: true, draw: (row) => formatted(row.seconds, "seconds") },
  { name: "index", title: "problem", width: 72, n: true, hint: "row of the data", draw: (row) => (row.index < 0 ? "" : String(row.index)) },
  { name: "question", wide: true, unsorted: true, draw: (row) => excerpt(row.question) },
  { name: "answer", wide: true, unsorted: true, draw: (row) => excerpt(row.answer) },
];

function rewardCell(row) {
  if (row.reward === null) return "–";
  const size = Math.min(1, Math.abs(row.reward)) * 34;
  return [h("span", { class: `reward ${row.reward > 0 ? "up" : "down"}`, style: { width: `${size}px` } }), number(row.reward)];
}

export async function showTable(place, params, stillHere) {
  let facets = await get("facets", params);
  if (!params.files && !("prompt" in params) && !("text" in params) && !("all" in params) && facets.files.length) {
    const steps = facets.files.filter((file) => file.kind === "step");
    params.files = (steps.at(-1) || facets.files.at(-1)).name;
    history.replaceState(null, "", link("table", params));
    facets = await get("facets", params);
  }
  const goto = (changed) => { location.hash = link("table", { ...params, ...changed }); };
  const one = params.files && !params.files.includes(",");
  const blocks = new Map();
  let total = 0;
  let ready = false;
  let selected = Number(sessionStorage[`at ${location.hash}`] || 0);
  const spacer = h("div", { class: "spacer" });
  const pane = h("div", { class: "pane" });
  const scroller = h("div", { class: "scroller", tabindex: "0" }, h("div", { class: "inside" }, pane, spacer));
  const told = h("span", { class: "faint", id: "found" });

  const rowAt = (number) => blocks.get(Math.floor(number / BLOCK))?.rows?.[number % BLOCK];
  const load = async (block) => {
    if (blocks.has(block)) return;
    blocks.set(block, {});
    if (blocks.size > 60) blocks.delete(blocks.keys().next().value);
    try {
      const page = await get("rows", { ...params, offset: block * BLOCK, limit: BLOCK });
      blocks.set(block, page);
      total = page.total;
      const searched = page.searched < page.candidates ? `; searched ${count(page.searched)} of ${count(page.candidates)}, stopped after 8 s` : "";
      const missing = page.missing_bytes ? `; ${count(page.missing_bytes / 1e6)} MB are still being read` : "";
      told.textContent = `${count(total)} of ${count(page.rows_known)} trajectories${searched}${missing}`;
    } catch (error) {
      blocks.delete(block);
      told.textContent = error.message;
    }
    if (ready && stillHere()) draw();
  };
  await load(0);
  const rowsOf = (block) => blocks.get(block)?.rows || [];
  const visible = COLUMNS.filter((c) => (!c.many || !one) && (!c.some || rowsOf(0).some((row) => row[c.name])));
  const template = visible.map((c) => (c.wide ? "minmax(180px, 1fr)" : `${c.width}px`)).join(" ");
  const sort = (c) => goto({ sort: c.name, desc: params.sort === c.name && params.desc ? "" : "1" });
  const least = visible.reduce((sum, c) => sum + (c.width || 180), 0);
  const head = h("div", { class: "row head", style: { gridTemplateColumns: template } }, visible.map((c) =>
    h("button", { class: (c.n ? "n " : "") + (params.sort === c.name ? "on" : ""), disabled: c.unsorted, title: c.hint || "", onclick: () => sort(c) }, c.title || c.name, params.sort === c.name ? (params.desc ? " ↓" : " ↑") : "")));

  const first = () => {
    const span = Math.max(1, spacer.offsetHeight - scroller.clientHeight);
    return total * ROW > TALLEST ? (scroller.scrollTop / span) * (total - scroller.clientHeight / ROW) : scroller.scrollTop / ROW;
  };
  const address = (row) => link("trajectory", { run: params.run, ...tableParams(params), file: row.file, line: row.line });
  const draw = () => {
    spacer.style.height = `${Math.min(total * ROW, TALLEST)}px`;
    const from = Math.max(0, Math.floor(first()));
    const to = Math.min(total, from + Math.ceil(scroller.clientHeight / ROW) + 1);
    for (let block = Math.floor(from / BLOCK); block <= Math.floor(Math.max(from, to - 1) / BLOCK); block++) load(block);
    const rows = [];
    for (let at = from; at < to; at++) {
      const row = rowAt(at);
      rows.push(h("a", { class: `row${at === selected ? " selected" : ""}`, href: row ? address(row) : null, onclick: () => keep(at), style: { gridTemplateColumns: template } },
        row ? visible.map((c) => h("span", { class: c.n ? "n" : "" }, c.draw ? c.draw(row) : String(row[c.name] ?? ""))) : h("span", { class: "faint" }, "…")));
    }
    replace(pane, rows);
    pane.style.transform = `translateY(${total * ROW > TALLEST ? 0 : -(scroller.scrollTop % ROW)}px)`;
  };
  const keep = (at) => { selected = at; sessionStorage[`at ${location.hash}`] = String(at); };
  const move = (by) => {
    keep(Math.max(0, Math.min(total - 1, selected + by)));
    const top = first();
    const fits = Math.floor(scroller.clientHeight / ROW) - 1;
    if (selected < top) scrollToRow(selected);
    else if (selected > top + fits) scrollToRow(selected - fits);
    draw();
  };
  const scrollToRow = (at) => {
    scroller.scrollTop = total * ROW > TALLEST ? (at / (total - scroller.clientHeight / ROW)) * (spacer.offsetHeight - scroller.clientHeight) : at * ROW;
  };
  let due = false;
  scroller.addEventListener("scroll", () => { if (!due) { due = true; requestAnimationFrame(() => { due = false; draw(); }); } });
  const resized = () => draw();
  window.addEventListener("resize", resized);

  const filters = filterBar(params, facets, goto);
  const problems = h("div", { class: "bar warn", hidden: true });
  const listProblems = (of) => {
    const lines = Object.entries(of || {}).map(([name, why]) => `${name} is not read: ${why}`);
    problems.hidden = !lines.length;
    problems.textContent = lines.slice(0, 5).join(" · ") + (lines.length > 5 ? ` · and ${lines.length - 5} more files` : "");
  };
  listProblems(facets.problems);
  replace(place, filters.bar, h("div", { class: "bar" }, told), problems, scroller);
  scroller.prepend(head);
  scroller.querySelector(".inside").style.minWidth = head.style.minWidth = `${least}px`;
  const open = () => rowAt(selected) && (location.hash = address(rowAt(selected)));
  const steps = facets.files.filter((file) => file.kind === (facets.files.find((f) => f.name === params.files)?.kind || "step"));
  const other = (by) => { const at = steps.findIndex((file) => file.name === params.files) + by; if (steps[at]) goto({ files: steps[at].name }); };
  return {
    shown: () => { ready = true; draw(); if (selected) move(0); },
    leave: () => window.removeEventListener("resize", resized),
    keys: {
      j: ["next row", () => move(1)], ArrowDown: ["next row", () => move(1)], k: ["row before", () => move(-1)], ArrowUp: ["row before", () => move(-1)],
      Enter: ["open the trajectory", open], g: ["its group side by side", () => rowAt(selected) && (location.hash = link("group", { run: params.run, ...tableParams(params), file: rowAt(selected).file, line: rowAt(selected).line }))],
      "/": ["search the texts", () => filters.words.focus()], "]": ["next step", () => other(1)], "[": ["step before", () => other(-1)],
    },
    follow: async () => {
      const now = await get("facets", params);
      if (stillHere() && now.version !== facets.version) {
        facets = now;
        filters.files(now.files);
        listProblems(now.problems);
        blocks.clear();
        await load(Math.floor(first() / BLOCK));
      }
      return now.missing_bytes > 0 || (await get("runs")).some((run) => run.name === params.run && Date.now() / 1000 - run.changed < 120);
    },
  };
}

function filterBar(params, facets, goto) {
  const files = h("select", { id: "files", title: "file of records", onchange: (e) => goto({ files: e.target.value, all: e.target.value ? "" : "1" }) });
  const fillFiles = (listed) => {
    const others = params.files && !listed.some((file) => file.name === params.files);
    replace(files, h("option", { value: "" }, `all ${listed.length} files`), others && h("option", { value: params.files }, params.files), [...listed].reverse().map((file) => h("option", { value: file.name }, file.name.replace("_", " "))));
    files.value = params.files || "";
  };
  fillFiles(facets.files);
  const choice = (name, title, found) => {
    const known = Object.entries(found).filter(([word]) => word !== "");
    if (!known.length && !params[name]) return null;
    if (known.length === 1 && !params[name] && name !== "fault" && !found[""]) return null;
    return h("select", { id: name, title, class: params[name] ? "set" : "", onchange: (e) => goto({ [name]: e.target.value }) },
      h("option", { value: "" }, `any ${title}`), name === "fault" && h("option", { value: "(any)", selected: params.fault === "(any)" }, "faulted"),
      known.map(([word, n]) => h("option", { value: word, selected: params[name] === word }, `${word} (${count(n)})`)));
  };
  const words = h("input", { type: "search", id: "words", placeholder: "search texts ( / )", value: params.text || "", onchange: (e) => goto({ text: e.target.value }) });
  const bound = (name, end, title) => h("input", { class: `bound ${params[`${name}_${end}`] ? "set" : ""}`, id: `${name}_${end}`, type: "number", step: "any", placeholder: title, title: `${name.replace("_", " ")}, ${end === "min" ? "at least" : "at most"}`, value: params[`${name}_${end}`] || "", onchange: (e) => goto({ [`${name}_${end}`]: e.target.value }) });
  const failing = h("input", { type: "checkbox", id: "failing", checked: params.failed_calls_min === "1", onchange: (e) => goto({ failed_calls_min: e.target.checked ? "1" : "" }) });
  const right = h("select", { id: "right", class: params.correct_min || params.correct_max ? "set" : "", onchange: (e) => goto({ correct_min: e.target.value === "right" ? "0.5" : "", correct_max: e.target.value === "wrong" ? "0.49" : "" }) },
    h("option", { value: "" }, "right or wrong"), h("option", { selected: !!params.correct_min }, "right"), h("option", { selected: !!params.correct_max }, "wrong"));
  const set = Object.keys(tableParams(params)).filter((name) => !/^(files|sort|desc)$/.test(name));
  return {
    words,
    files: fillFiles,
    bar: h("div", { class: "bar filters" }, files, choice("stop", "end", facets.stop), choice("tool", "tool", facets.tool), choice("fault", "fault", facets.fault), choice("excluded", "loss", facets.excluded),
      right, h("label", { title: "with a call that failed" }, failing, `failed calls (${count(facets.failed)})`), histogram(facets.rewards, params, goto),
      bound("reward", "min", "reward ≥"), bound("reward", "max", "reward ≤"), bound("model_tokens", "min", "tokens ≥"), bound("turns", "min", "turns ≥"), words,
      set.length > 0 && h("button", { id: "clear", onclick: () => goto(Object.fromEntries(set.map((name) => [name, ""]))) }, "clear"), params.prompt && h("span", { class: "chip" }, "one prompt")),
  };
}

function histogram(rewards, params, goto) {
  if (!rewards.counts.length || !rewards.edges.length) return null;
  const most = Math.max(...rewards.counts, 1);
  return h("div", { class: "histogram", title: "rewards of the file; a bar filters" }, rewards.counts.map((n, i) =>
    h("button", { title: `${number(rewards.edges[i])} to ${number(rewards.edges[i + 1])}: ${count(n)} (${share(n / rewards.counts.reduce((a, b) => a + b, 0))})`, style: { height: n ? `${Math.max(2, 20 * Math.sqrt(n / most))}px` : "0" },
      onclick: () => goto({ reward_min: String(rewards.edges[i] - 1e-6), reward_max: String(rewards.edges[i + 1] + 1e-6) }) })));
}
