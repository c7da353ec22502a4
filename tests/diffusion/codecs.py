# SPDX-License-Identifier: Apache-2.0
"""Small random codec decoders, and running their programs over a cut stream."""

from collections.abc import Callable, Iterable

import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from vllm_omni.diffusion.engine import Emission, Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.framing import ChunkPolicy, Windower
from vllm_omni.pipelines.speakers import Speaker

GROUPS = 4
CODEBOOK = 32


def make_code2wav(**changes: object) -> Qwen3OmniMoeCode2Wav:
    """A Qwen3-Omni decoder with the real strides and noticeable dependence on its context."""
    torch.manual_seed(0)
    fields = {
        "codebook_size": CODEBOOK,
        "num_quantizers": GROUPS,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "sliding_window": 6,
        "decoder_dim": 16,
        "layer_scale_initial_scale": 0.5,
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    config = Qwen3OmniMoeCode2WavConfig(**{**fields, **changes})
    model = Qwen3OmniMoeCode2Wav(config).eval().requires_grad_(False)
    with torch.no_grad():
        # At their initial values the ConvNeXt blocks pass their input on.
        for name, parameter in model.named_parameters():
            if name.endswith("gamma"):
                parameter.fill_(0.5)
    set_level(model.decoder[-1].conv, lambda: model(random_codes(8, GROUPS, 0).T[None].long()))
    return model


def make_token2wav(**dit_changes: object) -> Qwen2_5OmniToken2WavModel:
    """A Qwen2.5-Omni decoder with the real rates, small blocks and one layer of each kind."""
    torch.manual_seed(0)
    dit = {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "emb_dim": 8,
        "head_dim": 8,
        "block_size": 8,
        "look_ahead_layers": [1],
        "look_backward_layers": [0],
        "num_embeds": CODEBOOK,
        "mel_dim": 80,
        "enc_emb_dim": 8,
        "enc_dim": 8,
        "enc_channels": [8, 8, 8, 8, 24],
        "enc_attention_channels": 8,
        "enc_se_channels": 8,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    bigvgan = {"mel_dim": 80, "upsample_initial_channel": 64, "initializer_range": 0.2}
    config = Qwen2_5OmniToken2WavConfig(
        dit_config={**dit, **dit_changes}, bigvgan_config=bigvgan, attn_implementation="sdpa"
    )
    model = Qwen2_5OmniToken2WavModel(config).eval().requires_grad_(False)
    mel = torch.randn(1, 80, 40)
    set_level(model.code2wav_bigvgan_model.conv_post, lambda: model.code2wav_bigvgan_model(mel))
    return model


def set_level(conv: torch.nn.Conv1d, run: Callable[[], torch.Tensor]) -> None:
    """Scale the last convolution so that its output has an RMS of 0.15 and is hardly clipped."""
    levels = []
    hook = conv.register_forward_hook(lambda _, __, output: levels.append(output.std()))
    run()
    hook.remove()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.mul_(0.15 / levels[0])


def make_voices() -> dict[str, Speaker]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: Speaker(
            0, torch.randn(1, 8, generator=generator), torch.randn(1, 20, 80, generator=generator)
        )
        for name in ("chelsie", "ethan")
    }


def random_codes(frames: int, groups: int, seed: int, codebook: int = CODEBOOK) -> torch.Tensor:
    """int32 [frames, groups]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(codebook, (frames, groups), generator=generator, dtype=torch.int32)


def cut(
    codes: torch.Tensor, policy: ChunkPolicy, arrival: int, options: dict[str, object] | None = None
) -> list[Message]:
    """The messages of a stream of which `arrival` frames come at a time."""
    windower = Windower(policy)
    messages = []
    for start in range(0, len(codes), arrival):
        rows = codes[start : start + arrival]
        final = start + arrival >= len(codes)
        messages.append(
            Message(
                options=(options or {}) if not messages else {},
                tensors={"codes": rows},
                start=start,
                windows=tuple(windower.push(len(rows), final)),
                final=final,
            )
        )
    return messages


def run_streams(engine: Engine, streams: dict[str, list[Message]]) -> dict[str, torch.Tensor]:
    """Feed each request a message per step; the joined audio of each."""
    feeds = {name: iter(messages) for name, messages in streams.items()}
    for name, feed in feeds.items():
        engine.add(name, next(feed))
    pieces: dict[str, list[torch.Tensor]] = {name: [] for name in streams}
    ended: set[str] = set()
    while engine.has_work or len(engine):
        for name, feed in feeds.items():
            if (message := next(feed, None)) is not None:
                engine.receive(name, message)
        collect(engine.step(), pieces, ended)
    assert ended == set(streams)
    return {name: torch.cat(parts) for name, parts in pieces.items()}


def collect(
    emissions: Iterable[Emission], pieces: dict[str, list[torch.Tensor]], ended: set[str]
) -> None:
    for emission in emissions:
        assert emission.error is None, emission.error
        assert emission.request_id not in ended
        if emission.tensors is not None:
            assert emission.meta["sample_rate"] == 24000
            pieces[emission.request_id].append(emission.tensors["audio"])
        if emission.finished:
            ended.add(emission.request_id)


def encode(engine: Engine, requests: dict[str, dict[str, torch.Tensor]]) -> dict[str, Emission]:
    """The only emission of each request to encode recordings."""
    for name, tensors in requests.items():
        engine.add(name, Message(options={"encode": True}, tensors=tensors, final=True))
    made: dict[str, Emission] = {}
    while engine.has_work:
        for emission in engine.step():
            assert emission.request_id not in made and emission.finished
            made[emission.request_id] = emission
    return made
