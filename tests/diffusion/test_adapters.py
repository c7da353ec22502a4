# SPDX-License-Identifier: Apache-2.0
"""LoRA per request: requests with different adapters run at a time and none sees another's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import save_file

from tests.conftest import CHECKPOINTS
from tests.diffusion.parity import MIXED, Ask, counted
from vllm_omni.config.build import build_plan
from vllm_omni.diffusion.engine import Emission, Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs.diffusers import image as image_program
from vllm_omni.diffusion.programs.diffusers.results import tensors_of
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.entrypoints.requests import RequestFactory
from vllm_omni.errors import OmniClientError, OmniConfigError
from vllm_omni.generation import GenerationRequest, OmniDiffusionSamplingParams, checked_params
from vllm_omni.outputs import ErrorInfo
from vllm_omni.testing.diffusers_tiny import build, recipe

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

BOUND = 1e-4
EXAMPLE = recipe("flux").examples[0]
NONE: Mapping[str, object] | None = None
A, B = {"name": "a"}, {"name": "b"}
A_STRONGER = {"name": "a", "scale": 2.5}
WIDTH = 32
"""Of the tiny transformer and of its text encoders."""


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return build("flux", CHECKPOINTS / "diffusers" / "flux")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two adapters, of the transformer and of a text encoder too, and one of another model."""
    folder = tmp_path_factory.mktemp("adapters")
    attention = "transformer.transformer_blocks.0.attn"
    encoder = "text_encoder.text_model.encoder.layers.0.self_attn"
    layers = {
        "a": (f"{attention}.to_q", f"{attention}.to_out.0"),
        "b": (f"{attention}.to_k", f"{encoder}.q_proj"),
        "other": ("transformer.other_blocks.7.attention.query",),
    }
    paths = {}
    for number, (name, changed) in enumerate(layers.items()):
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for layer in changed:
            for part, shape in (("lora_A", (4, WIDTH)), ("lora_B", (WIDTH, 4))):
                tensors[f"{layer}.{part}.weight"] = 0.5 * torch.randn(shape, generator=generator)
        paths[name] = str(folder / f"{name}.safetensors")
        save_file(tensors, paths[name])
    return paths


