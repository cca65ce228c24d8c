// The shelf as a picture: all bytes that the engine has, in reading order over a few boards, each part as long as it has bytes.
// One part at a time can be gone to, by pointer or arrow keys, and is told in words below.

import { bytes, colour, count, draw, make, place, say, several, short } from "./format.js";

const BOARDS = 6;
const HEIGHT = 26;
const GAP = 8;
/** Parts that are named in the picture where there is room. */
const NARROWEST_LABEL = 76;

export class Picture {
  /** `chosen` is called with the name of an adapter that somebody picks. */
  constructor({ picture, detail, legend, sum }, chosen) {
    this.detail = detail;
    this.legend = legend;
    this.sum = sum;
    this.chosen = chosen;
    this.parts = [];
    this.active = -1;
    this.hint = detail.textContent;
    this.list = draw("g", { role: "listbox", tabindex: "0", "aria-label": "Memory, part by part" });
    this.labels = draw("g", { "aria-hidden": "true", class: "labels" });
    this.boards = draw("path", { class: "boards", "aria-hidden": "true" });
    this.svg = draw("svg", {}, this.boards, this.list, this.labels);
    picture.append(this.svg);
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.list.addEventListener("focus", () => this.go(Math.max(this.active, 0)));
    this.list.addEventListener("blur", () => this.go(-1));
    this.svg.addEventListener("pointermove", (event) => this.go(this.parts.findIndex((it) => it.element === event.target)));
    this.svg.addEventListener("pointerleave", () => this.list !== document.activeElement && this.go(-1));
    this.svg.addEventListener("click", (event) => this.pick(this.parts.findIndex((it) => it.element === event.target)));
    new ResizeObserver(() => this.draw()).observe(picture);
  }

  take(told, adapters) {
    const parts = told.memory ? whole(told, adapters) : seen(told, adapters);
    const key = JSON.stringify(parts.map((it) => [it.id, it.bytes, it.said]));
    if (key === this.drawn) return;
    this.drawn = key;
    const active = this.parts[this.active]?.id;
    const elements = new Map(this.parts.map((it) => [it.id, it.element]));
    for (const part of parts) {
      part.element = elements.get(part.id) ?? draw("path", { role: "option", "aria-selected": "false" });
      part.element.setAttribute("class", `part ${part.kind}`);
      part.element.setAttribute("aria-label", part.said);
      if (part.names) colour(part.element, part.names[0] ?? part.id);
    }
    this.parts = parts;
    parts.forEach((part, index) => (part.element.id = `part-${index}`));
    this.list.replaceChildren(...parts.map((it) => it.element));
    this.active = -1;
    this.go(parts.findIndex((it) => it.id === active));
    this.tell(told, parts);
    this.draw();
  }

  /** In words, and what colours mean. */
  tell(told, parts) {
    const total = parts.reduce((sum, it) => sum + it.bytes, 0);
    const held = parts.filter((it) => it.kind === "adapter");
    const used = told.memory ? ` · KV cache ${bytes(told.memory.kv_cache_used)} of ${bytes(told.memory.kv_cache)} in use` : "";
    const all = told.memory ? `${bytes(total)} in all${used}` : "this key is told of its own adapters";
    say(this.sum, `${several(held.length, "version")} of adapters resident · ${all}`);
    const kinds = new Map();
    for (const part of parts) kinds.set(part.kind, (kinds.get(part.kind) ?? 0) + part.bytes);
    const entries = [...kinds].map(([kind, sum]) => {
      const swatch = make("span", { className: `swatch ${kind}` });
      return make("li", {}, swatch, `${NAMES[kind]} `, make("span", { className: "quiet" }, bytes(sum)));
    });
    this.legend.replaceChildren(...entries);
  }

