// SPDX-License-Identifier: Apache-2.0
// Videos, which are made in the background: begun, followed, fetched.

import { Attachments } from "./attach.js";
import { fieldsOf, find, make } from "./dom.js";
import { send } from "./server.js";
import { onSend } from "./task.js";

const PATH = "v1/videos";
const OPTIONAL = [
  "size", "seconds", "fps", "num_inference_steps", "seed", "guidance_scale", "negative_prompt",
];

export function startVideos(panel, offer, model, last) {
  const form = find("form", panel);
  const results = find(".results", panel);
  const progress = find("progress", form);
  const place = find(".attach", form);
  const media = [...(offer.from_image ? ["image"] : []), ...(offer.from_video ? ["video"] : [])];
  const label = `Begin with ${offer.from_image ? "a picture" : "a video"}${offer.from_text ? "" : " (needed)"}`;
  const sources = media.length ? new Attachments(place, media, label, offer.from_image ? 2 : 1) : null;
  if (!sources) place.remove();

  onSend(form, async (signal, say) => {
    const prompt = form.elements.prompt.value.trim();
    const body = { model, prompt, ...fieldsOf(form, ...OPTIONAL), return_stage_metrics: true };
    const fields = Object.entries(body).map(([name, value]) => [name, String(value)]);
    const files = (sources?.items ?? []).map((file) => ["input_reference", file]);
    const request = { path: PATH, form: [...fields, ...files] };
    const run = last.begin(PATH, { ...request, save: { kind: "video" } });
    progress.closest("label").hidden = false;
    progress.value = 0;
    let id = null;
    try {
      let response = await send(request, signal);
      run.mark("Taken on after");
      let video = await response.json();
      id = video.id;
      while (video.status === "queued" || video.status === "in_progress") {
        say(video.status === "queued" ? "Waiting for its turn…" : `${video.progress} %`);
        progress.value = video.progress;
        await pause(Math.min(500, Number(response.headers.get("openai-poll-after-ms") ?? 500)), signal);
        response = await send({ path: `${PATH}/${id}` }, signal);
        video = await response.json();
        if (video.progress) run.mark("First progress after");
      }
      if (video.status === "failed") throw new Error(video.error?.message ?? "The video failed.");
      progress.value = 100;
      const file = await (await send({ path: `${PATH}/${id}/content` }, signal)).blob();
      run.end(video.metrics?.stages);
      results.prepend(videoFigure(file, prompt));
    } catch (problem) {
      if (signal.aborted && id) await send({ method: "DELETE", path: `${PATH}/${id}` });
      throw problem;
    } finally {
      progress.closest("label").hidden = true;
    }
  });
}

function videoFigure(blob, prompt) {
  const src = URL.createObjectURL(blob);
  const video = make("video", { src, controls: true, loop: true, "aria-label": prompt });
  const save = make("a", { href: src, download: "video.mp4", textContent: "Save as video.mp4" });
  return make("figure", {}, video, make("figcaption", {}, prompt, " · ", save));
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}
