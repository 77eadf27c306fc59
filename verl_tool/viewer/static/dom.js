// Elements and texts. Text of a record becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat().filter(Boolean));
  return element;
}

// The node that was drawn of `thing` before, where it was in the same `state`; else a new one. `known`: a Map, or none.
export function kept(known, thing, state, draw) {
  const before = known?.get(thing);
  if (before && before.state === state) return before.node;
  const node = draw();
  known?.set(thing, { state, node });
  return node;
}

// Gives `element` these children; those that it has already are not moved, and keep what the reader did with them.
export function fit(element, nodes) {
  nodes.forEach((node, i) => {
    const now = element.childNodes[i];
    if (now === node) return;
    if (now && nodes.includes(now)) element.insertBefore(node, now);
    else if (now) now.replaceWith(node);
    else element.append(node);
  });
  while (element.childNodes.length > nodes.length) element.lastChild.remove();
  return element;
}

// What has no shape of its own, or changes how its neighbours are read: control and format characters, bidi marks.
const UNSEEN = /(?:[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff])/g;
const NAMES = { 0x200e: "LRM", 0x200f: "RLM", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO", 0x202e: "RLO", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0x200b: "ZWSP", 0x200c: "ZWNJ", 0x200d: "ZWJ", 0xfeff: "BOM", 0x7f: "DEL" };

// `text` as nodes, in which such characters are named.
export function shown(text) {
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(UNSEEN)) {
    if (match.index > from) nodes.push(text.slice(from, match.index));
    const code = match[0].charCodeAt(0);
    const hex = "U+" + code.toString(16).toUpperCase().padStart(4, "0");
    const name = code < 0x20 ? String.fromCharCode(0x2400 + code) : NAMES[code] || hex;
    nodes.push(h("span", { class: "unseen", title: hex }, name));
    from = match.index + match[0].length;
  }
  nodes.push(text.slice(from));
  return nodes;
}

// A text on one line, without the markers of chat templates.
export function excerpt(text) {
  const plain = text.replace(/<\|im_start\|>\w*|<\|start_header_id\|>\w*<\|end_header_id\|>|<\|[a-z_]{2,20}\|>|<\/?s>/g, " ").replace(/\s+/g, " ").trim();
  return h("span", { class: "excerpt", dir: "auto" }, shown(plain.slice(-240)));
}

const FIRST = 6000;
const MORE = 60000;

// A text that may be megabytes long: its beginning, and a button for more of it.
export function longText(text, attributes = {}) {
  const place = h("pre", { dir: "auto", ...attributes, class: "text " + (attributes.class || "") });
  const add = (from, length) => {
    const to = Math.min(text.length, from + length);
    const part = h("span", {}, shown(text.slice(from, to)));
    const rest = text.length - to;
    const more = rest > 0 && h("button", { class: "more", onclick: () => { more.remove(); add(to, MORE); } }, `${count(rest)} more characters`);
    place.append(part, ...(more ? [more] : []));
  };
  add(0, FIRST);
  return place;
}

// The end of a text that still grows.
export function growingText(text) {
  const before = text.length - FIRST;
  return h("pre", { dir: "auto", class: "text growing" }, before > 0 && h("span", { class: "faint" }, `… ${count(before)} characters before\n`), shown(text.slice(-FIRST)));
}

export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 10 ** -digits || size >= 1e6)) return value.toExponential(1);
  return Number.isInteger(value) ? value.toLocaleString("en-US") : value.toFixed(size >= 100 ? 1 : digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

export function share(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value === 0 || Math.abs(value) >= 0.1 ? 0 : Math.abs(value) < 0.01 ? 2 : 1)}%`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

export function formatted(value, form) {
  return { share, seconds, tokens: count }[form]?.(value) ?? number(value);
}

export function since(time) {
  const passed = Date.now() / 1000 - time;
  if (passed < 60) return "just now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  return passed < 172800 ? `${Math.floor(passed / 3600)} h ago` : `${Math.floor(passed / 86400)} days ago`;
}

let quiet;
export function say(text) {
  const place = document.getElementById("said");
  place.textContent = text;
  place.classList.add("on");
  clearTimeout(quiet);
  quiet = setTimeout(() => place.classList.remove("on"), 2500);
}

export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    say(`${what} copied`);
  } catch {
    const box = h("textarea", { class: "copied", value: text });
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    say(done ? `${what} copied` : "the browser does not allow copying");
  }
}
