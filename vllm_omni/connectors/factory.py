# SPDX-License-Identifier: Apache-2.0
"""Connectors by name, as a deploy YAML's `connectors` section gives them (row I-06)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from vllm_omni.connectors.base import OmniConnector
from vllm_omni.connectors.shm import SharedMemoryConnector, SharedMemoryOptions
from vllm_omni.errors import OmniConfigError

Build = Callable[[Mapping[str, Any], str | None], OmniConnector]
Options = TypeVar("Options", bound=msgspec.Struct)


class OmniConnectorFactory:
    """The registry of connectors. An out-of-tree one registers in a vLLM general plugin."""

    _builders: ClassVar[dict[str, Build]] = {}

    @classmethod
    def register(cls, name: str, build: Build, aliases: tuple[str, ...] = ()) -> None:
        """Make a connector known.

        Args:
            name: What `connectors.<id>.name` says.
            build: Called with the YAML's `extra` and the deployment id (None: the environment's).
            aliases: Other names for it.

        Raises:
            OmniConfigError: A name is taken by another connector.
        """
        for each in (name, *aliases):
            if cls._builders.setdefault(each, build) is not build:
                raise OmniConfigError(f"connector name {each!r} is taken")

    @classmethod
    def names(cls) -> list[str]:
        """All names and aliases."""
        return sorted(cls._builders)

    @classmethod
    def create(
        cls, name: str, extra: Mapping[str, Any] | None = None, deployment_id: str | None = None
    ) -> OmniConnector:
        """Build the connector of that name.

        Raises:
            OmniConfigError: No connector has that name, or an option in `extra` is wrong.
        """
        build = cls._builders.get(name)
        if build is None:
            raise OmniConfigError(f"unknown connector {name!r}{_hint(name, cls.names())}")
        return build(extra or {}, deployment_id)


def create_connector(
    name: str, extra: Mapping[str, Any] | None = None, deployment_id: str | None = None
) -> OmniConnector:
    """`OmniConnectorFactory.create`."""
    return OmniConnectorFactory.create(name, extra, deployment_id)


def read_options(connector: str, kind: type[Options], extra: Mapping[str, Any]) -> Options:
    """The options of a connector out of a YAML's `extra`.

    By old habit `extra` also carries keys that tune models (`codec_chunk_frames`, ...) or other
    connectors. Those are not ours to judge, so an unknown key is an error only when it looks like a
    misspelt option of this connector.

    Raises:
        OmniConfigError: A misspelt key or a value of the wrong type or range.
    """
    known = kind.__struct_fields__
    for key in extra:
        if key not in known and (near := difflib.get_close_matches(str(key), known, 1, 0.85)):
            raise OmniConfigError(
                f"connector {connector}: unknown option {key!r}; did you mean {near[0]!r}?"
            )
    own = {key: value for key, value in extra.items() if key in known}
    try:
        return msgspec.convert(own, kind, strict=False)
    except msgspec.ValidationError as error:
        raise OmniConfigError(f"connector {connector}: {error}") from None


def _hint(name: str, known: list[str]) -> str:
    folded = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), folded, 1, 0.5)
    return f"; did you mean {folded[near[0]]!r}?" if near else f"; known: {', '.join(known)}"


def _shared_memory(extra: Mapping[str, Any], deployment_id: str | None) -> OmniConnector:
    options = read_options("SharedMemoryConnector", SharedMemoryOptions, extra)
    return SharedMemoryConnector(deployment_id, options)


OmniConnectorFactory.register("SharedMemoryConnector", _shared_memory, aliases=("shm",))
