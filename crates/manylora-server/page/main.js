// Where the page begins: it looks at the shelf once a second as long as somebody sees it, and hands what it finds to its parts.

import { Refused, shelf } from "./api.js";
import { say } from "./format.js";
import { Pace } from "./history.js";
import { keysDialog } from "./keys.js";
import { List } from "./list.js";
import { Management } from "./management.js";
import { Picture } from "./picture.js";
import { Playground } from "./playground.js";
import { Rows } from "./rows.js";

const EVERY = 1000;
const MOST_PATIENCE = 15_000;

const at = (id) => document.getElementById(id);
const notice = at("notice");
const connection = at("connection");

const management = new Management(
  {
    load: at("load"), form: at("load-form"), outcome: at("managed"), dialog: at("confirm"), confirm: at("confirm-form"),
    text: at("confirm-text"), cancel: at("confirm-cancel"),
  },
  () => look(),
);
const playground = new Playground(
  {
    form: at("ask"), prompt: at("prompt"), temperature: at("temperature"), maxTokens: at("max-tokens"),
    loraScale: at("lora-scale"), chosen: at("chosen"), stop: at("stop"), answers: at("answers"),
  },
  { changed: () => list.draw(), announce: (text) => (at("said").textContent = text) },
);
const list = new List(
  { list: at("list"), find: at("find"), residentOnly: at("resident-only"), sum: at("adapters-sum"), hint: at("list-hint") },
  {
    compare: (name) => playground.toggle(name),
    isCompared: (name) => playground.isCompared(name),
    pin: (adapter) => management.pin(adapter),
    unload: (adapter) => management.unload(adapter),
    isOpen: () => management.isOpen(),
  },
);
const picture = new Picture(
  { picture: at("picture"), detail: at("detail"), legend: at("legend"), sum: at("shelf-sum") },
  (name) => list.reveal(name),
);
const rows = new Rows(at("rows"));
const pace = new Pace(at("pace"));

let adapters = [];
let revision = "";
let open = false;
let failures = 0;
let timer = 0;
let looking = null;

/** Looks now, and again in a while. */
async function look() {
  clearTimeout(timer);
  looking?.abort();
  const mine = new AbortController();
  looking = mine;
  try {
    const told = await shelf(revision, mine.signal);
    if (looking !== mine) return;
    failures = 0;
    show(told);
  } catch (error) {
    if (looking !== mine) return;
    failures += 1;
    explain(error);
  }
  looking = null;
  schedule();
}

function schedule() {
  clearTimeout(timer);
  if (document.hidden) return;
  timer = setTimeout(look, Math.min(EVERY * 2 ** Math.min(failures, 5), MOST_PATIENCE));
}

function show(told) {
  notice.hidden = true;
  connect("live", "live");
  const { settings, base, version } = told;
  say(at("server"), [base.names[0], settings.dtype, settings.device, version].filter(Boolean).join(" · "));
  management.take(told);
  const changed = told.adapters !== null;
  if (changed) {
    adapters = told.adapters;
    revision = told.revision;
  }
  playground.take(told, adapters);
  if (changed || open !== management.isOpen()) list.take(adapters);
  open = management.isOpen();
  picture.take(told, adapters);
  rows.take(told);
  pace.take(told);
}

function connect(state, text) {
  connection.dataset.state = state;
  say(connection, text);
}

/** Says what keeps the page from the shelf. */
function explain(error) {
  const isRefused = error instanceof Refused;
  const isKey = isRefused && error.status === 401;
  connect("lost", isKey ? "key needed" : "no answer");
  const words = isRefused ? error.message : `The server does not answer (${error.message}).`;
  const next = isKey ? "Give a key by the button Keys." : "Trying again.";
  say(notice, `${words.replace(/\.?$/, ".")} ${next}`);
  notice.hidden = false;
}

keysDialog(
  {
    dialog: at("keys"), form: at("keys-form"), open: at("keys-open"), close: at("keys-close"), forget: at("keys-forget"),
    user: at("user-key"), admin: at("admin-key"),
  },
  () => {
    revision = "";
    look();
  },
);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    clearTimeout(timer);
  } else {
    look();
  }
});
look();
