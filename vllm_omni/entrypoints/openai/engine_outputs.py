# SPDX-License-Identifier: Apache-2.0
"""What the engine gives for a request of our own routes, its errors in the words of the body."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.errors import OmniClientError, StageUnavailableError
from vllm_omni.outputs import OmniRequestOutput


async def told(
    outputs: AsyncGenerator[OmniRequestOutput, None],
    in_fields: Callable[[OmniClientError], OmniClientError],
) -> AsyncGenerator[OmniRequestOutput, None]:
    """The outputs, which end with this generator.

    Args:
        outputs: Of `AsyncOmni.generate`.
        in_fields: Names the field of the body where the engine names one of its own.

    Raises:
        OmniClientError: In the words of the body.
        StageUnavailableError: The process that worked on it has ended.
    """
    try:
        async with aclosing(outputs):
            async for output in outputs:
                yield output
    except OmniClientError as error:
        if type(error) is OmniClientError:
            raise in_fields(error) from error
        raise
    except EngineDeadError as error:
        raise StageUnavailableError(
            "the process that worked on this has ended and is started again: "
            f"{error.args[-1] if error.args else 'it is dead'}"
        ) from error
