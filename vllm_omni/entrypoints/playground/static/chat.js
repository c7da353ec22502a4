// SPDX-License-Identifier: Apache-2.0
// A conversation: text, pictures, sound and video in, streamed text and speech out.

import { Attachments, shown } from "./attach.js";
import { fieldsOf, find, make, setOptions } from "./dom.js";
import { bytesOf, events, send } from "./server.js";
import { SoundStream } from "./sound.js";
import { onSend } from "./task.js";

const PATH = "v1/chat/completions";

export function startChat(panel, offer, model, last) {
  const form = find("form", panel);
  const log = find(".log", panel);
  const speaks = offer.modalities.includes("audio");
  const media = ["image", "audio", "video"].filter((medium) => offer.inputs[medium]);
  const place = find(".attach", form);
  const attachments = media.length ? new Attachments(place, media, labelOf(media)) : null;
  if (!attachments) place.remove();
  if (!speaks) find(".modalities", form).remove();
  if (offer.voices.length) setOptions(form.elements.voice, offer.voices);
  else find(".voice", form).remove();

  let messages = [];
  find(".clear", form).addEventListener("click", () => {
    messages = [];
    log.replaceChildren();
    form.elements.text.focus();
  });

  onSend(form, async (signal, say) => {
    const files = attachments?.items ?? [];
    const text = form.elements.text.value.trim();
    if (!text && !files.length) throw new Error("There is nothing to send yet.");
    const asked = { role: "user", content: contentOf(text, files) };
    const wantsSound = speaks && form.elements.answer.value === "audio";
    const body = bodyOf(form, model, [...messages, asked], wantsSound);
    log.append(questionItem(text, files));
    const answer = new Answer(log, wantsSound);
    const repeat = { path: PATH, json: { ...body, ...inOnePiece(body) }, save: { kind: "chat" } };
    const run = last.begin(PATH, repeat);
    form.elements.text.value = "";
    attachments?.clear();
    try {
      const streamed = { ...body, stream: true, return_stage_metrics: true };
      const response = await send({ path: PATH, json: streamed }, signal);
      run.mark("Answer began after");
      say("Answering…");
      const stages = await answer.read(response, run);
      run.end(stages);
    } catch (problem) {
      // What was asked comes back, so that it can be sent again.
      if (!answer.text) form.elements.text.value = text;
      throw problem;
    } finally {
      answer.close();
      if (answer.text) messages.push(asked, { role: "assistant", content: answer.text });
    }
  });
}

/** An answer as it comes. */
class Answer {
  text = "";
  #item = make("article", { className: "assistant" }, make("h3", { textContent: "Answer" }));
  #words = make("p");
  #sound;

  constructor(log, wantsSound) {
    this.log = log;
    this.#sound = wantsSound ? new SoundStream() : null;
    this.#item.append(this.#words);
    // A screen reader waits until it is whole, instead of reading token by token.
    log.setAttribute("aria-busy", "true");
    log.append(this.#item);
  }

  /** Reads all of it; returns the stages' timing. */
  async read(response, run) {
    let stages = [];
    for await (const chunk of events(response)) {
      stages = chunk.metrics?.stages ?? stages;
      const choice = chunk.choices[0];
      if (!choice) continue;
      if (choice.delta.content) {
        run.mark("First text after");
        this.#write(choice.delta.content);
      }
      if (choice.delta.audio?.data) {
        run.mark("First sound after");
        this.#sound?.add(bytesOf(choice.delta.audio.data), choice.audio_metadata.sample_rate_hz);
      }
    }
    return stages;
  }

  close() {
    if (this.#sound && !this.#sound.isEmpty) {
      const src = URL.createObjectURL(this.#sound.file());
      this.#item.append(make("audio", { src, controls: true, "aria-label": "The answer, spoken" }));
    }
    if (!this.text && (!this.#sound || this.#sound.isEmpty)) this.#item.remove();
    this.log.setAttribute("aria-busy", "false");
    this.log.scrollTop = this.log.scrollHeight;
  }

  #write(text) {
    this.text += text;
    this.#words.textContent = this.text;
    this.log.scrollTop = this.log.scrollHeight;
  }
}

function bodyOf(form, model, messages, wantsSound) {
  const { system, ...sampling } = fieldsOf(form, "system", "max_tokens", "temperature", "seed");
  const before = system ? [{ role: "system", content: system }] : [];
  const body = { model, messages: [...before, ...messages], ...sampling };
  if (!wantsSound) return body;
  const voice = form.elements.voice?.value;
  const audio = { format: "pcm16", ...(voice ? { voice } : {}) };
  return { ...body, modalities: ["text", "audio"], audio };
}

/** What is different in an answer that is not streamed: its sound is a file. */
const inOnePiece = (body) => (body.audio ? { audio: { ...body.audio, format: "wav" } } : {});

function contentOf(text, files) {
  if (!files.length) return text;
  const parts = files.map((file) => {
    if (file.medium !== "audio") {
      const type = `${file.medium}_url`;
      return { type, [type]: { url: file.inJson(true) } };
    }
    const format = file.type.split("/")[1].replace(/^x-|;.*$/g, "");
    return { type: "input_audio", input_audio: { data: file.inJson(false), format } };
  });
  return text ? [...parts, { type: "text", text }] : parts;
}

function questionItem(text, files) {
  const item = make("article", { className: "user" }, make("h3", { textContent: "You" }));
  item.append(...files.map(shown));
  if (text) item.append(make("p", { textContent: text }));
  return item;
}

const labelOf = (media) =>
  `Add ${media.map((m) => ({ image: "pictures", audio: "sound", video: "video" })[m]).join(", ")}`;
