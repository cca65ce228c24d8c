// Who runs and who waits: a square for each sequence in its adapter's colour, and the busiest adapters by name.

import { colour, count, draw, make, say } from "./format.js";

const SIZE = 9;
const PITCH = 12;
/** Squares of those that wait; of more, each stands for several. */
const MOST_WAITING = 240;
const MOST_RUNNING = 512;
const NAMED = 6;

export class Rows {
  constructor(element) {
    this.running = new Squares("Running");
    this.waiting = new Squares("Waiting");
    this.body = make("tbody");
    const head = make("tr", {}, ...["adapter", "running", "waiting"].map((text) => make("th", { scope: "col" }, text)));
    this.table = make("table", {}, make("thead", {}, head), this.body);
    this.more = make("p", { className: "quiet" });
    element.append(this.running.element, this.waiting.element, this.table, this.more);
    this.entries = new Map();
    new ResizeObserver(() => this.told && this.take(this.told)).observe(element);
  }

  take(told) {
    this.told = told;
    const { rows, settings } = told;
    const all = rows.adapters.map(({ name, running, waiting }) => ({ name, running, waiting }));
    if (rows.base) all.unshift({ name: null, ...rows.base });
    all.sort((a, b) => b.running - a.running || b.waiting - a.waiting);
    const most = told.complete ? Math.min(settings.max_num_seqs, MOST_RUNNING) : 0;
    const runs = told.running ?? sum(all, "running");
    this.running.show(all.map((it) => [it.name, it.running]), runs, most, told.complete ? ` of ${count(settings.max_num_seqs)}` : "");
    this.waiting.show(all.map((it) => [it.name, it.waiting]), told.waiting ?? sum(all, "waiting"), 0, "");
    const busy = all.filter((it) => it.running + it.waiting > 0);
    this.fill(busy.slice(0, NAMED));
    say(this.more, busy.length > NAMED ? `and ${count(busy.length - NAMED)} more` : "");
  }

  fill(busy) {
    const rows = busy.map(({ name, running, waiting }) => {
      const key = name ?? "";
      const entry = this.entries.get(key) ?? entryOf(name);
      this.entries.set(key, entry);
      say(entry.running, count(running));
      say(entry.waiting, count(waiting));
      return entry.row;
    });
    if (rows.length === 0) {
      rows.push(make("tr", {}, make("td", { colSpan: 3, className: "quiet" }, "nobody runs or waits")));
    }
    const same = rows.length === this.body.children.length && rows.every((row, at) => row === this.body.children[at]);
    if (!same) this.body.replaceChildren(...rows);
    if (this.entries.size > 200) this.entries.clear();
  }
}

const sum = (all, which) => all.reduce((total, it) => total + it[which], 0);

function entryOf(name) {
  const swatch = make("span", { className: name === null ? "swatch weights" : "swatch adapter" });
  if (name !== null) colour(swatch, name);
  const running = make("td");
  const waiting = make("td");
  const title = make("th", { scope: "row", className: "name" }, swatch, name ?? "base");
  return { row: make("tr", {}, title, running, waiting), running, waiting };
}

class Squares {
  constructor(label) {
    this.label = label;
    this.number = make("strong", {}, "0");
    this.of = make("span", { className: "quiet" });
    this.svg = draw("svg", { role: "img", class: "squares" });
    this.element = make("div", { className: "strip" }, make("p", {}, `${label} `, this.number, this.of), this.svg);
  }

  /** Squares of each adapter (null: the base) one after the other, and empty ones up to `places`. */
  show(parts, total, places, of) {
    say(this.number, count(total));
    const drawn = parts.reduce((all, [, some]) => all + some, 0);
    const each = Math.max(1, Math.ceil(drawn / (places > 0 ? MOST_RUNNING : MOST_WAITING)));
    say(this.of, each > 1 ? `${of} · a square is ${count(each)}` : of);
    const width = this.svg.parentElement.clientWidth;
    if (width <= 0) return;
    const across = Math.max(1, Math.floor((width + PITCH - SIZE) / PITCH));
    const square = (at) => `M${(at % across) * PITCH} ${Math.floor(at / across) * PITCH}h${SIZE}v${SIZE}h-${SIZE}z`;
    const shapes = [];
    let at = 0;
    let passed = 0;
    for (const [name, some] of parts) {
      passed += some;
      const end = Math.round(passed / each);
      if (end === at) continue;
      let path = "";
      for (; at < end; at += 1) path += square(at);
      const shape = draw("path", { d: path, class: name === null ? "part weights" : "part adapter" });
      if (name !== null) colour(shape, name);
      shapes.push(shape);
    }
    let empty = "";
    for (; at < places; at += 1) empty += square(at);
    if (empty) shapes.push(draw("path", { d: empty, class: "part empty" }));
    const height = Math.max(0, Math.ceil(at / across) * PITCH - (PITCH - SIZE));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
    const busy = parts.filter(([, some]) => some > 0).slice(0, NAMED);
    const names = busy.map(([name, some]) => `${name ?? "base"} ${count(some)}`);
    this.svg.setAttribute("aria-label", `${this.label}: ${count(total)}${names.length > 0 ? `: ${names.join(", ")}` : ""}`);
    this.svg.replaceChildren(...shapes);
  }
}
