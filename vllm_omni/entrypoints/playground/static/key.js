// SPDX-License-Identifier: Apache-2.0
// The API key: asked for when the server needs one, kept in this tab alone.

import { find } from "./dom.js";

const ENTRY = "vllm-omni-key";

export const isNeeded = () => document.documentElement.dataset.key === "needed";
export const current = () => sessionStorage.getItem(ENTRY);

/** Asks for a key; resolves when one was given. */
export function ask(reason = "") {
  const dialog = find("#key-dialog");
  const form = find("form", dialog);
  find(".error", dialog).textContent = reason;
  form.elements.key.value = "";
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    form.onsubmit = () => {
      sessionStorage.setItem(ENTRY, form.elements.key.value.trim());
      form.elements.key.value = "";
      resolve();
    };
    find(".forget", dialog).onclick = () => {
      sessionStorage.removeItem(ENTRY);
      location.reload();
    };
  });
}
