// SPDX-License-Identifier: Apache-2.0
// The start: the key, if one is needed; what the model offers; a tab for each task that works.

import { startChat } from "./chat.js";
import { find } from "./dom.js";
import { startImages } from "./images.js";
import * as key from "./key.js";
import { LastRequest } from "./last.js";
import { send } from "./server.js";
import { startSounds } from "./sounds.js";
import { startSpeech } from "./speech.js";
import { startTabs } from "./tabs.js";
import { startTheme } from "./theme.js";
import { startVideos } from "./videos.js";

const STARTS = {
  chat: startChat,
  speech: startSpeech,
  images: startImages,
  videos: startVideos,
  sounds: startSounds,
};

async function readOffer(say) {
  for (;;) {
    if (key.isNeeded() && !key.current()) {
      say("This server asks for an API key.");
      await key.ask();
    }
    say("Asking the server what it offers…");
    try {
      return await (await send({ path: "playground/offer" })).json();
    } catch (error) {
      if (error.status !== 401) throw error;
      say("This server asks for another API key.");
      await key.ask("The server does not take this key.");
    }
  }
}

async function start() {
  startTheme();
  const status = find("#status");
  const change = find("#change-key");
  change.hidden = !key.isNeeded();
  change.addEventListener("click", async () => {
    await key.ask();
    location.reload();
  });
  let offer;
  try {
    offer = await readOffer((text) => { status.textContent = text; });
  } catch (error) {
    status.textContent = `The server does not say what it offers: ${error.message}`;
    return;
  }
  find("#model").textContent = `${offer.models[0]} · ${offer.stages.join(" → ")}`;
  const last = new LastRequest(find("#last"));
  const tasks = offer.tasks.filter((task) => task in STARTS);
  startTabs(tasks);
  for (const task of Object.keys(STARTS)) {
    const panel = find(`#panel-${task}`);
    if (tasks.includes(task)) STARTS[task](panel, offer[task], offer.models[0], last);
    else panel.remove();
  }
  find("#columns").hidden = false;
  status.textContent = tasks.length ? "" : "This model has no task that the playground knows.";
}

start();
