// Questions to the server, and addresses of views.

// Set in a copy without a server: see offline.js.
const offline = globalThis.viewerOffline;
export const isCopy = Boolean(offline);

export async function get(name, params = {}) {
  if (offline) return offline.get(name, params);
  const answer = await fetch(`api/${name}?${query(params)}`);
  const told = await answer.json().catch(() => null);
  if (!answer.ok || told === null) throw new Error(told?.error?.message || `${name}: HTTP ${answer.status}`);
  return told;
}

// Tells `take` of each event that the server streams for `value`. Raises what it refuses, and an AbortError for `signal`.
export async function stream(name, value, signal, take) {
  const answer = await fetch(`api/${name}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(value), signal }).catch((error) => {
    throw signal.aborted ? error : new Error(`the viewer does not answer: ${error.message}`);
  });
  if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error?.message || `${name}: HTTP ${answer.status}`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const parts = [];
  for (;;) {
    const { value: part, done } = await reader.read();
    if (done) return;
    parts.push(part);
    if (!part.includes("\n")) continue;
    const lines = parts.splice(0).join("").split("\n");
    parts.push(lines.pop());
    for (const line of lines) if (line.startsWith("data: {")) take(parsed(line.slice(6)));
  }
}

// A line may be cut short, where an error follows it.
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return {};
  }
}

export function imageAddress(run, sha256) {
  return offline ? offline.image(sha256) : `api/image?${query({ run, sha256 })}`;
}

function query(params) {
  const given = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return new URLSearchParams(given).toString();
}

export function link(view, params) {
  const given = query(params);
  return `#/${view}${given ? "?" + given : ""}`;
}

export function here() {
  const [view, given] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: view || "runs", params: Object.fromEntries(new URLSearchParams(given || "")) };
}

// What of an address says which rows a table shows: it goes along to a trajectory, for its next and previous.
const OF_TABLE = /^(files|kind|stop|tool|fault|excluded|prompt|text|sort|desc)$|_(min|max)$/;

export function tableParams(params) {
  return Object.fromEntries(Object.entries(params).filter(([name]) => OF_TABLE.test(name)));
}
