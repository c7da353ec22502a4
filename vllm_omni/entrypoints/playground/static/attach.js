// SPDX-License-Identifier: Apache-2.0
// Choosing files, or recording the microphone, to go along with a request.

import { find, make } from "./dom.js";
import { Attachment } from "./server.js";
import { Recorder } from "./sound.js";

/** A place for attachments, in an element of class `attach`. */
export class Attachments {
  #items = [];
  #list = make("ul");
  #problem = make("p", { className: "error", role: "alert" });

  /**
   * @param place The element.
   * @param media Media that are taken: of "image", "audio", "video".
   * @param label What to call the choice of a file.
   * @param most How many.
   */
  constructor(place, media, label, most = 16) {
    this.media = media;
    this.most = most;
    const accept = media.map((medium) => `${medium}/*`).join(",");
    const input = make("input", { type: "file", accept, multiple: most > 1, name: place.dataset.name });
    input.addEventListener("change", () => {
      for (const file of input.files) this.add(new Attachment(file, file.name));
      input.value = "";
    });
    const row = make("div", { className: "row" }, make("label", {}, label, input));
    if (media.includes("audio") && Recorder.isPossible) row.append(this.#recordButton());
    place.replaceChildren(row, this.#list, this.#problem);
  }

  get items() {
    return [...this.#items];
  }

  add(attachment) {
    this.#problem.textContent = "";
    if (!this.media.includes(attachment.medium)) {
      this.#problem.textContent = `${attachment.name} is none of: ${this.media.join(", ")}.`;
      return;
    }
    if (this.#items.length >= this.most) this.#remove(this.#items[0]);
    const item = { attachment, line: this.#line(attachment) };
    find("button", item.line).addEventListener("click", () => this.#remove(attachment));
    this.#items.push(attachment);
    this.#list.append(item.line);
    this.#lines.set(attachment, item.line);
  }

  clear() {
    for (const attachment of this.items) this.#remove(attachment);
  }

  #lines = new Map();

  #remove(attachment) {
    this.#items = this.#items.filter((each) => each !== attachment);
    this.#lines.get(attachment)?.remove();
    this.#lines.delete(attachment);
  }

  #line(attachment) {
    const remove = make("button", {
      type: "button", textContent: "Remove", "aria-label": `Remove ${attachment.name}`,
    });
    return make("li", {}, shown(attachment), make("span", { textContent: attachment.name }), remove);
  }

  #recordButton() {
    let recorder = null;
    const button = make("button", { type: "button", textContent: "Record", "aria-pressed": "false" });
    button.addEventListener("click", async () => {
      this.#problem.textContent = "";
      if (recorder) {
        const blob = await recorder.stop();
        recorder = null;
        button.setAttribute("aria-pressed", "false");
        button.textContent = "Record";
        this.add(new Attachment(blob, `recording-${this.#items.length + 1}.wav`));
        return;
      }
      const starting = new Recorder();
      try {
        await starting.start();
      } catch (error) {
        this.#problem.textContent = `The microphone cannot be used: ${error.message}`;
        return;
      }
      recorder = starting;
      button.setAttribute("aria-pressed", "true");
      button.textContent = "Stop recording";
    });
    return button;
  }
}

/** An attachment, to be seen or heard. */
export function shown(attachment) {
  const src = URL.createObjectURL(attachment.blob);
  if (attachment.medium === "image") return make("img", { src, alt: attachment.name });
  const tag = attachment.medium === "video" ? "video" : "audio";
  return make(tag, { src, controls: true, "aria-label": attachment.name });
}
