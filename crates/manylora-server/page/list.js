// All adapters that the key may name, however many: only the rows in sight are elements. It is one stop on the way of the tab
// key; arrow keys go through it, and the active row's buttons are the next stops.

import { bytes, colour, count, make, place, say, several } from "./format.js";

/** Rows beyond those in sight. */
const SPARE = 4;

export class List {
  /** `actions`: `compare(name)`, `isCompared(name)`, `pin(adapter)`, `unload(adapter)`, `isOpen()` for the last two. */
  constructor({ list, find, residentOnly, sum, hint }, actions) {
    this.actions = actions;
    this.sum = sum;
    this.hint = hint;
    this.find = find;
    this.residentOnly = residentOnly;
    this.all = [];
    this.shown = [];
    this.active = 0;
    this.rows = [];
    this.pixels = 44;
    this.space = make("div", { className: "space", role: "presentation" });
    this.grid = list;
    this.grid.setAttribute("role", "grid");
    this.grid.setAttribute("aria-label", "Adapters");
    this.grid.append(this.space);
    this.grid.addEventListener("scroll", () => this.draw(), { passive: true });
    this.grid.addEventListener("keydown", (event) => this.key(event));
    find.addEventListener("input", () => this.filter());
    residentOnly.addEventListener("change", () => this.filter());
    find.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" && this.shown.length > 0) {
        event.preventDefault();
        this.go(this.active);
      }
    });
    new ResizeObserver(() => {
      // Narrow lists have higher rows.
      this.pixels = parseFloat(getComputedStyle(this.grid).getPropertyValue("--row")) || this.pixels;
      this.draw();
    }).observe(this.grid);
  }

  take(adapters) {
    this.all = adapters.filter((adapter) => adapter.name !== null);
    this.filter();
  }

  filter() {
    const wanted = this.find.value.trim().toLowerCase();
    const name = this.shown[this.active]?.name;
    const only = this.residentOnly.checked;
    this.shown = this.all.filter((it) => (!only || it.tier !== null) && it.name.toLowerCase().includes(wanted));
    this.active = Math.max(0, this.shown.findIndex((it) => it.name === name));
    const resident = this.all.filter((it) => it.tier !== null).length;
    const found = this.shown.length === this.all.length ? "" : `${count(this.shown.length)} of `;
    say(this.sum, `${found}${several(this.all.length, "adapter")}, ${count(resident)} resident`);
    this.hint.hidden = this.all.length === 0;
    this.draw();
  }

  /** Draws the rows in sight. */
  draw() {
    this.space.style.height = `${Math.max(this.shown.length, 1) * this.pixels}px`;
    this.grid.setAttribute("aria-rowcount", this.shown.length);
    const height = this.grid.clientHeight;
    const first = Math.max(0, Math.floor(this.grid.scrollTop / this.pixels) - SPARE);
    const last = Math.min(this.shown.length, Math.ceil((this.grid.scrollTop + height) / this.pixels) + SPARE);
    const wanted = [];
    for (let index = first; index < last; index += 1) wanted.push(index);
    // The active row stays, in sight or not, so that the tab key finds it.
    if (this.shown.length > 0 && (this.active < first || this.active >= last)) wanted.push(this.active);
    const free = [];
    const kept = new Map();
    const inSight = new Set(wanted);
    for (const row of this.rows) {
      if (inSight.has(row.index)) kept.set(row.index, row);
      else free.push(row);
    }
    this.rows = wanted.map((index) => {
      const row = kept.get(index) ?? free.pop() ?? new Row(this);
      row.show(index, this.shown[index], index === this.active);
      return row;
    });
    for (const row of free) row.element.remove();
    for (const row of this.rows) if (!row.element.isConnected) this.space.append(row.element);
    if (this.shown.length === 0) {
      this.space.replaceChildren(this.nothing ??= emptyRow());
      say(this.nothing.firstChild, this.all.length === 0 ? "No adapter is registered." : "No adapter has that in its name.");
    } else {
      this.nothing?.remove();
    }
  }

  go(index) {
    this.active = Math.min(Math.max(index, 0), this.shown.length - 1);
    const top = this.active * this.pixels;
    const { scrollTop, clientHeight } = this.grid;
    if (top < scrollTop) this.grid.scrollTop = top;
    if (top + this.pixels > scrollTop + clientHeight) this.grid.scrollTop = top + this.pixels - clientHeight;
    this.draw();
    this.rows.find((row) => row.index === this.active)?.element.focus({ preventScroll: true });
  }

  /** Shows one adapter, whatever was looked for. */
  reveal(name) {
    if (!this.shown.some((it) => it.name === name)) {
      this.find.value = "";
      this.residentOnly.checked = false;
      this.filter();
    }
    const index = this.shown.findIndex((it) => it.name === name);
    if (index >= 0) this.go(index);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.grid.clientHeight / this.pixels) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const step = steps[event.key];
    if (step !== undefined) {
      this.go(Math.min(Math.max(this.active + step, 0), this.shown.length - 1));
    } else if (event.key === "Enter" && event.target.getAttribute("role") === "row") {
      this.actions.compare(this.shown[this.active].name);
      this.draw();
    } else {
      return;
    }
    event.preventDefault();
  }
}

