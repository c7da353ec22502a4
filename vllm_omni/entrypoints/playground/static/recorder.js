// SPDX-License-Identifier: Apache-2.0
// An audio worklet: hands the microphone's samples out.

class RecorderProcessor extends AudioWorkletProcessor {
  process([channels]) {
    if (channels[0]) this.port.postMessage(channels[0].slice());
    return true;
  }
}

registerProcessor("recorder", RecorderProcessor);
