// SPDX-License-Identifier: Apache-2.0
// What every task's form has: one request at a time, a button that stops it, errors told.

import { find, sendOnCtrlEnter } from "./dom.js";

/**
 * Has a form do something when it is sent.
 *
 * @param form With a submit button, `.stop`, `.state` and `.error`.
 * @param work `(signal, say) -> Promise`: does it; `say` tells how far it is.
 */
export function onSend(form, work) {
  const submit = find("button[type=submit]", form);
  const stop = find(".stop", form);
  const error = find(".error", form);
  const state = find(".state", form);
  const say = (text) => {
    if (state.textContent !== text) state.textContent = text;
  };
  sendOnCtrlEnter(form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (!stop.hidden) return; // one is running
    const controller = new AbortController();
    stop.onclick = () => controller.abort();
    stop.hidden = false;
    submit.setAttribute("aria-disabled", "true"); // `disabled` would lose the keyboard's place
    error.textContent = "";
    say("Waiting for the server…");
    try {
      await work(controller.signal, say);
      say("Done.");
    } catch (problem) {
      say(controller.signal.aborted ? "Stopped." : "");
      if (!controller.signal.aborted) error.textContent = problem.message;
    }
    if (document.activeElement === stop) submit.focus();
    stop.hidden = true;
    submit.removeAttribute("aria-disabled");
  });
}
