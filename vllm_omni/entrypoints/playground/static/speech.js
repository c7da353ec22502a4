// SPDX-License-Identifier: Apache-2.0
// Speech from a text, played while it is made; and the voices of its users.

import { Attachments } from "./attach.js";
import { fieldsOf, find, make, removeUnoffered, setOptions } from "./dom.js";
import { bytesOf, events, send } from "./server.js";
import { SoundStream } from "./sound.js";
import { onSend } from "./task.js";

const PATH = "v1/audio/speech";
const VOICES = "v1/audio/voices";
const BARE = "pcm";
const LIVE = "wav"; // what bare samples, which can be played as they come, are kept as

export function startSpeech(panel, offer, model, last) {
  removeUnoffered(panel, offer);
  const form = find(".speak", panel);
  const results = find(".results", panel);
  const { voice, language, task_type: task, response_format: format } = form.elements;
  setOptions(format, [LIVE, ...offer.formats.filter((each) => each !== LIVE && each !== BARE)]);
  if (language) setOptions(language, offer.languages, "automatic");
  if (task) setOptions(task, offer.tasks, "automatic");
  const optional = ["voice", "speed", "seed", "language", "task_type", "instructions"];
  const names = optional.filter((name) => form.elements[name]);

  const readVoices = async () => {
    const list = await (await send({ path: VOICES })).json();
    setOptions(voice, list.voices, offer.needs_reference ? "choose one" : "the model’s own");
    showUploaded(panel, list.uploaded_voices, readVoices);
  };
  readVoices().catch((error) => { find(".error", form).textContent = error.message; });

  onSend(form, async (signal, say) => {
    const kept = format.value;
    const wanted = kept === LIVE ? BARE : kept;
    const body = { model, input: form.elements.input.value.trim(), ...fieldsOf(form, ...names) };
    const json = { ...body, response_format: wanted, stream_format: "sse", return_stage_metrics: true };
    const whole = { ...body, response_format: kept };
    const run = last.begin(PATH, { path: PATH, json: whole, save: { kind: "file", name: `speech.${kept}` } });
    const response = await send({ path: PATH, json }, signal);
    run.mark("Answer began after");
    say("Speaking…");
    const sound = new SoundStream();
    signal.addEventListener("abort", () => sound.stop());
    const pieces = [];
    let stages = [];
    for await (const event of events(response)) {
      if (event.type === "speech.audio.done") stages = event.metrics.stages;
      if (event.type !== "speech.audio.delta") continue;
      run.mark("First sound after");
      const bytes = bytesOf(event.audio);
      if (wanted === BARE) sound.add(bytes, offer.sample_rate);
      else pieces.push(bytes);
    }
    run.end(stages);
    if (sound.isEmpty && !pieces.length) throw new Error("The model made no sound.");
    const blob = wanted === BARE ? sound.file() : new Blob(pieces, { type: `audio/${kept}` });
    results.prepend(soundFigure(blob, body.input, `speech.${kept}`));
  });

  if (offer.max_references) startUpload(panel, readVoices);
}

/** A sound to be heard and kept. */
export function soundFigure(blob, text, name) {
  const src = URL.createObjectURL(blob);
  const save = make("a", { href: src, download: name, textContent: `Save as ${name}` });
  const caption = make("figcaption", {}, text, " · ", save);
  return make("figure", {}, make("audio", { src, controls: true, "aria-label": text }), caption);
}

function startUpload(panel, readVoices) {
  const form = find(".upload", panel);
  const recordings = new Attachments(find(".attach", form), ["audio"], "A recording of it", 1);
  onSend(form, async (signal, say) => {
    const [recording] = recordings.items;
    if (!recording) throw new Error("Choose a file, or record something.");
    const fields = Object.entries(fieldsOf(form, "name", "consent", "ref_text"));
    const upload = [...fields, ["audio_sample", recording]];
    const made = await (await send({ path: VOICES, form: upload }, signal)).json();
    await readVoices();
    find(".speak", panel).elements.voice.value = made.voice.name;
    form.reset();
    recordings.clear();
    say(made.note ?? "Kept.");
  });
}

function showUploaded(panel, voices, readVoices) {
  const list = find(".uploaded", panel);
  if (!list) return;
  const lines = voices.map(({ name, seconds }) => {
    const forget = make("button", {
      type: "button",
      textContent: "Forget",
      "aria-label": `Forget the voice ${name}`,
      click: async () => {
        try {
          await send({ method: "DELETE", path: `${VOICES}/${encodeURIComponent(name)}` });
          await readVoices();
        } catch (error) {
          find(".upload .error", panel).textContent = error.message;
        }
      },
    });
    const length = seconds ? ` (${seconds.toFixed(1)} s)` : "";
    return make("li", {}, make("span", { textContent: name + length }), forget);
  });
  list.replaceChildren(...lines);
}
