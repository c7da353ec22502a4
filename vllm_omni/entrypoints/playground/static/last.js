// SPDX-License-Identifier: Apache-2.0
// The panel about the last request: what the browser saw, the stages' timing, code to repeat it.

import { curl, python } from "./code.js";
import { find, make } from "./dom.js";
import * as key from "./key.js";
import { addressOf } from "./server.js";

export class LastRequest {
  #root;

  constructor(root) {
    this.#root = root;
    for (const button of root.querySelectorAll("[data-copy]")) {
      button.addEventListener("click", () => this.#copy(button.dataset.copy));
    }
  }

  /**
   * A request begins.
   *
   * @param path Of its route.
   * @param repeat The same request in one piece: `{path, json or form, save}`, see `code.js`.
   */
  begin(path, repeat) {
    const root = this.#root;
    find(".empty", root).hidden = true;
    find(".filled", root).hidden = false;
    find(".route code", root).textContent = `POST /${path}`;
    find(".seen", root).replaceChildren();
    this.#show([]);
    const keyed = Boolean(key.current());
    find("#curl", root).textContent = curl(repeat, addressOf(repeat.path), keyed);
    find("#python", root).textContent = python(repeat, addressOf(repeat.path), keyed);
    find(".copied", root).textContent = "";
    return new Run(find(".seen", root), (stages) => this.#show(stages));
  }

  #show(stages) {
    const body = find(".stages tbody", this.#root);
    const whole = Math.max(0.001, ...stages.map((stage) => stage.finished_s ?? stage.submitted_s));
    body.replaceChildren(...stages.flatMap((stage) => rows(stage, whole)));
    body.closest(".scroll").hidden = stages.length === 0;
  }

  async #copy(name) {
    const said = find(".copied", this.#root);
    try {
      await navigator.clipboard.writeText(find(`#${name}`, this.#root).textContent);
      said.textContent = "Copied.";
    } catch {
      said.textContent = "The browser does not let the page copy; select the text instead.";
    }
  }
}

/** One request, as the browser sees it. */
class Run {
  #marked = new Set();
  #began = performance.now();

  constructor(list, show) {
    this.list = list;
    this.show = show;
  }

  /** Something happened; of each name the first one counts. */
  mark(name) {
    if (this.#marked.has(name)) return;
    this.#marked.add(name);
    const seconds = (performance.now() - this.#began) / 1000;
    this.list.append(make("dt", { textContent: name }), make("dd", { textContent: `${told(seconds)} s` }));
  }

  /** All of it is here. */
  end(stages = []) {
    this.mark("All of it after");
    this.show(stages);
  }
}

function rows(stage, whole) {
  const { submitted_s: asked, first_output_s: first, finished_s: done } = stage;
  const name = stage.replica ? `${stage.stage} (${stage.replica})` : stage.stage;
  const cells = [asked, first, done].map((time) => make("td", { textContent: told(time) }));
  const tokens = make("td", { textContent: stage.tokens || "–" });
  const head = make("th", { scope: "row", textContent: name });
  const end = done ?? whole;
  const track = make("div", { className: "track" },
    bar("waiting", asked, first ?? end, whole), bar("giving", first ?? end, end, whole));
  const picture = make("tr", { "aria-hidden": "true" }, make("td", { className: "bar", colSpan: 5 }, track));
  return [make("tr", {}, head, ...cells, tokens), picture];
}

function bar(className, from, to, whole) {
  const span = make("span", { className });
  span.style.left = `${(100 * from) / whole}%`;
  span.style.width = `${(100 * Math.max(0, to - from)) / whole}%`;
  return span;
}

const told = (seconds) => (seconds === null || seconds === undefined ? "–" : seconds.toFixed(3));
