// Requests to the server, and its events.
//
// Events are read with `fetch`, not `EventSource`, which cannot send a token. A token in an address
// would end up in logs.

const KEY = "keyframe-token";

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

function headers() {
  return token.get() ? { Authorization: `Bearer ${token.get()}` } : {};
}

/** The server's answer to a failed request. */
export class Refused extends Error {
  constructor(status, said) {
    super(said.fix ? `${said.error}; ${said.fix}` : said.error);
    this.status = status;
  }
}

/** Requests JSON. */
export async function ask(path, options = {}) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store", ...options });
  const text = await answer.text();
  let said;
  try { said = JSON.parse(text); } catch { said = { error: text || answer.statusText }; }
  if (!answer.ok) throw new Refused(answer.status, said);
  return said;
}

/** Requests a picture and returns an address for an image element, which itself could send no token. */
async function picture(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store" });
  if (!answer.ok) throw new Refused(answer.status, await answer.json());
  const reader = new FileReader();
  const read = new Promise((done, failed) => { reader.onload = () => done(reader.result); reader.onerror = () => failed(reader.error); });
  reader.readAsDataURL(await answer.blob());
  return read;
}

const part = encodeURIComponent;

export const api = {
  server: () => ask("api/v1/server"),
  vms: () => ask("api/v1/vms"),
  stores: () => ask("api/v1/stores"),
  recordings: () => ask("api/v1/recordings"),
  timeline: (store, asked) => ask(`api/v1/stores/${part(store)}/timeline?${query(asked)}`),
  checkpoints: (store, asked) => ask(`api/v1/stores/${part(store)}/checkpoints?${query(asked)}`),
  checkpoint: (store, id) => ask(`api/v1/stores/${part(store)}/checkpoints/${id}`),
  heat: (store, id) => ask(`api/v1/stores/${part(store)}/checkpoints/${id}/heat`),
  diff: (store, id) => ask(`api/v1/stores/${part(store)}/checkpoints/${id}/diff`),
  screen: (store, id, member) => picture(`api/v1/stores/${part(store)}/checkpoints/${id}/screen?${query({ member })}`),
  growth: (store) => ask(`api/v1/stores/${part(store)}/growth`),
  rollback: (store, id) => ask(`api/v1/stores/${part(store)}/checkpoints/${id}/rollback`, { method: "POST", headers: headers() }),
  branch: (store, id) => ask(`api/v1/stores/${part(store)}/checkpoints/${id}/branch`, { method: "POST", headers: headers() }),
  restore: (store, id) => ask(`api/v1/stores/${part(store)}/checkpoints/${id}/restore`, { method: "POST", headers: headers() }),
  pin: (store, id, on) => ask(`api/v1/stores/${part(store)}/checkpoints/${id}/pin`, { method: on ? "POST" : "DELETE", headers: headers() }),
  tag: (store, id, tag) => ask(`api/v1/stores/${part(store)}/checkpoints/${id}/tags/${part(tag)}`, { method: "POST", headers: headers() }),
};

function query(asked) {
  return new URLSearchParams(Object.entries(asked).filter(([, value]) => value !== null && value !== undefined)).toString();
}

/** Receives events until the page is closed. Calls `onEvent(name, data)` and `onState("live" | "lost" | "refused")`. */
export async function listen(onEvent, onState) {
  for (let wait = 500; ; wait = Math.min(wait * 2, 10000)) {
    try {
      const answer = await fetch("api/v1/events", { headers: headers(), cache: "no-store" });
      if (answer.status === 401) onState("refused");
      if (answer.ok) {
        onState("live");
        wait = 500;
        await read(answer.body.getReader(), onEvent);
      }
    } catch { /* Tried again below. */ }
    onState("lost");
    await new Promise((done) => setTimeout(done, wait));
  }
}

async function read(reader, onEvent) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const field = (name) => block.split("\n").filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1).trimStart()).join("\n");
      if (field("event")) onEvent(field("event"), JSON.parse(field("data") || "{}"));
    }
  }
}
