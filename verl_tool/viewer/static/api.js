// Questions to the server, and addresses of views.

// Set in a copy without a server: see offline.js.
const offline = globalThis.viewerOffline;

export async function get(name, params = {}) {
  if (offline) return offline.get(name, params);
  const answer = await fetch(`api/${name}?${query(params)}`);
  const told = await answer.json().catch(() => null);
  if (!answer.ok || told === null) throw new Error(told?.error?.message || `${name}: HTTP ${answer.status}`);
  return told;
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
