# SPDX-License-Identifier: Apache-2.0
"""Codec decoders as programs equal transformers' one-shot decode, streamed and batched."""

from functools import partial

import pytest
import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
    Qwen2_5OmniBigVGANConfig,
    Qwen2_5OmniDiTConfig,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniToken2WavDiTModel,
    Qwen2_5OmniToken2WavModel,
)
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from tests.diffusion.codecs import (
    CODEBOOK,
    GROUPS,
    collect,
    cut,
    make_code2wav,
    make_token2wav,
    make_voices,
    random_codes,
    run_streams,
)
from tests.diffusion.schedulers import unhurried
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs import qwen2_5_omni, qwen3_omni
from vllm_omni.diffusion.programs.code2wav import qwen2_5_omni as QWEN2_5
from vllm_omni.diffusion.programs.code2wav import qwen3_omni as QWEN3
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.diffusion.weights import checkpoint_config, load_module, read_tensors
from vllm_omni.errors import OmniConfigError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.inputs import Window
from vllm_omni.testing import tiny

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

assert_equal = partial(torch.testing.assert_close, rtol=0, atol=2e-4)
"""Equal but for rounding, which the random activations amplify. The waveforms' RMS is 0.15; two
frames of context too few cost 5e-4 and more."""


@pytest.fixture(scope="module")
def code2wav() -> Qwen3OmniMoeCode2Wav:
    return make_code2wav()


@pytest.fixture(scope="module")
def code2wav64() -> Qwen3OmniMoeCode2Wav:
    return make_code2wav().double()


@pytest.fixture(scope="module")
def token2wav() -> Qwen2_5OmniToken2WavModel:
    return make_token2wav()


def one_shot(model: Qwen3OmniMoeCode2Wav, codes: torch.Tensor) -> torch.Tensor:
    return model(codes.T[None].long())[0, 0].float()


# Qwen3-Omni.


def test_receptive_field_of_the_released_checkpoint() -> None:
    config = Qwen3OmniMoeCode2WavConfig()
    assert qwen3_omni.samples_per_frame(config) == 1920
    assert qwen3_omni.trimmed_samples(config) == 555
    assert qwen3_omni.convolution_context(config) == 10
    assert qwen3_omni.attention_context(config) == 568


@pytest.mark.parametrize("frames", [1, 2, 11])
def test_receptive_field_is_what_samples_depend_on(
    code2wav64: Qwen3OmniMoeCode2Wav, frames: int
) -> None:
    """Changing a frame changes nothing before it, and nothing beyond its context."""
    config = code2wav64.config
    decoder = qwen3_omni.FrameDecoder(code2wav64)
    context = qwen3_omni.convolution_context(config)
    generator = torch.Generator().manual_seed(frames)
    hidden = torch.randn(1, 40, 16, generator=generator, dtype=torch.float64)
    changed = hidden.clone()
    changed[:, 20] += 1
    differs = (decoder(hidden) != decoder(changed))[0].nonzero()[:, 0]
    first, last = int(differs.min()), int(differs.max())
    # A transposed convolution looks one of its input frames ahead: one codec frame in all.
    assert 19 * 1920 <= first < 20 * 1920 <= last < (20 + context + 1) * 1920


def test_padding_changes_nothing(code2wav: Qwen3OmniMoeCode2Wav) -> None:
    """The components ignore what comes after the samples that are kept."""
    config = code2wav.config
    encoder, decoder = qwen3_omni.FrameEncoder(code2wav), qwen3_omni.FrameDecoder(code2wav)
    codes = random_codes(60, GROUPS, 0).T[None].long()
    short = encoder(codes[..., :23])
    torch.testing.assert_close(encoder(codes)[:, :23], short, atol=1e-5, rtol=0)
    hidden = torch.nn.functional.pad(short, (0, 0, 0, 40), value=3.0)
    kept = 23 * 1920 - qwen3_omni.trimmed_samples(config)
    assert decoder(short).shape == (1, kept)
    torch.testing.assert_close(decoder(hidden)[:, :kept], decoder(short), atol=1e-5, rtol=0)


