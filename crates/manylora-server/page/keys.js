// The dialog for keys. What is typed there goes to the module that sends requests, and the fields are emptied.

import { setKeys } from "./api.js";

/** `changed` is called when other keys are in use. */
export function keysDialog({ dialog, form, open, close, forget, user, admin }, changed) {
  const known = { user: "", admin: "" };
  const use = (userKey, adminKey) => {
    Object.assign(known, { user: userKey, admin: adminKey });
    setKeys(userKey, adminKey);
    open.textContent = userKey || adminKey ? "Keys in use" : "Keys";
    dialog.close();
    changed();
  };
  open.addEventListener("click", () => {
    user.value = known.user;
    admin.value = known.admin;
    dialog.showModal();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    use(user.value.trim(), admin.value.trim());
  });
  close.addEventListener("click", () => dialog.close());
  forget.addEventListener("click", () => use("", ""));
  dialog.addEventListener("close", () => {
    user.value = "";
    admin.value = "";
  });
}
