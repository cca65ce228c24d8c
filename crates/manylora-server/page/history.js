// What counters say of the last two minutes: rates and means between looks, drawn as small lines.

import { count, draw, make, say, seconds } from "./format.js";

const KEPT = 120;
/** A longer pause than this is no interval to take a mean over: nobody looked. */
const LONGEST = 5;

const LINES = [
  { key: "tokens", label: "Tokens per second", show: (value) => [value >= 100 ? count(Math.round(value)) : value.toFixed(1), "/s"] },
  { key: "first", label: "To the first token, mean", show: seconds },
  { key: "between", label: "Between tokens, mean", show: seconds },
  { key: "waiting", label: "Waiting", show: (value) => [count(value), ""] },
];

export class Pace {
  constructor(element) {
    this.before = null;
    this.lines = LINES.map((line) => new Line(line));
    element.append(...this.lines.map((line) => line.element));
  }

  /** Takes a look's counters; null where the key may not see them. */
  take(told) {
    const { counters, waiting } = told;
    if (counters === null) {
      this.before = null;
      for (const line of this.lines) line.clear("not told to this key");
      return;
    }
    const before = this.before;
    const passed = before ? counters.seconds - before.seconds : 0;
    // The same look, seen again.
    if (before && passed === 0) return;
    this.before = counters;
    if (!before || passed < 0 || passed > LONGEST) return;
    const mean = (name) => {
      const more = counters[name].count - before[name].count;
      return more > 0 ? (counters[name].seconds - before[name].seconds) / more : null;
    };
    const values = {
      tokens: (counters.generation_tokens - before.generation_tokens) / passed,
      first: mean("time_to_first_token"),
      between: mean("inter_token_latency"),
      waiting,
    };
    for (const line of this.lines) line.add(values[line.key]);
  }
}

class Line {
  constructor({ key, label, show }) {
    this.key = key;
    this.label = label;
    this.show = show;
    this.values = [];
    this.area = draw("path", { class: "area" });
    this.path = draw("path", { class: "line", "vector-effect": "non-scaling-stroke" });
    const box = { viewBox: "0 0 120 32", preserveAspectRatio: "none", role: "img", "aria-label": label };
    this.svg = draw("svg", box, this.area, this.path);
    this.number = make("span", { className: "number" }, "–");
    this.unit = make("span", { className: "unit" });
    this.most = make("p", { className: "quiet most" }, "nothing yet");
    const value = make("p", { className: "value" }, this.number, this.unit);
    this.element = make("div", { className: "figure" }, make("h3", {}, label), value, this.svg, this.most);
  }

  clear(why) {
    this.values = [];
    this.draw();
    say(this.most, why);
  }

  /** Adds a value; null where nothing happened that has one. */
  add(value) {
    this.values.push(value);
    if (this.values.length > KEPT) this.values.shift();
    this.draw();
  }

  draw() {
    // Where nothing happened that has a value, the line leads from the one before to the one after.
    const start = KEPT - this.values.length;
    const points = this.values.map((value, index) => ({ x: start + index, value })).filter((it) => it.value !== null);
    const [number, unit] = points.length === 0 ? ["–", ""] : this.show(points.at(-1).value);
    say(this.number, number);
    say(this.unit, unit);
    const most = points.reduce((greatest, it) => Math.max(greatest, it.value), 0);
    const places = points.map((it) => `${it.x} ${(30 - (it.value / (most || 1)) * 28).toFixed(2)}`);
    const line = places.length === 0 ? "" : `M${places.join("L")}`;
    this.path.setAttribute("d", line && `${line}h.5`);
    this.area.setAttribute("d", line && `${line}V32H${points[0].x}Z`);
    const told = points.length === 0 ? "nothing in the last two minutes" : `at most ${this.show(most).join(" ").trim()}`;
    say(this.most, told);
    this.svg.setAttribute("aria-label", `${this.label}: now ${number} ${unit}, ${told}`);
  }
}
