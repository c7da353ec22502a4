# SPDX-License-Identifier: Apache-2.0
"""The whole recipe: espeak-ng speaks, the codec is trained, then the talker; both are written.

    python -m recipes.demo.tts.train --out OUT

The work is measured in seconds of a clock, not in steps, so that it ends when it should: the result
depends on the machine, and is not the same twice.
"""

import argparse
import json
import os
import tempfile
import time
import wave
from pathlib import Path

import numpy as np
import torch

from recipes.demo.tts.corpus import Corpus, whole_frames
from recipes.demo.tts.layout import HOP, SAMPLE_RATE, write_settings, write_weights
from recipes.demo.tts.prompts import prompt
from recipes.demo.tts.recognise import word_error_rate
from recipes.demo.tts.speak import Speaker
from recipes.demo.tts.talker import Talker, generate
from recipes.demo.tts.train_codec import CodecTraining, TrainedCodec, train_codec
from recipes.demo.tts.train_talker import TalkerTraining, encoded, train_talker
from recipes.demo.tts.voices import VOICES

UNSEEN = Path(__file__).with_name("unseen.txt")
_MOST_FRAMES = 250
_SAMPLES = 8


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--words", type=Path, help="pyspellchecker's en.json.gz")
    parser.add_argument("--corpus", type=Path, default=Path(tempfile.gettempdir()) / "demo-tts")
    parser.add_argument("--weights-only", action="store_true", help="no files of settings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=280)
    parser.add_argument("--codec-shards", type=int, default=40)
    parser.add_argument("--codec-seconds", type=float, default=185)
    parser.add_argument("--codec-batch", type=int, default=32)
    parser.add_argument(
        "--codec", type=Path, help="a codec.safetensors of before, not to be trained"
    )
    parser.add_argument("--talker-seconds", type=float, default=235)
    parser.add_argument("--talker-tokens", type=int, default=40_000)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--sentences", type=int, default=100, help="to evaluate with")
    args = parser.parse_args()
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    np.random.seed(args.seed)
    if not args.weights_only:
        write_settings(args.out)
    corpus = Corpus(args.corpus, args.shards, args.seed, args.processes, args.words)
    if args.codec:
        codec = read_codec(args.codec, device)
    else:
        how = CodecTraining(args.codec_seconds, args.codec_batch, 30, args.codec_shards)
        codec = train_codec(corpus, how, device)
    write_weights(codec.weights(), args.out / "speech_tokenizer" / "model.safetensors")
    torch.save(halved(codec), args.out / "codec.pt")
    tell(began, "codec trained")
    torch.backends.cudnn.benchmark = False
    spoken = encoded(corpus, codec, device)
    tell(
        began,
        f"{len(spoken)} sentences, {sum(len(s.codes) for s in spoken) * HOP / 24000 / 3600:.1f} h",
    )
    training = TalkerTraining(args.talker_seconds, args.talker_tokens, min(10, args.processes), 60)
    talker = train_talker(spoken, training, device, lambda t: write_talker(t, args.out))
    tell(began, "talker trained")
    evaluate(talker, codec, args, device)
    tell(began, "evaluated")


def halved(codec: TrainedCodec) -> dict[str, torch.Tensor]:
    """Its state, in half precision but for the codebooks."""
    state = codec.state_dict()
    return {n: t if "codebooks" in n else t.to(torch.bfloat16) for n, t in state.items()}


def read_codec(path: Path, device: torch.device) -> TrainedCodec:
    """What an earlier run wrote."""
    codec = TrainedCodec().to(device)
    codec.load_state_dict(torch.load(path, map_location=device))
    return codec.eval()


def write_talker(talker: Talker, out: Path) -> None:
    """`model.safetensors`."""
    weights = {f"talker.{name}": each for name, each in talker.state_dict().items()}
    write_weights(weights, out / "model.safetensors")


@torch.no_grad()
def evaluate(
    talker: Talker, codec: TrainedCodec, args: argparse.Namespace, device: torch.device
) -> None:
    """Print word error rates of unseen sentences; write what was heard, and some sound."""
    texts = UNSEEN.read_text().splitlines()[: args.sentences]
    voice, speaker = VOICES[0], Speaker()
    sounds = {"espeak": [whole_frames(speaker.say(text, voice)) for text in texts]}
    codec.settle()
    copies = [codec.codes(torch.from_numpy(s).to(device)[None])[0] for s in sounds["espeak"]]
    sounds["codec"] = [decoded(codec, each) for each in copies]
    prompts = [prompt(text, voice.name) for text in texts]
    for temperature in (0.0, 0.5, 0.9):
        frames = generate(talker, prompts, _MOST_FRAMES, temperature)
        sounds[f"talker {temperature}"] = [decoded(codec, each) for each in frames]
    report = {}
    for name, each in sounds.items():
        rate, heard = word_error_rate(texts, each, args.processes)
        seconds = sum(map(len, each)) / SAMPLE_RATE
        report[name] = {"word_error_rate": rate, "seconds": seconds, "heard": heard}
        print(f"{name}: word error rate {rate:.3f}, {seconds:.0f} s", flush=True)
    pieces = [each[index] for index in range(min(_SAMPLES, len(texts))) for each in sounds.values()]
    write_sound(pieces, args.out / "samples.wav")
    (args.out / "report.json").write_text(json.dumps(report, indent=1))


def decoded(codec: TrainedCodec, frames: torch.Tensor) -> np.ndarray:
    """The sound of int64 [frames, groups]; a second of silence if there are none."""
    if len(frames) == 0:
        return np.zeros(SAMPLE_RATE, np.float32)
    return codec.decoder(frames.T[None])[0].cpu().numpy()


def write_sound(sounds: list[np.ndarray], path: Path) -> None:
    """Some sounds in one file."""
    whole = np.concatenate(sounds)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        file.writeframes((np.clip(whole, -1, 1) * 32767).astype(np.int16).tobytes())


def tell(began: float, what: str) -> None:
    """Say what is done, and when."""
    print(f"[{time.monotonic() - began:.0f} s] {what}", flush=True)


if __name__ == "__main__":
    main()
