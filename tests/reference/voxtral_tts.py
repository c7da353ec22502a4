# SPDX-License-Identifier: Apache-2.0
"""Voxtral TTS as it is published, plainly: one request, all of a sequence anew for each frame, no
cache, no batch.

There is no reference to install: the published implementation is part of a server. This follows the
published description of the checkpoint (`params.json`, names and shapes of the weights, Mistral's
reference decoder, the codec of the model card). Prompts are mistral_common's own.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mistral_common.protocol.speech.request import SpeechRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from safetensors.torch import load_file
from torch.nn import functional

from vllm_omni.models.noise import Noise

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Answer:
    """What the reference made.

    Attributes:
        frames: int64 [frames, groups], without special codes and the end.
        sound: float32 [samples].
        ended: It said so, rather than being cut off.
        margin: Least distance of a choice from another one: of logits, and of levels.
    """

    frames: torch.Tensor
    sound: np.ndarray
    ended: bool
    margin: float


def part_of(w: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): t for name, t in w.items() if name.startswith(prefix)}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def swiglu(x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    gate = functional.silu(x @ w[f"{name}.w1.weight"].T)
    return (gate * (x @ w[f"{name}.w3.weight"].T)) @ w[f"{name}.w2.weight"].T


def heads(x: torch.Tensor, head_dim: int, repeat: int = 1) -> torch.Tensor:
    """[n, heads * d] -> [heads * repeat, n, d]."""
    return x.view(len(x), -1, head_dim).transpose(0, 1).repeat_interleave(repeat, dim=0)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any = 0.0) -> torch.Tensor:
    """[heads, n, d] -> [n, heads * d]."""
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + bias
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Neighbouring numbers of a head are a complex one, [heads, n, d]."""
    n, d = x.shape[1:]
    angles = torch.outer(torch.arange(n), theta ** (-torch.arange(0, d, 2) / d))
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(-2)


