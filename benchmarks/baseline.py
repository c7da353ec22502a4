# SPDX-License-Identifier: Apache-2.0
"""The thinnest server around a reference: one request at a time, its own `generate` or `__call__`.

    python benchmarks/baseline.py {diffusers,omni,csm,qwen-tts} MODEL --port PORT

For `compare.py`, which starts it. Nothing but the standard library, torch and the reference itself
is needed, so that it runs in the reference's own environment. It reads of a request what the
benchmark sends, answers in one piece, and lets requests wait for each other in the order in which
they came, as someone would who puts a route around the reference.
"""

import argparse
import base64
import io
import json
import threading
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

Body = dict[str, Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RATE = 24_000
EVENT = "text/event-stream"


def pcm(samples: Any) -> bytes:
    """16-bit samples of floats."""
    wave = torch.as_tensor(samples).detach().float().cpu().reshape(-1)
    return (wave.clamp(-1, 1) * 32767).to(torch.int16).numpy().tobytes()


def events(*made: Body) -> bytes:
    """Server-sent events, all at once."""
    data = "".join(f"data: {json.dumps(each)}\n\n" for each in made)
    return (data + "data: [DONE]\n\n").encode()


def diffusers(model: str, dtype: torch.dtype) -> Callable[[Body], tuple[str, bytes]]:
    """A diffusers pipeline behind `/v1/images/generations`."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(model, torch_dtype=dtype).to(DEVICE)
    pipeline.set_progress_bar_config(disable=True)

    def answer(body: Body) -> tuple[str, bytes]:
        width, height = (int(each) for each in body["size"].split("x"))
        picture = pipeline(
            body["prompt"],
            width=width,
            height=height,
            num_inference_steps=body["num_inference_steps"],
            generator=torch.Generator().manual_seed(body.get("seed", 0)),
        ).images[0]
        file = io.BytesIO()
        picture.save(file, "PNG")
        data = base64.b64encode(file.getvalue()).decode()
        return "application/json", json.dumps({"data": [{"b64_json": data}]}).encode()

    return answer


def omni(model: str, dtype: torch.dtype) -> Callable[[Body], tuple[str, bytes]]:
    """transformers' Qwen3-Omni behind `/v1/chat/completions`, greedy, text and sound."""
    from transformers import AutoProcessor, Qwen3OmniMoeForConditionalGeneration

    made = Qwen3OmniMoeForConditionalGeneration.from_pretrained(model, dtype=dtype)
    made = made.eval().to(DEVICE)
    processor = AutoProcessor.from_pretrained(model)

    def answer(body: Body) -> tuple[str, bytes]:
        prompt = processor.apply_chat_template(
            body["messages"], add_generation_prompt=True, tokenize=False
        )
        inputs = processor(text=prompt, return_tensors="pt").to(DEVICE)
        tokens = body["max_completion_tokens"]
        frames = body["sampling_params_list"][1]["max_tokens"]
        result, wave = made.generate(
            **inputs,
            thinker_max_new_tokens=tokens,
            thinker_eos_token_id=None,
            thinker_do_sample=False,
            talker_max_new_tokens=frames,
            talker_min_new_tokens=frames,
            talker_do_sample=False,
        )
        length = inputs["input_ids"].shape[1]
        ids = result[0, length:]
        sound = pcm(wave)
        metadata = {"sample_rate_hz": RATE, "frame_count": len(sound) // 2}
        audio = {"data": base64.b64encode(sound).decode()}
        return EVENT, events(
            {"choices": [{"delta": {"content": processor.tokenizer.decode(ids)}}]},
            {"choices": [{"delta": {"audio": audio}, "audio_metadata": metadata}]},
            {"choices": [], "usage": {"completion_tokens": len(ids), "prompt_tokens": length}},
        )

    return answer


def csm(model: str, dtype: torch.dtype) -> Callable[[Body], tuple[str, bytes]]:
    """transformers' CSM behind `/v1/audio/speech`, greedy."""
    from transformers import CsmForConditionalGeneration, CsmProcessor

    made = CsmForConditionalGeneration.from_pretrained(model, dtype=dtype).eval().to(DEVICE)
    processor = CsmProcessor.from_pretrained(model)

    def answer(body: Body) -> tuple[str, bytes]:
        said = [{"role": "0", "content": [{"type": "text", "text": body["input"]}]}]
        inputs = processor.apply_chat_template(said, tokenize=True, return_dict=True).to(DEVICE)
        (wave,) = made.generate(
            **inputs,
            do_sample=False,
            depth_decoder_do_sample=False,
            max_new_tokens=body["max_new_tokens"],
            output_audio=True,
        )
        return "audio/pcm", pcm(wave)

    return answer


def qwen_tts(model: str, dtype: torch.dtype) -> Callable[[Body], tuple[str, bytes]]:
    """The authors' package behind `/v1/audio/speech`, greedy; in its own environment."""
    from qwen_tts import Qwen3TTSModel

    made = Qwen3TTSModel.from_pretrained(model, dtype=dtype, device_map=DEVICE)

    def answer(body: Body) -> tuple[str, bytes]:
        waves, rate = made.generate_custom_voice(
            [body["input"]],
            speaker=[body["voice"]],
            do_sample=False,
            subtalker_dosample=False,
            max_new_tokens=body["max_new_tokens"],
        )
        assert rate == RATE
        return "audio/pcm", pcm(waves[0])

    return answer


REFERENCES = {"diffusers": diffusers, "omni": omni, "csm": csm, "qwen-tts": qwen_tts}


def handler(answer: Callable[[Body], tuple[str, bytes]]) -> type[BaseHTTPRequestHandler]:
    """Answers `/health`, and every POST by the reference."""
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(200, "text/plain", b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                with one_at_a_time, torch.inference_mode():
                    kind, data = answer(body)
            except Exception as error:  # whatever the reference has to say against it
                traceback.print_exc()
                self.reply(500, "text/plain", f"{type(error).__name__}: {error}".encode())
            else:
                self.reply(200, kind, data)

        def reply(self, status: int, kind: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Sample-Rate", str(RATE))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


class Server(ThreadingHTTPServer):
    """Lets as many wait as the benchmark sends."""

    request_queue_size = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reference", choices=REFERENCES)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    args = parser.parse_args()
    answer = REFERENCES[args.reference](args.model, getattr(torch, args.dtype))
    Server(("127.0.0.1", args.port), handler(answer)).serve_forever()


if __name__ == "__main__":
    main()
