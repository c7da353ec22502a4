// SPDX-License-Identifier: Apache-2.0
// Pictures from a text, or from pictures and a text, with previews while they are painted.

import { Attachments } from "./attach.js";
import { fieldsOf, find, make, setOptions } from "./dom.js";
import { bytesOf, events, send } from "./server.js";
import { onSend } from "./task.js";

const MAKE = "v1/images/generations";
const EDIT = "v1/images/edits";
const OPTIONAL = ["size", "num_inference_steps", "seed", "guidance_scale", "negative_prompt"];

export function startImages(panel, offer, model, last) {
  const form = find("form", panel);
  const results = find(".results", panel);
  const { partial_images: previews, output_format: format, n } = form.elements;
  const place = find(".attach", form);
  const label = offer.from_text ? "Pictures to change" : "Pictures to change (needed)";
  const sources = offer.from_image ? new Attachments(place, ["image"], label) : null;
  if (!sources) place.remove();
  setOptions(format, offer.formats);
  setOptions(previews, Array.from({ length: offer.max_previews + 1 }, (_, i) => String(i)));
  previews.value = String(offer.max_previews);
  n.max = offer.max_images;

  onSend(form, async (signal, say) => {
    const files = sources?.items ?? [];
    const prompt = form.elements.prompt.value.trim();
    const whole = {
      model, prompt, n: Number(n.value || 1), output_format: format.value,
      ...fieldsOf(form, ...OPTIONAL), return_stage_metrics: true,
    };
    // Previews are made of text alone.
    const partial = files.length ? 0 : Number(previews.value);
    const streamed = { ...whole, stream: true, ...(partial ? { partial_images: partial } : {}) };
    const path = files.length ? EDIT : MAKE;
    const save = { kind: "images", format: format.value };
    const run = last.begin(path, { ...requestOf(path, whole, files), save });
    const response = await send(requestOf(path, streamed, files), signal);
    run.mark("Answer began after");
    say("Painting…");
    let figure = null;
    let stages = [];
    try {
      for await (const event of events(response)) {
        const isPreview = event.type.endsWith(".partial_image");
        const blob = new Blob([bytesOf(event.b64_json)], { type: `image/${event.output_format}` });
        if (!figure) {
          figure = new Picture(prompt);
          results.prepend(figure.element);
        }
        if (isPreview) {
          const number = event.partial_image_index + 1;
          run.mark("First preview after");
          say(`Preview ${number} of ${partial}`);
          figure.preview(blob, number);
        } else {
          run.mark("First picture after");
          stages = event.metrics?.stages ?? stages;
          figure.finish(blob, `picture-${event.index + 1}.${event.output_format}`);
          figure = null;
        }
      }
    } finally {
      figure?.element.remove(); // it was never finished
    }
    run.end(stages);
  });
}

/** One picture as it is painted. */
class Picture {
  #image = make("img");
  #caption = make("figcaption");

  constructor(prompt) {
    this.prompt = prompt;
    this.element = make("figure", {}, this.#image, this.#caption);
  }

  preview(blob, number) {
    this.#show(blob, `Preview ${number} of: ${this.prompt}`);
    this.element.dataset.preview = number;
    this.#caption.textContent = `Preview ${number}`;
  }

  finish(blob, name) {
    this.#show(blob, this.prompt);
    delete this.element.dataset.preview;
    const save = make("a", { href: this.#image.src, download: name, textContent: `Save as ${name}` });
    this.#caption.replaceChildren(this.prompt, " · ", save);
  }

  #show(blob, alt) {
    if (this.#image.src) URL.revokeObjectURL(this.#image.src);
    this.#image.src = URL.createObjectURL(blob);
    this.#image.alt = alt;
  }
}

/** As JSON, or as a form with the pictures that are changed. */
function requestOf(path, body, files) {
  if (!files.length) return { path, json: body };
  const fields = Object.entries(body).map(([name, value]) => [name, String(value)]);
  return { path, form: [...fields, ...files.map((file) => ["image", file])] };
}