POLICIES = {
    "usual": ChunkPolicy(4, 25, 25),
    "no context": ChunkPolicy(1, 10),
    "holdback": ChunkPolicy(3, 12, 8, 5),
    "one shot": ChunkPolicy.one_shot(),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_qwen3_streams_equal_the_one_shot(
    code2wav: Qwen3OmniMoeCode2Wav, policy: ChunkPolicy
) -> None:
    engine = Engine(QWEN3, qwen3_omni.components(code2wav))
    codes = {f"r{n}": random_codes(n, GROUPS, n) for n in (1, 5, 40, 47)}
    streams = {name: cut(rows, policy, 3) for name, rows in codes.items()}
    made = run_streams(engine, streams)
    for name, rows in codes.items():
        assert_equal(made[name], one_shot(code2wav, rows))
    if policy is not POLICIES["one shot"]:
        assert max(engine.forward_sizes) > 1


@pytest.mark.parametrize("context", ["attention_context", "convolution_context"])
def test_qwen3_needs_its_context(
    code2wav: Qwen3OmniMoeCode2Wav, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tolerance is no excuse: with two frames of context fewer, the streams differ."""
    exact = vars(qwen3_omni)[context](code2wav.config)
    monkeypatch.setattr(qwen3_omni, context, lambda config: exact - 2)
    engine = Engine(QWEN3, qwen3_omni.components(code2wav))
    codes = random_codes(40, GROUPS, 1)
    made = run_streams(engine, {"r": cut(codes, POLICIES["usual"], 3)})["r"]
    assert (made - one_shot(code2wav, codes)).abs().max() > 5e-4


def test_qwen3_batches_different_lengths(code2wav: Qwen3OmniMoeCode2Wav) -> None:
    engine = Engine(QWEN3, qwen3_omni.components(code2wav))
    codes = {f"r{n}": random_codes(n, GROUPS, n) for n in (40, 43, 50)}
    streams = {name: cut(rows, ChunkPolicy.one_shot(), 100) for name, rows in codes.items()}
    made = run_streams(engine, streams)
    assert engine.forward_sizes == {3: 2}
    for name, rows in codes.items():
        assert_equal(made[name], one_shot(code2wav, rows))


def test_qwen3_final_message_without_windows(code2wav: Qwen3OmniMoeCode2Wav) -> None:
    engine = Engine(QWEN3, qwen3_omni.components(code2wav))
    codes = random_codes(6, GROUPS, 0)
    # The last row is the end code's, which is in no window.
    rows = torch.cat((codes, torch.full((1, GROUPS), 10**6, dtype=torch.int32)))
    windows = (Window(0, 6, 0, 6, False),)
    engine.add("r", Message(tensors={"codes": rows}, windows=windows))
    engine.receive("r", Message(final=True))
    pieces: dict[str, list[torch.Tensor]] = {"r": []}
    ended: set[str] = set()
    while engine.has_work:
        collect(engine.step(), pieces, ended)
    assert_equal(torch.cat(pieces["r"]), one_shot(code2wav, codes))
    assert ended == {"r"}


@pytest.mark.parametrize("bad", [-1, CODEBOOK])
def test_invalid_codes_fail_their_request_only(code2wav: Qwen3OmniMoeCode2Wav, bad: int) -> None:
    engine = Engine(QWEN3, qwen3_omni.components(code2wav))
    codes = random_codes(6, GROUPS, 0)
    for name, rows in {"good": codes, "bad": codes.clone()}.items():
        if name == "bad":
            rows[3, 1] = bad
        engine.add(name, cut(rows, ChunkPolicy.one_shot(), 10)[0])
    ends = {}
    while engine.has_work:
        ends.update({emission.request_id: emission for emission in engine.step()})
    assert ends["good"].error is None
    assert ends["bad"].error is not None
    assert ends["bad"].error.message == "code2wav failed: ValueError"


# Qwen2.5-Omni.


def reference(
    model: Qwen2_5OmniToken2WavModel, codes: torch.Tensor, seed: int, voice: str, steps: int = 10
) -> torch.Tensor:
    speaker = make_voices()[voice]
    torch.manual_seed(seed)
    return model(
        codes.T.long(), speaker.conditioning, speaker.reference_mel, num_steps=steps
    ).float()


def test_contexts_of_the_released_checkpoint() -> None:
    assert qwen2_5_omni.block_codes(Qwen2_5OmniDiTConfig()) == 12
    assert qwen2_5_omni.sampler_context(Qwen2_5OmniDiTConfig()) == (864, 432)
    assert qwen2_5_omni.vocoder_context(Qwen2_5OmniBigVGANConfig()) == 37


def test_vocoder_context_is_what_samples_depend_on(token2wav: Qwen2_5OmniToken2WavModel) -> None:
    vocoder = qwen2_5_omni.Vocoder(make_token2wav().code2wav_bigvgan_model.double())
    context = qwen2_5_omni.vocoder_context(token2wav.config.bigvgan_config)
    mel = torch.randn(1, 80, 120, dtype=torch.float64)
    changed = mel.clone()
    changed[..., 60] += 1
    differs = ((vocoder(mel) - vocoder(changed)).abs() > 1e-12)[0].nonzero()[:, 0] // 240
    assert 60 - context <= int(differs.min()) < 60 < int(differs.max()) <= 60 + context


def test_noise_is_a_prefix_of_longer_noise() -> None:
    """What the sampler's noise by absolute position relies on."""
    whole = torch.randn(1, 1000, 80, generator=torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(1, n, 80, generator=generator) for n in (2, 24, 374, 600)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_qwen2_5_one_shot_equals_transformers(token2wav: Qwen2_5OmniToken2WavModel) -> None:
    """Batched at every step of the sampler, with different seeds and voices."""
    components = qwen2_5_omni.components(token2wav, make_voices())
    engine = Engine(QWEN2_5, components, scheduler=unhurried())
    requests = {
        "a": (random_codes(24, 1, 1), 3, "Chelsie"),
        "b": (random_codes(24, 1, 2), 7, "ETHAN"),
        "c": (random_codes(24, 1, 3), 7, "ethan"),
        "d": (random_codes(10, 1, 4), 0, "chelsie"),
    }
    streams = {
        name: cut(codes, ChunkPolicy.one_shot(), 9, {"seed": seed, "voice": voice})
        for name, (codes, seed, voice) in requests.items()
    }
    made = run_streams(engine, streams)
    for name, (codes, seed, voice) in requests.items():
        torch.testing.assert_close(
            made[name], reference(token2wav, codes, seed, voice.lower()), atol=1e-5, rtol=0
        )
    assert engine.forward_sizes[3] == 37  # 36 model calls and one vocoder call


# With 2 time points the sampler calls the model 4 times: 4 blocks of 4 codes on either side.
STEPS = 2
CONTEXT = 16


def stream_qwen2_5(
    model: Qwen2_5OmniToken2WavModel, policy: ChunkPolicy
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(made, expected) of three streams."""
    engine = Engine(QWEN2_5, qwen2_5_omni.components(model, make_voices()))
    codes = {seed: random_codes(frames, 1, seed) for seed, frames in enumerate((57, 70, 31))}
    streams = {
        str(seed): cut(rows, policy, 7, {"seed": seed, "num_steps": STEPS})
        for seed, rows in codes.items()
    }
    made = run_streams(engine, streams)
    assert max(engine.forward_sizes) > 1
    return [
        (made[str(seed)], reference(model, rows, seed, "chelsie", STEPS))
        for seed, rows in codes.items()
    ]


def test_qwen2_5_streams_equal_the_one_shot(token2wav: Qwen2_5OmniToken2WavModel) -> None:
    assert qwen2_5_omni.sampler_context(token2wav.config.dit_config, STEPS) == (CONTEXT, CONTEXT)
    for made, expected in stream_qwen2_5(token2wav, ChunkPolicy(8, 24, CONTEXT, CONTEXT, align=4)):
        torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)


def test_qwen2_5_streams_with_less_context_are_close_and_of_full_length(
    token2wav: Qwen2_5OmniToken2WavModel,
) -> None:
    for made, expected in stream_qwen2_5(token2wav, ChunkPolicy(5, 18, 4, 4, align=4)):
        assert made.shape == expected.shape
        torch.testing.assert_close(made, expected, atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    "options", [{"voice": "nobody"}, {"voice": 3}, {"num_steps": 1}, {"seed": -1}, {"seed": "x"}]
)
def test_bad_options_are_the_clients_fault(
    token2wav: Qwen2_5OmniToken2WavModel, options: dict[str, object]
) -> None:
    engine = Engine(QWEN2_5, qwen2_5_omni.components(token2wav, make_voices()))
    engine.add("r", cut(random_codes(4, 1, 0), ChunkPolicy.one_shot(), 4, options)[0])
    (end,) = engine.step()
    assert end.finished and end.error is not None
    assert end.error.status_code == 400
    assert next(iter(options)) in end.error.message


# Checkpoints.


@pytest.fixture(scope="module")
def qwen2_5_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("qwen2_5_omni", tmp_path_factory.mktemp("tiny") / "qwen2_5"))


def test_qwen2_5_checkpoint_decodes_as_transformers_does(qwen2_5_checkpoint: str) -> None:
    loaded = qwen2_5_omni.load(LoadContext(qwen2_5_checkpoint, torch.device("cpu"), torch.bfloat16))
    whole = Qwen2_5OmniForConditionalGeneration.from_pretrained(qwen2_5_checkpoint)
    codes = random_codes(15, 1, 0)
    voice = list(whole.speaker_map)[-1]
    engine = Engine(QWEN2_5, loaded)
    made = run_streams(
        engine, {"r": cut(codes, ChunkPolicy.one_shot(), 15, {"voice": voice.upper(), "seed": 4})}
    )
    speaker = whole.speaker_map[voice]
    torch.manual_seed(4)
    with torch.inference_mode():
        expected = whole.token2wav(
            codes.T.long(), conditioning=speaker["cond"], reference_mel=speaker["ref_mel"]
        )
    torch.testing.assert_close(made["r"], expected, atol=1e-5, rtol=0)


def test_missing_weights_are_a_configuration_error(qwen2_5_checkpoint: str) -> None:
    context = LoadContext(qwen2_5_checkpoint, torch.device("cpu"))
    with pytest.raises(OmniConfigError, match=r"no weights code2wav\."):
        read_tensors(context, "code2wav.")
    config = Qwen2_5OmniDiTConfig(num_hidden_layers=1)
    prefix = "token2wav.code2wav_dit_model."
    with pytest.raises(OmniConfigError, match=prefix):
        load_module(context, Qwen2_5OmniToken2WavDiTModel, config, prefix, None)


def test_random_weights_need_no_files(qwen2_5_checkpoint: str) -> None:
    context = LoadContext(qwen2_5_checkpoint, torch.device("cpu"), random_weights=True)
    config = checkpoint_config(context).token2wav_config
    model = load_module(context, Qwen2_5OmniToken2WavModel, config, "no.such.", torch.float32)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
