// SPDX-License-Identifier: Apache-2.0
// Tabs as WAI-ARIA's authoring practices describe them: arrow keys move, one of them is in the
// order of the Tab key.

import { find, make } from "./dom.js";

/** Makes a tab for each of these tasks, and shows the first one. */
export function startTabs(tasks) {
  const list = find("#tabs");
  const tabs = tasks.map((task) =>
    make("button", {
      type: "button",
      id: `tab-${task}`,
      role: "tab",
      "aria-controls": `panel-${task}`,
      textContent: find(`#panel-${task}`).dataset.title,
    }),
  );
  const show = (chosen) => {
    for (const tab of tabs) {
      const isChosen = tab === chosen;
      tab.setAttribute("aria-selected", String(isChosen));
      tab.tabIndex = isChosen ? 0 : -1;
      find(`#${tab.getAttribute("aria-controls")}`).hidden = !isChosen;
    }
  };
  list.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) show(tab);
  });
  list.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const at = tabs.indexOf(document.activeElement);
    const step = steps[event.key];
    const next = Number.isFinite(step)
      ? (at + step + tabs.length) % tabs.length
      : step < 0 ? 0 : tabs.length - 1;
    show(tabs[next]);
    tabs[next].focus();
  });
  list.replaceChildren(...tabs);
  show(tabs[0]);
}