class PlainVoxtral:
    """A checkpoint."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.p = json.loads((model / "params.json").read_text())
        self.codes = self.p["multimodal"]["audio_model_args"]
        self.flow = self.codes["acoustic_transformer_args"]
        self.codec = self.p["multimodal"]["audio_tokenizer_args"]
        self.w = load_file(model / "consolidated.safetensors")
        self.tokenizer = MistralTokenizer.from_file(model / "tekken.json")

    # The prompt.

    def prompt(self, text: str, voice: str | None, recording: np.ndarray | None) -> torch.Tensor:
        """[n, dim]."""
        asked = SpeechRequest(input=text, voice=voice or next(iter(self.codec["voice"])))
        ids = self.tokenizer.encode_speech_request(asked).tokens
        first, last = ids.index(24), len(ids) - ids[::-1].index(24)
        if recording is None:
            heard = torch.load(self.model / "voice_embedding" / f"{voice}.pt").float()
            assert len(heard) == last - first
        else:
            frames = self.encode(torch.from_numpy(recording)) + 2
            end = torch.tensor([[1] + [0] * (frames.shape[1] - 1)])
            heard = torch.stack([self.frame(frame) for frame in torch.cat([frames, end])])
        table = self.w["mm_audio_embeddings.tok_embeddings.weight"]
        return torch.cat([table[ids[:first]], heard, table[ids[last:]]])

    def frame(self, codes: torch.Tensor) -> torch.Tensor:
        """What a frame is fed as, special codes counted: [groups] -> [dim]."""
        table = self.w["mm_audio_embeddings.audio_codebook_embeddings.embeddings.weight"]
        semantic = self.codes["semantic_codebook_size"] + 2
        acoustic = self.codes["acoustic_codebook_size"] + 2
        starts = [0, *(semantic + acoustic * i for i in range(len(codes) - 1))]
        return sum(table[start + code] for start, code in zip(starts, codes, strict=True))

    # The backbone.

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Of the last position, [n, dim] -> [dim]."""
        p, w = self.p, self.w
        repeat = p["n_heads"] // p["n_kv_heads"]
        causal = torch.full((len(x), len(x)), -math.inf).triu(1)
        for i in range(p["n_layers"]):
            name = f"layers.{i}"
            h = rms_norm(x, w[f"{name}.attention_norm.weight"], p["norm_eps"])
            q, k, v = (h @ w[f"{name}.attention.{part}.weight"].T for part in ("wq", "wk", "wv"))
            q = rotated(heads(q, p["head_dim"]), p["rope_theta"])
            k = rotated(heads(k, p["head_dim"]), p["rope_theta"]).repeat_interleave(repeat, 0)
            mixed = attend(q, k, heads(v, p["head_dim"], repeat), causal)
            x = x + mixed @ w[f"{name}.attention.wo.weight"].T
            h = rms_norm(x, w[f"{name}.ffn_norm.weight"], p["norm_eps"])
            x = x + swiglu(h, w, f"{name}.feed_forward")
        return rms_norm(x[-1], w["norm.weight"], p["norm_eps"])

    # The flow.

    def velocity(self, x: torch.Tensor, t: float, hidden: torch.Tensor) -> torch.Tensor:
        """[groups - 1], [], [dim] -> [groups - 1]."""
        a = part_of(self.w, "acoustic_transformer.")
        f = self.flow
        eps, half = f.get("norm_eps", 1e-5), f["dim"] // 2
        angles = t * torch.exp(-math.log(10000.0) * torch.arange(half) / half)
        time = torch.cat([angles.cos(), angles.sin()])
        h = torch.stack(
            [
                a["input_projection.weight"] @ x,
                a["time_projection.weight"] @ time,
                a["llm_projection.weight"] @ hidden,
            ]
        )
        repeat = f["n_heads"] // f["n_kv_heads"]
        for i in range(f["n_layers"]):
            n = rms_norm(h, a[f"layers.{i}.attention_norm.weight"], eps)
            q, k, v = (
                heads(n @ a[f"layers.{i}.attention.{part}.weight"].T, f["head_dim"], times)
                for part, times in (("wq", 1), ("wk", repeat), ("wv", repeat))
            )
            h = h + attend(q, k, v) @ a[f"layers.{i}.attention.wo.weight"].T
            n = rms_norm(h, a[f"layers.{i}.ffn_norm.weight"], eps)
            h = h + swiglu(n, a, f"layers.{i}.feed_forward")
        return a["acoustic_codebook_output.weight"] @ rms_norm(h[0], a["norm.weight"], eps)

    def levels(self, hidden: torch.Tensor, noise: torch.Tensor, alpha: float) -> torch.Tensor:
        """Before they are rounded, float32 [groups - 1]."""
        steps = self.flow.get("n_decoding_steps") or 7
        x = noise
        for i in range(steps):
            free = self.velocity(x, i / steps, torch.zeros_like(hidden))
            x = x + (alpha * self.velocity(x, i / steps, hidden) + (1 - alpha) * free) / steps
        return (x.clamp(-1, 1) + 1) / 2 * (self.codes["acoustic_codebook_size"] - 1)

    # The codec.

    def conv(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Its weight, a length for each of the first dimension and a direction."""
        length, direction = (
            self.w[f"audio_tokenizer.{name}.conv.parametrizations.weight.original{i}"]
            for i in (0, 1)
        )
        return length * direction / direction.flatten(1).norm(dim=1)[:, None, None]

    def transformer(self, x: torch.Tensor, name: str, layers: int, window: int) -> torch.Tensor:
        """[n, dim] -> [n, dim]."""
        c, count = self.codec, len(x)
        w = part_of(self.w, f"audio_tokenizer.{name}.")
        power = 2 ** math.floor(math.log2(c["n_heads"]))
        slopes = [2 ** (-8 / power * i) for i in range(power)]
        slopes += [2 ** (-8 / (2 * power) * i) for i in range(0, 2 * power, 2)]
        distance = torch.arange(count) - torch.arange(count)[:, None]
        bias = torch.tensor(slopes[: c["n_heads"]])[:, None, None] * distance
        bias = bias.masked_fill((distance > 0) | (distance < -window), -math.inf)
        for i in range(layers):
            n = rms_norm(x, w[f"layers.{i}.attention_norm.weight"], c["norm_eps"])
            q, k, v = (
                n @ w[f"layers.{i}.attention.{part}.weight"].T for part in ("wq", "wk", "wv")
            )
            q = rms_norm(q, w[f"layers.{i}.attention.q_norm.weight"], c["qk_norm_eps"])
            k = rms_norm(k, w[f"layers.{i}.attention.k_norm.weight"], c["qk_norm_eps"])
            mixed = attend(*(heads(part, c["head_dim"]) for part in (q, k, v)), bias)
            mixed = mixed @ w[f"layers.{i}.attention.wo.weight"].T
            x = x + w[f"layers.{i}.attention_scale"] * mixed
            n = rms_norm(x, w[f"layers.{i}.ffn_norm.weight"], c["norm_eps"])
            x = x + w[f"layers.{i}.ffn_scale"] * swiglu(n, w, f"layers.{i}.feed_forward")
        return x

    def entries(self) -> torch.Tensor:
        book = "audio_tokenizer.quantizer.semantic_codebook."
        return self.w[f"{book}embedding_sum"] / self.w[f"{book}cluster_usage"][:, None]

    def decode(self, frames: torch.Tensor) -> torch.Tensor:
        """int64 [frames, groups] -> [samples], in one go."""
        c = self.codec
        top = c["acoustic_codebook_size"] - 1
        x = torch.cat([self.entries()[frames[:, 0]], frames[:, 1:] / top * 2 - 1], dim=1).T[None]
        kernels, strides, lengths = (
            [int(n) for n in c[f"decoder_{part}_str"].split(",")]
            for part in ("convs_kernels", "convs_strides", "transformer_lengths")
        )
        window = c["attn_sliding_window_size"] // math.prod(strides)
        block = 0
        for i, length in enumerate(lengths):
            weight = self.conv(x, f"decoder_blocks.{block}")
            if i == 0:
                x = functional.conv1d(functional.pad(x, (kernels[0] - 1, 0), "replicate"), weight)
            else:
                x = functional.conv_transpose1d(x, weight, stride=strides[i])
                x = x[..., : x.shape[-1] - (kernels[i] - strides[i])]
                window *= strides[i]
            x = self.transformer(x[0].T, f"decoder_blocks.{block + 1}", length, window).T[None]
            block += 2
        padded = functional.pad(x, (c["patch_proj_kernel_size"] - 1, 0), "reflect")
        return functional.conv1d(padded, self.conv(x, "output_proj"))[0].T.flatten()

    def encode(self, samples: torch.Tensor) -> torch.Tensor:
        """float32 [samples] -> int64 [frames, groups]."""
        c = self.codec
        size = c["pretransform_patch_size"]
        patches = functional.pad(samples, (0, -len(samples) % size)).view(-1, size)
        kernel = c["patch_proj_kernel_size"]
        x = functional.pad(patches.T[None], (kernel - 1, 0), "reflect")
        x = functional.conv1d(x, self.conv(x, "input_proj"))
        kernels, strides, lengths = (
            [int(n) for n in c[f"encoder_{part}_str"].split(",")]
            for part in ("convs_kernels", "convs_strides", "transformer_lengths")
        )
        window = c["attn_sliding_window_size"]
        for i, length in enumerate(lengths):
            x = self.transformer(x[0].T, f"encoder_blocks.{2 * i}", length, window).T[None]
            after = -x.shape[-1] % strides[i]
            x = functional.pad(x, (kernels[i] - strides[i], after), "replicate")
            x = functional.conv1d(x, self.conv(x, f"encoder_blocks.{2 * i + 1}"), stride=strides[i])
            window //= strides[i]
        latents = x[0].T
        semantic, acoustic = latents.split([c["semantic_dim"], c["acoustic_dim"]], dim=1)
        nearest = (semantic[:, None] - self.entries()).square().sum(-1).argmin(-1)
        levels = (acoustic.tanh() + 1) / 2 * (c["acoustic_codebook_size"] - 1)
        return torch.cat([nearest[:, None], levels.round().long()], dim=1)

    # All of it.

    @torch.inference_mode()
    def say(
        self,
        text: str,
        *,
        voice: str | None = None,
        recording: np.ndarray | None = None,
        seed: int,
        max_frames: int,
        alpha: float = 1.2,
    ) -> Answer:
        """Speech whose first codes are the likeliest ones; the noise is the seed's."""
        x = self.prompt(text, voice, recording)
        head = self.w["acoustic_transformer.semantic_codebook_output.weight"]
        frames, ended, margin = [], False, math.inf
        while len(frames) < max_frames and not ended:
            hidden = self.hidden(x)
            logits = (head @ hidden)[1 : self.codes["semantic_codebook_size"] + 2]
            best, next_best = logits.topk(2).values
            first = int(logits.argmax()) + 1
            noise = Noise(torch.tensor([seed]), torch.tensor([len(x)]))
            ended = first == 1
            margin = min(margin, float(best - next_best))
            if not ended:
                start = noise.normal(self.codes["n_acoustic_codebook"])[0]
                levels = self.levels(hidden, start, alpha)
                margin = min(margin, float((0.5 - (levels - levels.round()).abs()).min()))
                frames.append(torch.tensor([first - 2, *levels.round().long()]))
                x = torch.cat([x, self.frame(frames[-1] + 2)[None]])
        made = torch.stack(frames) if frames else torch.zeros(0, 1, dtype=torch.int64)
        sound = self.decode(made).numpy() if frames else np.zeros(0, np.float32)
        return Answer(made, sound, ended, margin)
