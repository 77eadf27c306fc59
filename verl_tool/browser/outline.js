// Reads a frame as lines of text, in a JavaScript world of its own: the page's scripts see none of it and cannot change it.
// Called with {next, maxCharacters, maxNodes, exclude}; returns {lines, next, cut, above, title}.
(options) => {
  const INTERACTIVE = new Set(["button", "link", "textbox", "searchbox", "combobox", "listbox", "checkbox", "radio", "switch",
    "slider", "spinbutton", "tab", "menuitem", "menuitemcheckbox", "menuitemradio", "treeitem", "option", "gridcell"]);
  const CONTAINERS = new Set(["list", "table", "row", "grid", "dialog", "alertdialog", "navigation", "form", "menu", "menubar",
    "radiogroup", "tablist", "tree", "toolbar", "group", "alert", "status", "banner", "main", "complementary", "contentinfo"]);
  const SKIPPED = new Set(["SCRIPT", "STYLE", "NOSCRIPT", "TEMPLATE", "HEAD", "META", "LINK", "OPTION", "OPTGROUP", "DATALIST"]);
  const FIELDS = new Set(["INPUT", "SELECT", "TEXTAREA", "BUTTON", "IFRAME"]);
  const PLAIN = new Set(["DIV", "SPAN", "P", "B", "I", "EM", "STRONG", "SMALL", "BR", "HR", "TD", "TH", "LI", "CODE", "PRE", "LABEL"]);
  const EVENTS = ["click", "mousedown", "mouseup", "pointerdown", "pointerup", "dblclick", "touchstart"];
  const COLORS = { black: [0, 0, 0], white: [255, 255, 255], red: [255, 0, 0], lime: [0, 255, 0], blue: [0, 0, 255],
    yellow: [255, 255, 0], cyan: [0, 255, 255], magenta: [255, 0, 255], grey: [128, 128, 128], silver: [192, 192, 192],
    maroon: [128, 0, 0], olive: [128, 128, 0], green: [0, 128, 0], purple: [128, 0, 128], teal: [0, 128, 128],
    navy: [0, 0, 128], orange: [255, 165, 0], pink: [255, 192, 203], brown: [165, 42, 42] };
  const NAME = 200, VALUE = 400, TEXT = 2000, DEPTH = 400, OPTIONS = 50;
  const world = globalThis.verlToolOutline;
  const lines = [];
  let next = options.next, length = 0, nodes = 0, above = 0, cut = false, pending = "", pendingTop = 0, pendingDepth = 0;

  const clip = (text, maximum) => {
    const plain = String(text ?? "").slice(0, 4 * maximum).replace(/\s+/g, " ").trim();
    return plain.length > maximum ? plain.slice(0, maximum) + "…" : plain;
  };
  const quoted = (text, maximum) => JSON.stringify(clip(text, maximum));
  const push = (depth, line, bottom) => {
    if (bottom !== undefined && scrollY > 0 && bottom <= 0) { above++; return; }
    if (length + line.length > options.maxCharacters) { cut = true; return; }
    lines.push(" ".repeat(Math.min(depth, 12)) + line);
    length += line.length + 1 + Math.min(depth, 12);
  };
  const flush = () => {
    const text = clip(pending, TEXT);
    pending = "";
    if (text) push(pendingDepth, "text " + JSON.stringify(text), pendingTop);
  };
  const idOf = (element) => {
    let id = world.ids.get(element);
    if (id === undefined) {
      id = next++;
      world.ids.set(element, id);
      world.elements.set(id, new WeakRef(element));
    }
    return id;
  };
  const colorOf = (style, parent, isSvg) => {
    const value = isSvg ? style.fill : style.backgroundColor;
    const numbers = value.match(/[\d.]+/g)?.map(Number);
    if (!numbers || numbers.length < 3 || numbers[3] === 0) return "";
    if (!isSvg && parent && getComputedStyle(parent).backgroundColor === value) return "";
    let best = "", distance = 3 * 48 ** 2;
    for (const [name, rgb] of Object.entries(COLORS)) {
      const far = rgb.reduce((sum, part, i) => sum + (part - numbers[i]) ** 2, 0);
      if (far < distance) { best = name; distance = far; }
    }
    return best || `rgb(${numbers.slice(0, 3).join(",")})`;
  };
  const listens = (element) => {
    if (element === document.body || element === document.documentElement) return false;
    if (EVENTS.some((name) => typeof element["on" + name] === "function" || element.hasAttribute("on" + name))) return true;
    return world.listening.has(element);
  };
  const statesOf = (element, role) => {
    const states = [];
    const aria = (name) => element.getAttribute("aria-" + name);
    const isField = element instanceof HTMLInputElement || element instanceof HTMLTextAreaElement;
    if (["checkbox", "radio", "switch", "menuitemcheckbox", "menuitemradio"].includes(role)) {
      const checked = element instanceof HTMLInputElement ? element.checked : aria("checked") === "true";
      states.push(checked ? "checked" : "unchecked");
    } else if (isField && !["button", "submit", "reset", "image", "file"].includes(element.type)) {
      if (element.value) states.push("value=" + (element.type === "password" ? '"•••"' : quoted(element.value, VALUE)));
      if (element.readOnly) states.push("readonly");
    } else if (element instanceof HTMLSelectElement) {
      const all = [...element.options].slice(0, OPTIONS);
      states.push("options: " + all.map((each) => quoted(each.label, NAME) + (each.selected ? " (selected)" : "")).join(", "));
      if (element.options.length > OPTIONS) states.push(`and ${element.options.length - OPTIONS} more`);
    } else if (element.isContentEditable) states.push("value=" + quoted(element.innerText, VALUE));
    if (aria("expanded")) states.push(aria("expanded") === "true" ? "expanded" : "collapsed");
    if (aria("selected") === "true") states.push("selected");
    if (aria("pressed") === "true") states.push("pressed");
    if (element.disabled || aria("disabled") === "true") states.push("disabled");
    if (element.required) states.push("required");
    if (element.getRootNode().activeElement === element && element !== document.body) states.push("focused");
    return states.length ? " " + states.join(" ") : "";
  };
  const children = (node) => {
    if (node.shadowRoot) return node.shadowRoot.childNodes;
    if (node.localName === "slot") {
      const assigned = node.assignedNodes({ flatten: true });
      if (assigned.length) return assigned;
    }
    return node.childNodes;
  };
  const descend = (node, depth, pointer, level) => {
    for (const child of children(node)) {
      if (cut) return;
      try {
        walk(child, depth, pointer, level + 1);
      } catch {
        // A form whose fields have the names of its properties hides these; the rest of the page is read.
      }
    }
  };
  const walk = (node, depth, pointer, level) => {
    if (++nodes > options.maxNodes || level > DEPTH) { cut = true; return; }
    if (node.nodeType === Node.TEXT_NODE) {
      if (node.length && pending.length < 4 * TEXT && node.parentElement?.checkVisibility({ visibilityProperty: true })) {
        const part = node.data.slice(0, 4 * TEXT);
        if (!pending && part.trim()) {
          pendingTop = node.parentElement.getBoundingClientRect().bottom;
          pendingDepth = depth;
        }
        pending += part;
      }
      return;
    }
    if (node.nodeType !== Node.ELEMENT_NODE || SKIPPED.has(node.nodeName)) return;
    if (node.getAttribute("aria-hidden") === "true" || (options.exclude && node.matches(options.exclude))) return;
    const style = getComputedStyle(node);
    if (style.display === "none" || (style.display !== "contents" && !node.checkVisibility())) return;
    const isBlock = !style.display.startsWith("inline") && style.display !== "contents";
    if (isBlock || node.nodeName === "BR") flush();
    if (style.visibility !== "visible") {
      descend(node, depth, pointer, level);
      return;
    }
    const rect = node.getBoundingClientRect();
    const role = PLAIN.has(node.nodeName) && !node.hasAttribute("role") ? "" : node.computedRole || "";
    const hand = style.cursor === "pointer";
    const isEditor = node.isContentEditable && !node.parentElement?.isContentEditable;
    const known = INTERACTIVE.has(role) || FIELDS.has(node.nodeName) || isEditor;
    const active = rect.width > 0 && rect.height > 0 && node !== document.body &&
      (known || (hand && !pointer && !node.matches("label")) || (node.hasAttribute("tabindex") && node.tabIndex >= 0) || listens(node));
    if (active) {
      flush();
      const leaf = known || !node.childElementCount;
      let shownRole = known ? "input" : "clickable";
      if (node.nodeName === "IFRAME") shownRole = "iframe";
      else if (INTERACTIVE.has(role)) shownRole = role;
      else if (node.nodeName === "INPUT") shownRole = node.type;
      let name = clip(node.computedName, NAME) || clip(node.getAttribute("title") || node.getAttribute("alt"), NAME);
      if (!name && leaf && !isEditor) name = clip(node.nodeName === "SELECT" || "value" in node ? "" : node.textContent, NAME);
      let hint = "";
      if (!known) {
        const isSvg = node instanceof SVGElement;
        const color = !name || isSvg ? colorOf(style, node.parentElement, isSvg) : "";
        if (isSvg) hint += " " + node.localName;
        else if (!name && leaf) hint += " " + clip(node.id || String(node.className), 40).replace(/[^\p{L}\p{N}_ -]/gu, "");
        if (color) hint += " " + color;
      }
      const line = `[${idOf(node)}] ${shownRole}${name ? " " + JSON.stringify(name) : ""}${hint.trimEnd()}${statesOf(node, role)}`;
      push(depth, line, rect.bottom);
      if (!leaf || (known && node.querySelector("a,button,input,select,textarea")))
        descend(node, depth + 1, pointer || hand, level);
      pending = "";
      return;
    }
    if (/^H[1-6]$/.test(node.nodeName) && !node.querySelector("a,button,input")) {
      const text = clip(node.textContent, NAME);
      if (text) push(depth, "heading " + JSON.stringify(text), rect.bottom);
      return;
    }
    if (role === "image" || node.nodeName === "IMG") {
      const name = clip(node.computedName || node.getAttribute("alt"), NAME);
      if (name) { flush(); push(depth, "image " + JSON.stringify(name), rect.bottom); }
      if (node.nodeName === "IMG") return;
    }
    if (CONTAINERS.has(role)) {
      flush();
      const before = lines.length, name = clip(node.computedName, NAME);
      push(depth, role + (name ? " " + JSON.stringify(name) : ""), undefined);
      const opened = lines.length;
      descend(node, depth + 1, pointer || hand, level);
      flush();
      if (lines.length === opened) lines.length = before;
      return;
    }
    descend(node, depth, pointer || hand, level);
    if (isBlock || node.nodeName === "TD" || node.nodeName === "LI") flush();
  };
  walk(document.documentElement, 0, false, 0);
  flush();
  return { lines, next, cut, above, title: clip(document.title, NAME) };
}
