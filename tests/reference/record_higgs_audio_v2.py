# SPDX-License-Identifier: Apache-2.0
"""Record what transformers' codec and processor of Higgs-Audio v2 answer on the tiny checkpoint.

They need torchaudio, which this project does not, so this runs with it beside:

    python -m vllm_omni.testing.tiny higgs_audio_v2 TINY
    python tests/reference/record_higgs_audio_v2.py TINY

It writes `fixtures/higgs_audio_v2/`: `codec.json`, with recordings, their codes and the processor's
whole prompts, and `sounds.npz`, with waveforms as int16.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoTokenizer,
    DacFeatureExtractor,
    HiggsAudioV2Processor,
    HiggsAudioV2TokenizerModel,
)

from vllm_omni.testing.media import sound

OUT = Path(__file__).parent / "fixtures" / "higgs_audio_v2"
RATE = 24_000
SYSTEM = "Generate audio following instruction."
REFERENCES = {
    "a": {"seconds": 1.2, "seed": 7, "text": "Hello, how are you?"},
    "b": {"seconds": 1.337, "seed": 8, "text": "One, two, three."},
}
SAID = "The quick brown fox."
SCENE = "A calm and friendly voice."
PROMPTS: dict[str, dict[str, Any]] = {
    "plain": {"text": SAID, "scene": "Audio is recorded from a quiet room.", "references": []},
    "scene": {"text": f" {SAID}\n", "scene": SCENE, "references": []},
    "cloned": {"text": SAID, "scene": SCENE, "references": ["a"]},
    "dialogue": {"text": SAID, "scene": SCENE, "references": ["a", "b"]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    model = parser.parse_args().model
    codec = HiggsAudioV2TokenizerModel.from_pretrained(model / "audio_tokenizer").eval()
    processor = HiggsAudioV2Processor(
        DacFeatureExtractor(hop_length=1, sampling_rate=RATE),
        AutoTokenizer.from_pretrained(model),
        codec,
    )
    recordings = {n: sound(r["seconds"], RATE, r["seed"]) for n, r in REFERENCES.items()}
    recorded: dict[str, Any] = {"references": REFERENCES, "prompts": PROMPTS}
    sounds = {}
    for name, samples in recordings.items():
        codes = codec.encode(torch.from_numpy(samples)[None, None]).audio_codes
        recorded["references"][name]["codes"] = codes[0].T.tolist()
        # As the model would have made it, begin and end codes among the last frames.
        begin, end = codes.new_full((2, 1, codes.shape[1], 1), 1024)
        rows = processor.build_delay_pattern(torch.cat([begin, codes, end + 1], dim=2))
        rows[:, 0, -5] = 1025
        sounds[name] = processor.batch_decode(rows.transpose(1, 2))[0]
        recorded["references"][name]["rows"] = rows[0].T.tolist()
    for prompt in recorded["prompts"].values():
        prompt.update(processed(processor, prompt, recordings))
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "codec.json").write_text(json.dumps(recorded) + "\n")
    as_int16 = {name: np.int16(np.round(each.numpy() * 32767)) for name, each in sounds.items()}
    np.savez_compressed(OUT / "sounds.npz", **as_int16)


def processed(
    processor: HiggsAudioV2Processor, prompt: dict[str, Any], recordings: dict[str, np.ndarray]
) -> dict[str, Any]:
    """What `generate` is given."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "scene", "content": prompt["scene"]},
    ]
    for name in prompt["references"]:
        messages += [{"role": "user", "content": REFERENCES[name]["text"]}, {"role": "assistant"}]
    messages.append({"role": "user", "content": prompt["text"]})
    text = processor.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    audio = [recordings[name] for name in prompt["references"]] or None
    made = processor(text=text, audio=audio, return_tensors="pt", add_special_tokens=False)
    rows = made["audio_input_ids"][0].tolist() if audio else []
    return {"input_ids": made["input_ids"][0].tolist(), "audio_input_ids": rows}


if __name__ == "__main__":
    main()
