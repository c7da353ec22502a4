# SPDX-License-Identifier: Apache-2.0
"""Errors of the engine in the words of the request (rows A-44, A-47)."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.entrypoints.openai.generation.fields import in_fields_of, sampling_params
from vllm_omni.entrypoints.openai.generation.service import Generation
from vllm_omni.entrypoints.openai.protocol.audio_generate import AudioGenerateRequest
from vllm_omni.entrypoints.openai.protocol.images import ImageGenerationRequest
from vllm_omni.errors import OmniClientError, StageUnavailableError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]


@pytest.mark.parametrize(
    ("message", "param", "field", "told"),
    [
        ("`n`: bad", "sampling_params.num_outputs_per_prompt", "n", "`n`: bad"),
        ("`extra_args.x`: none", "extra_args.x", "extra_params.x", "`extra_params.x`: none"),
        ("`extra_args.bot_task`: no", "extra_args.bot_task", "bot_task", "`bot_task`: no"),
        ("Flux takes no `image`", "image", "image", "Flux takes no `image`"),
        ("Flux takes no `mask_image`", None, "mask", "Flux takes no `mask`"),
        (
            "`height` and `width` have to be divisible by 16",
            "height",
            "size",
            "size: `height` and `width` have to be divisible by 16",
        ),
        ("the guardrail said no", None, None, "the guardrail said no"),
    ],
)
def test_errors_name_the_field(message: str, param: str | None, field: str, told: str) -> None:
    body = ImageGenerationRequest(prompt="a cat", size="32x32")
    error = OmniClientError(message, 403, "PermissionDeniedError", param=param, code="c")
    found = in_fields_of(error, body)
    assert (found.param, found.message) == (field, told)
    assert (found.status_code, found.error_type, found.code) == (403, "PermissionDeniedError", "c")


def test_a_given_side_is_named_itself() -> None:
    body = ImageGenerationRequest(prompt="a cat", width=32, height=40)
    error = OmniClientError("`height` is odd", param="height")
    assert in_fields_of(error, body).param == "height"


def test_names_of_other_routes() -> None:
    body = AudioGenerateRequest(input="rain")
    error = OmniClientError("`prompt` is missing", param="prompt")
    assert in_fields_of(error, body, {"prompt": "input"}).message == "`input` is missing"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_params": {"sigmas": [0.5, 1.0]}}, "extra_params.sigmas"),
        ({"extra_params": {"sigmas": [1.0] * 1001}}, "extra_params.sigmas"),
        ({"extra_params": {"sigmas": [1.0, -0.5]}}, "extra_params.sigmas[1]"),
        ({"extra_params": {"sigmas": [float("nan")]}}, "extra_params.sigmas"),
        ({"extra_params": {"sigmas": [1.0, 0.5]}, "num_inference_steps": 3}, "extra_params.sigmas"),
        ({"sigmas": [0.5, 0.5]}, "sigmas"),
        ({"timesteps": [1, 2]}, "timesteps"),
        ({"timesteps": list(range(2000, 0, -1))}, "timesteps"),
        ({"extra_args": {"timesteps": [2, -1]}}, "extra_params.timesteps"),
        ({"extra_params": {"eta": 1}, "eta": 2}, "eta"),
        ({"extra_params": {"eta": 1}, "extra_args": {"eta": 2}}, "extra_args.eta"),
    ],
)
def test_schedules_and_arguments_given_twice(fields: dict[str, Any], param: str) -> None:
    body = ImageGenerationRequest(prompt="a cat", **fields)
    with pytest.raises(OmniClientError) as refused:
        sampling_params(body)
    assert refused.value.param == param
    assert param.partition("[")[0] in refused.value.message


def test_what_only_extra_params_have() -> None:
    body = ImageGenerationRequest(prompt="a cat", extra_params={"sigmas": [1.0], "eta": 0.5})
    params = sampling_params(body)
    assert (params.sigmas, params.extra_args) == ([1.0], {"eta": 0.5})
    error = OmniClientError("`sigmas[0]`: no", param="sigmas[0]")
    assert in_fields_of(error, body).param == "extra_params.sigmas[0]"


class DyingEngine:
    """Its process ends with every request."""

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise EngineDeadError("the process has ended, exit code -9")
        yield


async def test_a_process_that_ends_is_no_fault_of_the_request() -> None:
    engine: Any = DyingEngine()
    generation = Generation(engine, [], cast(Any, None), 1)
    body = ImageGenerationRequest(prompt="a cat")
    with pytest.raises(StageUnavailableError, match="exit code -9"):
        await anext(generation.outputs(body, {}, sampling_params(body), "a"))


def test_extra_arguments_are_joined() -> None:
    body = ImageGenerationRequest(prompt="a cat", extra_params={"a": 1}, b=2, seed=3)
    params = sampling_params(body, {"bot_task": "think", "sys_type": None}, width=32)
    extra = {"a": 1, "b": 2, "bot_task": "think"}
    assert params.given() == {"seed": 3, "width": 32, "extra_args": extra}
