// Requests to this gateway with the keys; server-sent events.

const NAMES = { tenant: "hearth.api_key", operator: "hearth.operator_token" };

export const keyOf = (who) => sessionStorage.getItem(NAMES[who]) || "";

export function storeKey(who, key) {
  if (key) sessionStorage.setItem(NAMES[who], key);
  else sessionStorage.removeItem(NAMES[who]);
}

// Drops what does not fit.
export function store(name, value) {
  try {
    sessionStorage.setItem(name, value);
  } catch {
    sessionStorage.removeItem(name);
  }
}

export class ApiError extends Error {
  constructor(message, status, more = {}) {
    super(message);
    Object.assign(this, { status, retryAfter: 0, param: "", requestId: "" }, more);
  }
}

export async function request(path, { who = "tenant", key = keyOf(who), body, signal, headers: more = {} } = {}) {
  const headers = { Authorization: `Bearer ${key}`, ...more };
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The gateway does not answer.", 0);
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

export const idOf = (response) => response.headers.get("x-request-id") ?? "";

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not JSON, such as a proxy's page
  }
  return new ApiError(error.message || `The gateway answered ${response.status}.`, response.status, {
    retryAfter: Number(response.headers.get("retry-after")) || 0, param: error.param ?? "", requestId: idOf(response),
  });
}

// Yields {event, data} of each whole event, and of a comment `: moved {…}`; half an event at the end of the stream is dropped.
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const found = parseEvent(block);
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseEvent(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith(": moved ")) return { event: "moved", data: line.slice(8) };
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length ? { event, data: data.join("\n") } : null;
}
