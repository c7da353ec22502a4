# SPDX-License-Identifier: Apache-2.0
"""Fields that a request has and its route does not know: refused by name, never ignored."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, model_validator

from vllm_omni.config.problems import did_you_mean
from vllm_omni.errors import OmniClientError

MAX_SHOWN_NAME = 80


def unknown_parameter(name: str, known: Iterable[str], place: str = "") -> OmniClientError:
    """What is raised about a field that there is not.

    Args:
        name: As the client wrote it.
        known: The fields there are.
        place: Of the object that it is in; empty for the body.
    """
    name = name[:MAX_SHOWN_NAME]
    hint = did_you_mean(name, known) or "."
    param = f"{place}.{name}" if place else name
    return OmniClientError(f"Unknown parameter: {param!r}{hint}", param=param)


def check_known(data: Mapping[Any, Any], known: Iterable[str], place: str = "") -> None:
    """Refuse what is no field; one that is null says nothing.

    Raises:
        OmniClientError: Names the field, and the one that was likely meant.
    """
    fields = tuple(known)
    for name, value in data.items():
        if value is not None and name not in fields:
            raise unknown_parameter(str(name), fields, place)


class KnownFields(BaseModel):
    """An object of which every field has to be known; one that is null was not sent."""

    @model_validator(mode="before")
    @classmethod
    def _check_known(cls, data: Any) -> Any:
        if isinstance(data, dict):
            check_known(data, cls.model_fields)
            return {name: value for name, value in data.items() if value is not None}
        return data
