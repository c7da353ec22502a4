// SPDX-License-Identifier: Apache-2.0
// Light or dark: as the system says, unless the switch says something else.

import { find } from "./dom.js";

const ENTRY = "vllm-omni-theme";

export function startTheme() {
  const select = find("#theme");
  select.value = localStorage.getItem(ENTRY) ?? "system";
  const apply = () => {
    if (select.value === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = select.value;
  };
  select.addEventListener("change", () => {
    localStorage.setItem(ENTRY, select.value);
    apply();
  });
  apply();
}
