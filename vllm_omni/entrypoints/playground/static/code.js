// SPDX-License-Identifier: Apache-2.0
// A request as code: for a shell with curl, and for Python with httpx.
//
// A request is `{json}` or `{form}` and `save`, what becomes of the answer: `{kind: "chat"}`,
// `{kind: "images", format}`, `{kind: "file", name}` or `{kind: "video"}`. Files that went along are
// named and read again; the key is never in it, but in the environment's API_KEY.

import { Attachment, Embedded } from "./server.js";

/** A shell command. */
export function curl(request, url, keyed) {
  if (request.save.kind === "video") url = url.replace(/videos$/, "videos/sync");
  const parts = [`curl ${quoted(url)}`];
  if (keyed) parts.push(`-H "Authorization: Bearer $API_KEY"`);
  const save = { file: request.save.name, video: "video.mp4" }[request.save.kind];
  if (save) parts.push(`-o ${quoted(save)}`);
  if (request.form) {
    for (const [name, value] of request.form) {
      const isFile = value instanceof Attachment;
      // curl splits a name at commas and semicolons unless it is in quotes.
      const path = isFile && value.name.replace(/[\\"]/g, "\\$&");
      const field = isFile ? `${name}=@"${path}";type=${value.type}` : `${name}=${value}`;
      parts.push(`${isFile ? "-F" : "--form-string"} ${quoted(field)}`);
    }
    return parts.join(" \\\n  ");
  }
  const { text, mark, embedded } = marked(request.json);
  const plain = embedded.length === 0;
  parts.push("-H 'Content-Type: application/json'", `-d @- <<${plain ? "'JSON'" : "JSON"}`);
  const pipe = request.save.kind === "images" ? ` | jq -r '.data[0].b64_json' | base64 --decode > picture.${request.save.format}` : "";
  const escaped = plain ? text : text.replace(/[\\$`]/g, "\\$&");
  const body = embedded.reduce((all, { attachment, asUrl }, number) => {
    const prefix = asUrl ? `data:${attachment.type};base64,` : "";
    const read = `${prefix}$(base64 < ${quoted(attachment.name)} | tr -d '\\n')`;
    return all.replace(`${mark}${number}${mark}`, () => read);
  }, escaped);
  return `${parts.join(" \\\n  ")}${pipe}\n${body}\nJSON`;
}

/** A Python program. */
export function python(request, url, keyed) {
  const files = (request.form ?? []).filter(([, value]) => value instanceof Attachment);
  const fields = (request.form ?? []).filter(([, value]) => !(value instanceof Attachment));
  const isEncoded = request.json && marked(request.json).embedded.length > 0;
  const isDecoded = ["chat", "images"].includes(request.save.kind);
  const headers = keyed ? `headers = {"Authorization": "Bearer " + os.environ["API_KEY"]}\n` : "";
  const modules = [
    ...(isEncoded || isDecoded ? ["base64"] : []),
    ...(keyed ? ["os"] : []),
    ...(request.save.kind === "video" ? ["time"] : []),
  ];
  const lines = [...modules.map((name) => `import ${name}`), "", "import httpx", ""];
  if (modules.length === 0) lines.shift();
  if (isEncoded) {
    lines.push("", "def encoded(path):", "    return base64.b64encode(open(path, 'rb').read()).decode()", "", "");
  }
  const options = keyed ? ["headers=headers"] : [];
  if (request.json) options.push(`json=${literal(request.json, 1)}`);
  if (fields.length) options.push(`data=${literal(Object.fromEntries(fields), 1)}`);
  if (files.length) {
    const opened = files.map(([name, file]) =>
      `        (${literal(name)}, (${literal(file.name)}, open(${literal(file.name)}, "rb"), ${literal(file.type)})),\n`);
    options.push(`files=[\n${opened.join("")}    ]`);
  }
  const call = [`url = ${literal(url)}\n${headers}reply = httpx.post(`, "    url,",
    ...options.map((option) => `    ${option},`), "    timeout=None,", ")", "reply.raise_for_status()"];
  return [...lines, ...call, ...SAVE[request.save.kind](request.save, keyed)].join("\n");
}

const SAVE = {
  file: ({ name }) => [`open(${literal(name)}, "wb").write(reply.content)`],
  images: ({ format }) => [
    `for i, picture in enumerate(reply.json()["data"]):`,
    `    open(f"picture-{i}.${format}", "wb").write(base64.b64decode(picture["b64_json"]))`,
  ],
  chat: () => [
    `message = reply.json()["choices"][0]["message"]`,
    `print(message["content"])`,
    `if message.get("audio"):`,
    `    open("answer.wav", "wb").write(base64.b64decode(message["audio"]["data"]))`,
  ],
  video: (_, keyed) => {
    const more = keyed ? ", headers=headers" : "";
    return [
      `job = f"{url}/{reply.json()['id']}"`,
      `while (video := httpx.get(job${more}).json())["status"] in ("queued", "in_progress"):`,
      `    print(video["progress"], "%")`,
      `    time.sleep(1)`,
      `print(video["status"])`,
      `open("video.mp4", "wb").write(httpx.get(f"{job}/content"${more}, timeout=None).content)`,
    ];
  },
};

/** A body as JSON, with marks where the contents of files belong. */
function marked(json) {
  const mark = `@${Math.random().toString(36).slice(2)}@`;
  const embedded = [];
  const replace = (_, value) =>
    value instanceof Embedded ? `${mark}${embedded.push(value) - 1}${mark}` : value;
  return { text: JSON.stringify(json, replace, 2), mark, embedded };
}

/** For a shell, in single quotes. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A value as Python writes it. */
function literal(value, depth = 0) {
  if (value instanceof Embedded) {
    const { attachment, asUrl } = value;
    const read = `encoded(${literal(attachment.name)})`;
    return asUrl ? `${literal(`data:${attachment.type};base64,`)} + ${read}` : read;
  }
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const [open, close] = isList ? "[]" : "{}";
  const items = isList
    ? value.map((each) => literal(each, depth + 1))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, depth + 1)}`);
  const flat = `${open}${items.join(", ")}${close}`;
  if (flat.length < 60 && !flat.includes("\n")) return flat;
  const indent = "    ".repeat(depth);
  return `${open}\n${items.map((item) => `${indent}    ${item},\n`).join("")}${indent}${close}`;
}
