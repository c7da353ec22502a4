// SPDX-License-Identifier: Apache-2.0
// Sounds and music from a text.

import { fieldsOf, find, setOptions } from "./dom.js";
import { send, stagesOf } from "./server.js";
import { soundFigure } from "./speech.js";
import { onSend } from "./task.js";

const PATH = "v1/audio/generate";
const OPTIONAL = ["audio_length", "num_inference_steps", "seed", "guidance_scale", "negative_prompt"];

export function startSounds(panel, offer, model, last) {
  const form = find("form", panel);
  const results = find(".results", panel);
  const format = form.elements.response_format;
  setOptions(format, offer.formats.filter((each) => each !== "pcm"));

  onSend(form, async (signal, say) => {
    const input = form.elements.input.value.trim();
    const json = {
      model, input, response_format: format.value, ...fieldsOf(form, ...OPTIONAL),
      return_stage_metrics: true,
    };
    const name = `sound.${format.value}`;
    const run = last.begin(PATH, { path: PATH, json, save: { kind: "file", name } });
    const response = await send({ path: PATH, json }, signal);
    run.mark("Answer began after");
    say("Fetching…");
    const blob = await response.blob();
    run.end(stagesOf(response));
    results.prepend(soundFigure(blob, input, name));
  });
}
