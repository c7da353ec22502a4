// SPDX-License-Identifier: Apache-2.0
// Sound as 16-bit samples: played while it comes, and as a WAV file in the end.

/** A stream of mono 16-bit little-endian samples. */
export class SoundStream {
  #pieces = [];
  #odd = new Uint8Array();
  #context = null;
  #rate = 0;
  #end = 0;

  /** Adds a piece, which is played behind those before. */
  add(bytes, rate) {
    const data = joined([this.#odd, bytes]);
    const whole = data.length - (data.length % 2);
    this.#odd = data.slice(whole);
    const piece = data.slice(0, whole);
    if (!piece.length) return;
    this.#rate = rate;
    this.#pieces.push(piece);
    this.#play(new Int16Array(piece.buffer), rate);
  }

  get isEmpty() {
    return this.#pieces.length === 0;
  }

  /** Silence at once; what has come is kept. */
  stop() {
    this.#context?.close();
    this.#context = null;
  }

  /** All of it as a WAV file. */
  file() {
    return wav(this.#pieces, this.#rate);
  }

  #play(samples, rate) {
    // A context is only let sound after the user did something, which a sent form is.
    this.#context ??= new AudioContext();
    const buffer = this.#context.createBuffer(1, samples.length, rate);
    buffer.copyToChannel(Float32Array.from(samples, (sample) => sample / 32768), 0);
    const source = this.#context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.#context.destination);
    this.#end = Math.max(this.#end, this.#context.currentTime);
    source.start(this.#end);
    this.#end += buffer.duration;
  }
}

/** Records the microphone until `stop()`, which gives a WAV file. */
export class Recorder {
  static get isPossible() {
    return Boolean(navigator.mediaDevices?.getUserMedia); // not on plain http of another host
  }

  #pieces = [];

  async start() {
    this.media = await navigator.mediaDevices.getUserMedia({ audio: true });
    this.context = new AudioContext();
    await this.context.audioWorklet.addModule(new URL("./recorder.js", import.meta.url).href);
    const source = this.context.createMediaStreamSource(this.media);
    const node = new AudioWorkletNode(this.context, "recorder", { numberOfOutputs: 0 });
    node.port.onmessage = ({ data }) => this.#pieces.push(data);
    source.connect(node);
  }

  async stop() {
    const rate = this.context.sampleRate;
    for (const track of this.media.getTracks()) track.stop();
    await this.context.close();
    const pieces = this.#pieces.map((piece) => {
      const samples = Int16Array.from(piece, (x) => Math.max(-1, Math.min(1, x)) * 32767);
      return new Uint8Array(samples.buffer);
    });
    return wav(pieces, rate);
  }
}

function wav(pieces, rate) {
  const size = pieces.reduce((sum, piece) => sum + piece.length, 0);
  const header = new DataView(new ArrayBuffer(44));
  const words = (at, text) => [...text].forEach((c, i) => header.setUint8(at + i, c.charCodeAt(0)));
  words(0, "RIFF");
  header.setUint32(4, 36 + size, true);
  words(8, "WAVEfmt ");
  header.setUint32(16, 16, true);
  header.setUint16(20, 1, true); // PCM
  header.setUint16(22, 1, true); // channels
  header.setUint32(24, rate, true);
  header.setUint32(28, 2 * rate, true);
  header.setUint16(32, 2, true);
  header.setUint16(34, 16, true);
  words(36, "data");
  header.setUint32(40, size, true);
  return new Blob([header.buffer, ...pieces], { type: "audio/wav" });
}

function joined(arrays) {
  const all = new Uint8Array(arrays.reduce((sum, each) => sum + each.length, 0));
  let at = 0;
  for (const each of arrays) {
    all.set(each, at);
    at += each.length;
  }
  return all;
}
