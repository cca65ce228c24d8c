// The server's API as this page uses it. Keys are kept here, in memory, and nowhere else: they are gone when the page is.

const keys = { user: "", admin: "" };

export function setKeys(user, admin) {
  keys.user = user;
  keys.admin = admin;
}

export const hasAdminKey = () => keys.admin !== "";

/** An answer that is none: what the server says of it, in its words. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Relative to the document, which knows the path that a proxy serves it under.
const at = (path) => new URL(path, document.baseURI);

async function send(path, key, { body, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  const response = await fetch(at(path), { method, headers, body: sent, signal, cache: "no-store" });
  if (response.ok) return response;
  const text = await response.text();
  throw new Refused(response.status, messageIn(text) ?? `${response.status} ${response.statusText}`);
}

function messageIn(text) {
  try {
    return JSON.parse(text).error?.message;
  } catch {
    return undefined;
  }
}

/** What is on the shelf; the adapters only if they are not those of `revision`. */
export async function shelf(revision, signal) {
  const response = await send(`shelf?known=${encodeURIComponent(revision)}`, keys.user, { signal });
  return response.json();
}

/** Loads, unloads or pins; the server's word for what was done. */
export async function manage(action, body) {
  const response = await send(`v1/${action}_lora_adapter`, keys.admin, { body });
  return response.text();
}

/** The events of a completion or chat, one by one. */
export async function* stream(path, body, signal) {
  const response = await send(path, keys.user, { body: { ...body, stream: true }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    pending += value;
    const blocks = pending.split("\n\n");
    pending = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      const text = data.join("\n");
      if (text === "[DONE]") return;
      if (text) yield event(JSON.parse(text));
    }
  }
}

function event(told) {
  if (told.error) throw new Refused(told.error.code, told.error.message);
  return told;
}