class Row {
  constructor(list) {
    this.list = list;
    this.index = -1;
    this.swatch = make("span", { className: "swatch adapter" });
    this.name = make("span", { className: "name" });
    this.facts = make("span", { className: "quiet facts" });
    const button = (label, action) => {
      const element = make("button", { type: "button", className: "small" }, label);
      element.addEventListener("click", () => action(this.adapter));
      return element;
    };
    const { actions } = list;
    this.compare = button("Compare", (adapter) => {
      list.active = this.index;
      actions.compare(adapter.name);
      list.draw();
    });
    this.pin = button("Pin", (adapter) => actions.pin(adapter));
    this.unload = button("Unload", (adapter) => actions.unload(adapter));
    const cell = (className, ...children) => {
      const element = make("div", { className }, ...children);
      element.setAttribute("role", "gridcell");
      return element;
    };
    this.element = make("div", { className: "row" });
    this.element.setAttribute("role", "row");
    const title = cell("title", this.swatch, make("span", { className: "words" }, this.name, this.facts));
    this.element.append(title, cell("buttons", this.compare, this.pin, this.unload));
    this.element.addEventListener("focusin", () => {
      if (list.active === this.index) return;
      list.active = this.index;
      list.draw();
    });
  }

  show(index, adapter, isActive) {
    const { actions } = this.list;
    this.index = index;
    this.adapter = adapter;
    this.element.style.top = `${index * this.list.pixels}px`;
    this.element.setAttribute("aria-rowindex", index + 1);
    this.element.tabIndex = isActive ? 0 : -1;
    if (this.name.textContent !== adapter.name) {
      this.name.textContent = adapter.name;
      this.name.title = adapter.name;
      colour(this.swatch, adapter.name);
    }
    this.swatch.classList.toggle("away", adapter.tier === null);
    say(this.facts, `${bytes(adapter.bytes)} · ${place(adapter)}${adapter.pinned ? " · pinned" : ""}`);
    const isCompared = actions.isCompared(adapter.name);
    this.compare.setAttribute("aria-pressed", String(isCompared));
    say(this.pin, adapter.pinned ? "Unpin" : "Pin");
    for (const [button, what] of [[this.compare, "Compare"], [this.pin, adapter.pinned ? "Unpin" : "Pin"], [this.unload, "Unload"]]) {
      button.tabIndex = isActive ? 0 : -1;
      button.setAttribute("aria-label", `${what} ${adapter.name}`);
    }
    this.pin.hidden = this.unload.hidden = !actions.isOpen();
  }
}

function emptyRow() {
  const cell = make("div", { className: "quiet" });
  cell.setAttribute("role", "gridcell");
  const row = make("div", { className: "row" }, cell);
  row.setAttribute("role", "row");
  return row;
}