@pytest.fixture(scope="module")
def load(checkpoint: Path, files: dict[str, str]) -> Callable[..., Loaded]:
    def loader(**settings: object) -> Loaded:
        context = LoadContext(str(checkpoint), torch.device("cpu"), lora_modules=files)
        return image_program.load(replace(context, **settings))

    return loader


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path, files: dict[str, str]) -> FluxPipeline:
    """The stock one, with both adapters."""
    pipeline = FluxPipeline.from_pretrained(checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    for name in ("a", "b"):
        pipeline.load_lora_weights(files[name], adapter_name=name)
    return pipeline


@pytest.fixture(scope="module")
def expected(pipeline: FluxPipeline) -> Callable[..., torch.Tensor]:
    """What the stock pipeline makes with an adapter."""

    def make(ask: Ask, lora: Mapping[str, object] | None) -> torch.Tensor:
        if lora is None:
            pipeline.disable_lora()
        else:
            pipeline.enable_lora()
            pipeline.set_adapters([lora["name"]], [lora.get("scale", 1.0)])
        generator = torch.Generator().manual_seed(ask.seed)
        made = pipeline(**ask.arguments(EXAMPLE), generator=generator, output_type="pt")
        return tensors_of(made, "pt")["image"]

    return make


def message(ask: Ask, lora: Mapping[str, object] | None) -> Message:
    params = ask.arguments(EXAMPLE)
    prompt = params.pop("prompt")
    params.pop("negative_prompt", None)
    params |= {"seed": ask.seed, "output_type": "pt", **({"lora": lora} if lora else {})}
    request = GenerationRequest(prompt=prompt, params=checked_params(params, ""))
    return Message({**msgspec.to_builtins(request), "seed": ask.seed})


def served(
    loaded: Loaded, requests: Sequence[tuple[Ask, Mapping[str, object] | None]]
) -> list[Emission]:
    """What the engine makes of requests that come at once."""
    engine = Engine(image_program, loaded)
    for number, (ask, lora) in enumerate(requests):
        engine.add(str(number), message(ask, lora))
    done: dict[str, Emission] = {}
    while engine.has_work:
        done |= {emission.request_id: emission for emission in engine.step()}
    return [done[str(number)] for number in range(len(requests))]


def error_of(loaded: Loaded, lora: Mapping[str, object]) -> ErrorInfo:
    (emission,) = served(loaded, [(MIXED[0], lora)])
    assert emission.error is not None
    return emission.error


def assert_right(
    emissions: Sequence[Emission],
    requests: Sequence[tuple[Ask, Mapping[str, object] | None]],
    expected: Callable[..., torch.Tensor],
) -> None:
    for emission, (ask, lora) in zip(emissions, requests, strict=True):
        assert emission.error is None, emission.error
        torch.testing.assert_close(
            emission.tensors["image"],
            expected(ask, lora),
            atol=BOUND,
            rtol=0,
            msg=lambda text, lora=lora: f"{lora}: {text}",
        )


def test_a_mixed_batch_equals_the_stock_pipeline_with_each_adapter(
    load: Callable[..., Loaded], expected: Callable[..., torch.Tensor]
) -> None:
    loaded = load()
    loras = (NONE, A, B, A_STRONGER, NONE, A)
    requests = list(zip([replace(ask, height=32) for ask in MIXED], loras, strict=False))
    with counted(loaded) as forwards:
        emissions = served(loaded, requests)
    assert_right(emissions, requests, expected)
    pictures = [expected(MIXED[0], lora) for lora in (NONE, A, B, A_STRONGER)]
    assert min((x - y).abs().max() for x in pictures for y in pictures if x is not y) > BOUND
    # What can share a forward does: the two without an adapter, and the two with the same.
    assert len(forwards) < sum(ask.steps for ask, _ in requests)


def test_one_that_gives_way_to_another_comes_back(
    load: Callable[..., Loaded], files: dict[str, str], expected: Callable[..., torch.Tensor]
) -> None:
    loaded = load(max_loras=1)
    adapters = loaded.assets["adapters"]
    assert adapters.resident == ()
    # At once, so that both have to come and go while the requests run.
    requests = [(MIXED[0], A), (MIXED[1], B), (MIXED[2], NONE)]
    assert_right(served(loaded, requests), requests, expected)
    assert len(adapters.resident) == 1
    again = [(MIXED[3], lora) for lora in (A, B, NONE)]
    for request in again:
        assert_right(served(loaded, [request]), [request], expected)
    assert adapters.resident == (files["b"],)
    names = [name for name, _ in loaded.components["transformer"].module.named_parameters()]
    assert len([name for name in names if "lora_A" in name]) == 1


def test_with_cache_dit_each_has_its_adapter_and_its_own_state(
    load: Callable[..., Loaded], expected: Callable[..., torch.Tensor], pipeline: FluxPipeline
) -> None:
    cache_dit = pytest.importorskip("cache_dit", reason="needs the extra cache-dit")
    settings = {"residual_diff_threshold": 0.9, "max_warmup_steps": 2}
    requests = [
        (replace(ask, steps=6), lora) for ask, lora in zip(MIXED, (A, B, NONE), strict=False)
    ]
    # One adapter at a time: each forward of one takes the other's away.
    loaded = load(cache_backend="cache_dit", cache_config=settings, max_loras=1)

    def cached(ask: Ask, lora: Mapping[str, object] | None) -> torch.Tensor:
        config = cache_dit.DBCacheConfig(
            Fn_compute_blocks=1, max_continuous_cached_steps=3, **settings
        )
        cache_dit.enable_cache(pipeline, cache_config=config)
        try:
            return expected(ask, lora)
        finally:
            cache_dit.disable_cache(pipeline)

    assert_right(served(loaded, requests), requests, cached)


def test_one_for_all_that_name_none(
    load: Callable[..., Loaded], files: dict[str, str], expected: Callable[..., torch.Tensor]
) -> None:
    loaded = load(lora_path=files["a"], lora_scale=2.5)
    assert loaded.assets["adapters"].resident == (files["a"],)
    emissions = served(loaded, [(MIXED[0], NONE), (MIXED[0], B)])
    assert_right(emissions, [(MIXED[0], A_STRONGER), (MIXED[0], B)], expected)


def test_the_owner_may_name_a_file(
    load: Callable[..., Loaded], files: dict[str, str], expected: Callable[..., torch.Tensor]
) -> None:
    emissions = served(load(lora_modules={}), [(MIXED[0], {"name": "mine", "path": files["b"]})])
    assert_right(emissions, [(MIXED[0], B)], expected)


def test_what_cannot_be_used_is_said(
    load: Callable[..., Loaded], files: dict[str, str], expected: Callable[..., torch.Tensor]
) -> None:
    loaded = load()
    unknown = error_of(loaded, {"name": "othr"})
    assert unknown.status_code == 400 and unknown.param == "lora.name"
    assert "did you mean 'other'" in unknown.message
    unfit = error_of(loaded, {"name": "other"})
    assert unfit.status_code is None and "adapter 'other'" in unfit.message
    assert files["other"] not in unfit.message
    assert loaded.assets["adapters"].resident == ()
    # Neither leaves a trace.
    requests = [(MIXED[0], NONE), (MIXED[1], A)]
    assert_right(served(loaded, requests), requests, expected)
    with pytest.raises(OmniConfigError, match="lora_path"):
        load(lora_path=files["other"])
    with pytest.raises(OmniConfigError, match=r"lora_modules\.gone"):
        load(lora_modules={"gone": "/nowhere/gone.safetensors"})


def test_clients_name_adapters_and_no_files(checkpoint: Path, files: dict[str, str]) -> None:
    plan = build_plan(str(checkpoint), cli={"lora_modules": files, "lora_scale": 0.5})
    assert plan.entry.diffusion.lora_modules == files
    assert plan.entry.diffusion.lora_scale == 0.5

    def ask(requests: RequestFactory, lora: Mapping[str, object]) -> object:
        params = checked_params({"lora": lora}, "")
        assert isinstance(params, OmniDiffusionSamplingParams)
        submit = requests.make("a cat", "r", params, None, ("image",), None, 0.0, {})
        return submit.prompt.options["params"]["lora"]

    mine = {"name": "mine", "path": files["a"], "scale": 1.0}
    assert ask(RequestFactory(plan, owner=True), mine) == mine
    assert ask(RequestFactory(plan), A) == {"name": "a", "path": None, "scale": 1.0}
    with pytest.raises(OmniClientError) as refused:
        ask(RequestFactory(plan), mine)
    assert refused.value.param == "sampling_params.lora.path"
    assert refused.value.status_code == 400
