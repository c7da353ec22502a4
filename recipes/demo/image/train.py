# SPDX-License-Identifier: Apache-2.0
"""Trains demo-image: first the autoencoder, then text encoder and transformer together.

    python -m recipes.demo.image.train --out weights.safetensors

Without numbers of steps, as many are made as fit the seconds given on the machine at hand; they are
written to `training.json` beside the weights and, passed back in with the same seed, repeat it.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from recipes.demo.image.batched import BatchedForward
from recipes.demo.image.model import PREAMBLE, SHIFT, Parts, caption_tokenizer, untrained
from recipes.demo.image.render import Plans, draw, place, plans_of
from recipes.demo.image.scenes import SceneSource

TOKENS = 24
"""Of the longest caption with preamble, and rounded up to a multiple of 8."""

UNGUIDED = 0.1
"""Share of pictures trained with an empty caption, which guidance needs."""

WARM_UP = 200
PROBE = 30
"""Steps made before the speed is taken, and steps it is taken over."""

Step = Callable[[], dict[str, Tensor]]


@dataclass
class Settings:
    """All that a training depends on."""

    seed: int = 0
    captions: int = 300_000
    autoencoder_batch: int = 256
    autoencoder_rate: float = 2e-3
    autoencoder_seconds: float = 40.0
    autoencoder_steps: int = 0
    batch: int = 768
    rate: float = 1.5e-3
    seconds: float = 200.0
    steps: int = 0
    compiled: bool = True


@dataclass(frozen=True)
class Captions:
    """What training pictures show: their plans, and their captions' tokens [captions, TOKENS]."""

    plans: Plans
    tokens: Tensor

    def take(self, rows: Tensor) -> "Captions":
        return Captions(self.plans.take(rows), self.tokens[rows])


class Pictures:
    """Endless pictures with their captions."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        source = SceneSource(settings.seed + 100)
        scenes = [source.draw() for _ in range(settings.captions)]
        tokenizer = caption_tokenizer()
        texts = [PREAMBLE + scene.caption for scene in scenes]
        ids = tokenizer(texts, padding="max_length", max_length=TOKENS).input_ids
        if max(map(len, ids)) > TOKENS:
            raise ValueError(f"a caption has more than {TOKENS} tokens")
        self.vocabulary = len(tokenizer)
        self.empty = torch.tensor(
            tokenizer("", padding="max_length", max_length=TOKENS).input_ids, device=device
        )
        self._all = Captions(plans_of(scenes).to(device), torch.tensor(ids).to(device))
        self._dice = torch.Generator(device).manual_seed(settings.seed + 200)
        self._draw = torch.compile(draw) if settings.compiled else draw

    def batch(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pictures [rows, 3, SIZE, SIZE], which are whole [rows], and tokens [rows, TOKENS]."""
        tokens = self._all.tokens
        chosen = torch.randint(len(tokens), (rows,), device=tokens.device, generator=self._dice)
        captions = self._all.take(chosen)
        with torch.no_grad():
            centres, radii, whole = place(captions.plans, self._dice)
            pictures = self._draw(captions.plans, centres, radii)
        return pictures, whole, captions.tokens


def run(
    name: str, step: Step, modules: list[nn.Module], rate: float, seconds: float, steps: int
) -> tuple[int, list[dict[str, Tensor]]]:
    """Makes the steps, with the learning rate warmed up and then lowered to nothing.

    Returns how many there were, and for each module the mean of its weights over time.
    """
    weights = [weight for module in modules for weight in module.parameters()]
    optimizer = torch.optim.AdamW(
        weights, lr=rate, betas=(0.9, 0.99), weight_decay=0.01, fused=weights[0].is_cuda
    )
    planned = steps
    schedule = LambdaLR(optimizer, lambda done: _rate_after(done, planned))
    means = [deepcopy(module).requires_grad_(False) for module in modules]
    averaged = [weight for module in means for weight in module.parameters()]
    began = marked = time.monotonic()
    done = 0
    while not planned or done < planned:
        losses = step()
        sum(losses.values()).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done += 1
        schedule.step()
        torch._foreach_lerp_(averaged, weights, 1 - min(0.999, done / (done + 10)))
        if done == PROBE:
            _wait()
            marked = time.monotonic()
        if not planned and done == 2 * PROBE:
            _wait()
            now = time.monotonic()
            planned = done + int((seconds - (now - began)) / ((now - marked) / PROBE))
            print(f"{name}: {planned} steps of {(now - marked) / PROBE * 1000:.1f} ms", flush=True)
        if done % 250 == 0 or done == planned:
            told = ", ".join(f"{key} {value.item():.4f}" for key, value in losses.items())
            print(f"{name} {done}: {told} at {time.monotonic() - began:.0f} s", flush=True)
    return done, [dict(module.state_dict()) for module in means]


