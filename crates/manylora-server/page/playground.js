// One prompt to the base and to adapters, side by side, as their tokens come. Each answer is a request of its own, as any
// client would send it, so that what is seen here is what the API does.

import { stream } from "./api.js";
import { colour, make, say, seconds, several } from "./format.js";

const MOST_COMPARED = 8;

export class Playground {
  /** `changed` is called when other adapters are compared; `announce` says something to whoever cannot see it. */
  constructor(parts, { changed, announce }) {
    Object.assign(this, parts);
    this.changed = changed;
    this.announce = announce;
    this.compared = [];
    this.withBase = true;
    this.base = null;
    this.running = null;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.stop.addEventListener("click", () => this.running?.abort());
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
  }

  take(told, adapters) {
    const names = new Set(adapters.map((adapter) => adapter.name));
    const kept = this.compared.filter((name) => names.has(name));
    const base = told.base.names[0] ?? null;
    if (this.base === null && this.seen === undefined) {
      this.seen = true;
      const [chat, completion] = this.form.elements.form;
      chat.disabled = !told.settings.chat;
      if (chat.disabled) completion.checked = true;
    }
    if (base === this.base && kept.length === this.compared.length && this.chosen.childElementCount > 0) return;
    this.base = base;
    this.compared = kept;
    this.choose();
  }

  isCompared(name) {
    return this.compared.includes(name);
  }

  /** Compares an adapter, or no longer. */
  toggle(name) {
    if (this.isCompared(name)) this.compared = this.compared.filter((other) => other !== name);
    else if (this.compared.length < MOST_COMPARED) this.compared.push(name);
    else return this.announce(`At most ${several(MOST_COMPARED, "adapter")} side by side.`);
    this.announce(this.isCompared(name) ? `${name} is compared.` : `${name} is no longer compared.`);
    this.choose();
  }

  /** Draws who answers. */
  choose() {
    const chips = this.compared.map((name) => {
      const chip = make("button", { type: "button", className: "chip", title: "no longer" }, swatch(name), name, " ×");
      chip.setAttribute("aria-label", `No longer compare ${name}`);
      chip.addEventListener("click", () => {
        this.toggle(name);
        this.changed();
        (this.chosen.querySelector("button") ?? this.prompt).focus();
      });
      return chip;
    });
    if (this.base !== null) {
      const box = make("input", { type: "checkbox", checked: this.withBase });
      box.addEventListener("change", () => (this.withBase = box.checked));
      chips.unshift(make("label", { className: "check" }, box, swatch(null), ` ${this.base}`));
    }
    if (this.compared.length === 0) chips.push(make("span", { className: "quiet" }, "Choose adapters to compare in the list."));
    this.chosen.replaceChildren(...chips);
  }

  /** What is asked, of whom. */
  asked(name) {
    const chat = this.form.elements.form.value === "chat";
    const prompt = this.prompt.value;
    const body = { model: name ?? this.base, stream_options: { include_usage: true } };
    if (chat) body.messages = [{ role: "user", content: prompt }];
    else body.prompt = prompt;
    body.max_tokens = this.maxTokens.valueAsNumber;
    body.temperature = this.temperature.valueAsNumber;
    if (name !== null && this.loraScale.valueAsNumber !== 1) body.lora_scale = this.loraScale.valueAsNumber;
    return [chat ? "v1/chat/completions" : "v1/completions", body];
  }

  async send() {
    this.running?.abort();
    const names = [...(this.withBase && this.base !== null ? [null] : []), ...this.compared];
    if (names.length === 0) return this.announce("Nobody is asked: choose the base or an adapter.");
    const running = new AbortController();
    this.running = running;
    this.stop.disabled = false;
    const answers = names.map((name) => new Answer(name, name ?? this.base));
    this.answers.replaceChildren(...answers.map((answer) => answer.element));
    await Promise.all(answers.map((answer) => answer.follow(this.asked(answer.name), running.signal)));
    if (this.running !== running) return;
    this.running = null;
    if (document.activeElement === this.stop) this.form.querySelector("[type=submit]").focus();
    this.stop.disabled = true;
    this.announce(answers.map((answer) => `${answer.title}: ${answer.state.textContent}.`).join(" "));
  }
}

function swatch(name) {
  const element = make("span", { className: name === null ? "swatch weights" : "swatch adapter" });
  if (name !== null) colour(element, name);
  return element;
}

/** An answer, as it comes. */
class Answer {
  constructor(name, title) {
    this.name = name;
    this.title = title;
    this.text = make("pre", { tabIndex: 0 });
    this.text.setAttribute("role", "region");
    this.text.setAttribute("aria-label", `Answer of ${title}`);
    this.state = make("p", { className: "quiet state" }, "waits");
    const heading = make("h3", {}, swatch(name), make("span", { className: "name" }, title));
    this.element = make("article", { className: "answer" }, heading, this.text, this.state);
  }

  async follow([path, body], signal) {
    const start = performance.now();
    let first = null;
    let tokens = 0;
    let reason = "";
    const passed = () => (performance.now() - start) / 1000;
    try {
      for await (const event of stream(path, body, signal)) {
        tokens = event.usage?.completion_tokens ?? tokens;
        const [choice] = event.choices;
        if (!choice) continue;
        reason = choice.finish_reason ?? reason;
        const piece = choice.text ?? `${choice.delta.reasoning_content ?? ""}${choice.delta.content ?? ""}`;
        if (piece === "") continue;
        first ??= passed();
        this.text.append(piece);
        say(this.state, "answers");
      }
      const pace = first === null ? "" : `, first after ${seconds(first).join(" ")}`;
      say(this.state, `${several(tokens, "token")} in ${seconds(passed()).join(" ")}${pace}, ended by ${reason || "the server"}`);
    } catch (error) {
      const isStopped = signal.aborted;
      this.element.classList.toggle("wrong", !isStopped);
      say(this.state, isStopped ? "stopped" : error.message);
    }
  }
}
