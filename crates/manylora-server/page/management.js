// Loading, unloading and pinning. The server decides who may; here the controls are shown where it could say yes.

import { hasAdminKey, manage } from "./api.js";
import { say } from "./format.js";

export class Management {
  /** `changed` is called when something was done. */
  constructor({ load, form, outcome, dialog, confirm, text, cancel }, changed) {
    this.load = load;
    this.outcome = outcome;
    this.changed = changed;
    this.dialog = dialog;
    this.text = text;
    this.mode = "off";
    this.leaving = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const { name, path, replace } = form.elements;
      const body = { lora_name: name.value, lora_path: path.value, load_inplace: replace.checked };
      this.do("load", body, form.querySelector("button"));
    });
    confirm.addEventListener("submit", (event) => {
      event.preventDefault();
      dialog.close();
      this.do("unload", { lora_name: this.leaving });
    });
    cancel.addEventListener("click", () => dialog.close());
  }

  take(told) {
    this.mode = told.management;
    this.load.hidden = !this.isOpen();
  }

  /** Whether the controls do something. */
  isOpen() {
    return this.mode === "local" || (this.mode === "key" && hasAdminKey());
  }

  pin(adapter) {
    return this.do("pin", { lora_name: adapter.name, pinned: !adapter.pinned });
  }

  unload(adapter) {
    this.leaving = adapter.name;
    say(this.text, `${adapter.name} is gone for new requests at once. Those that run with it finish first.`);
    this.dialog.showModal();
  }

  async do(action, body, button) {
    if (button) button.disabled = true;
    this.tell(`${action} ${body.lora_name} …`, false);
    try {
      this.tell(await manage(action, body), false);
    } catch (error) {
      this.tell(error.message, true);
    }
    if (button) button.disabled = false;
    this.changed();
  }

  tell(text, isWrong) {
    this.outcome.classList.toggle("wrong", isWrong);
    say(this.outcome, text);
  }
}