def _rate_after(done: int, planned: int) -> float:
    warm = min(1.0, (done + 1) / WARM_UP)
    if not planned:
        return warm
    return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, done / planned)))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def autoencoder_step(vae: AutoencoderKL, pictures: Pictures, rows: int) -> Step:
    """Pictures through the latents and back."""

    def step() -> dict[str, Tensor]:
        batch, _, _ = pictures.batch(rows)
        batch = batch.to(memory_format=torch.channels_last)
        with _half(batch.device):
            latents = vae.encode(batch).latent_dist
            back = vae.decode(latents.sample()).sample.float()
        apart = (back - batch).abs().mean() + (back - batch).square().mean()
        return {"apart": apart, "spread": 1e-4 * latents.kl().mean() / latents.mean[0].numel()}

    return step


def measure(vae: AutoencoderKL, pictures: Pictures) -> tuple[float, float]:
    """The factor and the shift that bring latents to mean 0 and deviation 1."""
    with torch.no_grad():
        latents = torch.cat([vae.encode(pictures.batch(128)[0]).latent_dist.mean for _ in range(4)])
    return 1 / latents.std().item(), latents.mean().item()


def denoiser_step(
    parts: Parts, pictures: Pictures, settings: Settings, scaling: float, shift: float
) -> Step:
    """Flow matching: the velocity from noise to a picture at a random level of noise."""
    forward = BatchedForward(parts.transformer, compiled=settings.compiled)
    device = pictures.empty.device
    dice = torch.Generator(device).manual_seed(settings.seed + 300)

    def step() -> dict[str, Tensor]:
        batch, whole, tokens = pictures.batch(settings.batch)
        rows = len(batch)
        with _half(device):
            with torch.no_grad():
                batch = batch.to(memory_format=torch.channels_last)
                latents = (parts.vae.encode(batch).latent_dist.mean.float() - shift) * scaling
                latents = latents.contiguous()
            noise = torch.randn(latents.shape, device=device, generator=dice)
            level = torch.randn(rows, device=device, generator=dice).sigmoid()
            level = SHIFT * level / (1 + (SHIFT - 1) * level)
            mixed = torch.lerp(latents, noise, level[:, None, None, None])
            empty = torch.rand(rows, 1, device=device, generator=dice) < UNGUIDED
            tokens = torch.where(empty, pictures.empty, tokens)
            mask = tokens != 0
            captions = parts.text_encoder(
                tokens, attention_mask=mask.long(), output_hidden_states=True, use_cache=False
            ).hidden_states[-2]
            velocity = forward(mixed, 1 - level, captions, mask).float()
        apart = (velocity - (latents - noise)).square().mean(dim=(1, 2, 3))
        return {"apart": (apart * whole).sum() / whole.sum()}

    return step


def _half(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def train(settings: Settings, device: torch.device) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The weights, by component and name, and what the training was."""
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    pictures = Pictures(settings, device)
    parts = untrained(pictures.vocabulary)
    for module in parts.named().values():
        module.to(device).train()
    parts.vae.to(memory_format=torch.channels_last)
    done_vae, (vae,) = run(
        "autoencoder",
        autoencoder_step(parts.vae, pictures, settings.autoencoder_batch),
        [parts.vae],
        settings.autoencoder_rate,
        settings.autoencoder_seconds,
        settings.autoencoder_steps,
    )
    parts.vae.load_state_dict(vae)
    parts.vae.requires_grad_(False).eval()
    scaling, shift = measure(parts.vae, pictures)
    done, (text, transformer) = run(
        "denoiser",
        denoiser_step(parts, pictures, settings, scaling, shift),
        [parts.text_encoder, parts.transformer],
        settings.rate,
        settings.seconds,
        settings.steps,
    )
    settings.autoencoder_steps, settings.steps = done_vae, done
    components = {"vae": vae, "text_encoder": text, "transformer": transformer}
    weights = {
        f"{component}.{name}": weight.half().cpu().contiguous()
        for component, state in components.items()
        for name, weight in state.items()
    }
    return weights, {**asdict(settings), "scaling": scaling, "shift": shift}


def _arguments() -> Iterator[tuple[str, type, object]]:
    for name, value in asdict(Settings()).items():
        yield name, type(value), value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, kind, value in _arguments():
        flag = f"--{name.replace('_', '-')}"
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=value)
        else:
            parser.add_argument(flag, type=kind, default=value)
    given = vars(parser.parse_args())
    out, device = given.pop("out"), torch.device(given.pop("device"))
    weights, facts = train(Settings(**given), device)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, out)
    out.with_name("training.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