  draw() {
    const width = Math.floor(this.svg.parentElement.clientWidth);
    if (width <= 0 || this.parts.length === 0) return;
    const total = this.parts.reduce((sum, it) => sum + it.bytes, 0) || 1;
    const perBoard = total / BOARDS;
    const height = BOARDS * (HEIGHT + GAP);
    for (const [name, value] of [["viewBox", `0 0 ${width} ${height}`], ["width", width], ["height", height]]) {
      this.svg.setAttribute(name, value);
    }
    const board = (index) => `M0 ${index * (HEIGHT + GAP) + HEIGHT + 1.5}h${width}`;
    this.boards.setAttribute("d", Array.from({ length: BOARDS }, (_, index) => board(index)).join(""));
    const labels = [];
    let start = 0;
    for (const part of this.parts) {
      const pieces = [];
      const end = start + part.bytes;
      for (let index = Math.floor(start / perBoard); index < BOARDS && index * perBoard < end; index += 1) {
        const from = Math.max(start - index * perBoard, 0) / perBoard;
        const to = Math.min(end - index * perBoard, perBoard) / perBoard;
        const gap = part.kind === "adapter" && (to - from) * width > 4 ? 1 : 0;
        // What is thinner than a line of pixels is drawn as one, lest it could not be seen.
        const long = Math.max((to - from) * width - gap, Math.min(1, width - from * width));
        if (long > 0 && to > from) pieces.push({ x: from * width, y: index * (HEIGHT + GAP), long });
      }
      const shape = ({ x, y, long }) => `M${x.toFixed(2)} ${y}h${long.toFixed(2)}v${HEIGHT}h-${long.toFixed(2)}z`;
      part.element.setAttribute("d", pieces.map(shape).join(""));
      const widest = pieces.reduce((best, it) => (it.long > (best?.long ?? 0) ? it : best), null);
      if (widest && widest.long > Math.max(NARROWEST_LABEL, part.label.length * 8 + 16)) {
        labels.push(draw("text", { x: widest.x + 8, y: widest.y + HEIGHT / 2 + 4.5, class: `on-${part.kind}` }, part.label));
      }
      start = end;
    }
    this.labels.replaceChildren(...labels);
  }

  go(index) {
    const before = this.parts[this.active]?.element;
    before?.setAttribute("aria-selected", "false");
    this.active = index;
    const part = this.parts[index];
    if (part) {
      part.element.setAttribute("aria-selected", "true");
      this.list.setAttribute("aria-activedescendant", part.element.id);
    } else {
      this.list.removeAttribute("aria-activedescendant");
    }
    say(this.detail, part ? part.said : this.hint);
  }

  pick(index) {
    const name = this.parts[index]?.names?.[0];
    if (name) this.chosen(name);
  }

  key(event) {
    const last = this.parts.length - 1;
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 20, PageUp: -20, Home: -last, End: last };
    const step = steps[event.key];
    if (step !== undefined) this.go(Math.min(Math.max(this.active + step, 0), last));
    else if (event.key === "Enter") this.pick(this.active);
    else return;
    event.preventDefault();
  }
}

const NAMES = {
  weights: "Base",
  working: "Working memory",
  adapter: "Adapters",
  loading: "Being loaded",
  used: "KV cache in use",
  free: "KV cache free",
  rest: "Not divided",
};

/** Parts of the whole memory, in order; they add up. */
function whole(told, adapters) {
  const { memory, base } = told;
  const rest = memory.ledger - memory.kv_cache - memory.adapters - memory.loading;
  const part = (kind, size, more = "") => ({
    id: kind, kind, bytes: size, label: NAMES[kind], said: `${NAMES[kind]}: ${bytes(size)}${more}`,
  });
  const named = base.names.length > 0 ? `, ${base.names[0]}` : "";
  return [
    part("weights", memory.weights, named),
    part("working", memory.working, ", for activations and kernels"),
    ...resident(adapters),
    part("loading", memory.loading),
    part("used", memory.kv_cache_used, " of requests that run"),
    part("free", memory.kv_cache - memory.kv_cache_used, ", cached prefixes included; adapters may take of it"),
    part("rest", rest, ", less than a block"),
  ].filter((it) => it.bytes > 0);
}

/** What a key sees that is confined to some adapters: the base and these. */
function seen(told, adapters) {
  const base = { id: "weights", kind: "weights", bytes: told.base.bytes, label: "Base", said: `Base: ${bytes(told.base.bytes)}` };
  return [base, ...resident(adapters)];
}

/** Resident versions, each once, whatever names it has. */
function resident(adapters) {
  const versions = new Map();
  for (const adapter of adapters) {
    if (adapter.tier === null) continue;
    const known = versions.get(adapter.version);
    if (known) known.names.push(adapter.name);
    else versions.set(adapter.version, { adapter, names: adapter.name === null ? [] : [adapter.name] });
  }
  return [...versions.values()].map(({ adapter, names }) => {
    const title = names.join(", ") || "replaced, still in use";
    const facts = [bytes(adapter.bytes), place(adapter), `version ${short(adapter.version)}`];
    if (adapter.rank > 0) facts.push(`rank ${count(adapter.rank)}`);
    if (adapter.pinned) facts.push("pinned");
    const said = `${title}: ${facts.join(", ")}`;
    return { id: adapter.version, kind: "adapter", bytes: adapter.bytes, label: title, said, names };
  });
}
