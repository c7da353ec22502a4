// SPDX-License-Identifier: Apache-2.0
// Requests to the server that this page came from, wherever a proxy has put it.

import * as key from "./key.js";

const ROOT = new URL("../", import.meta.url);

export const addressOf = (path) => new URL(path, ROOT).href;

/** A file or a recording that goes along with a request. */
export class Attachment {
  constructor(blob, name) {
    this.blob = blob;
    this.name = name;
    this.type = blob.type || "application/octet-stream";
  }

  get medium() {
    return this.type.split("/")[0];
  }

  /** In a JSON body: becomes the bare base64 of the file, or a data URL. */
  inJson(asUrl) {
    return new Embedded(this, asUrl);
  }
}

export class Embedded {
  constructor(attachment, asUrl) {
    this.attachment = attachment;
    this.asUrl = asUrl;
  }

  async text() {
    const url = await dataUrl(this.attachment);
    return this.asUrl ? url : url.slice(url.indexOf(",") + 1);
  }
}

export class ServerError extends Error {
  constructor(message, status, param) {
    super(param && !message.includes(param) ? `${message} (${param})` : message);
    this.status = status;
  }
}

/**
 * Sends a request: `{method, path, json}` or `{method, path, form}`, the form a list of
 * `[name, value]`, values of both possibly attachments.
 */
export async function send(request, signal) {
  const headers = {};
  if (key.current()) headers.Authorization = `Bearer ${key.current()}`;
  let body;
  if (request.json) {
    headers["Content-Type"] = "application/json";
    body = JSON.stringify(await embedded(request.json));
  } else if (request.form) {
    body = new FormData();
    for (const [name, value] of request.form) {
      if (value instanceof Attachment) body.append(name, value.blob, value.name);
      else body.append(name, value);
    }
  }
  const url = addressOf(request.path);
  const method = request.method ?? (body ? "POST" : "GET");
  let response;
  try {
    response = await fetch(url, { method, headers, body, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** The events of a stream, as objects; ends at `[DONE]`, throws an error event. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      const lines = (rest + (value ?? "")).split(/\r?\n/);
      rest = done ? "" : lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.message, undefined, event.error.param);
        yield event;
      }
      if (done) return;
    }
  } finally {
    await reader.cancel();
  }
}

/** The stages' timing of an answer that is a file. */
export const stagesOf = (response) => JSON.parse(response.headers.get("x-vllm-omni-stages") ?? "[]");

/** Bytes of base64. */
export const bytesOf = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));

async function embedded(value) {
  if (value instanceof Embedded) return value.text();
  if (Array.isArray(value)) return Promise.all(value.map(embedded));
  if (value === null || typeof value !== "object") return value;
  const entries = Object.entries(value).map(async ([name, each]) => [name, await embedded(each)]);
  return Object.fromEntries(await Promise.all(entries));
}

function dataUrl(attachment) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(attachment.blob);
  });
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // A proxy's error page, say.
  }
  const message = error.message ?? `The server answered with ${response.status}.`;
  return new ServerError(message, response.status, error.param);
}
