# SPDX-License-Identifier: Apache-2.0
"""Checks of a checkpoint's numbers that several families need."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_omni.config.problems import Problem


def whole_number(path: str, value: Any, stop: int, meaning: str) -> Iterator[Problem]:
    """A problem unless `value` is an integer in [0, stop).

    Args:
        path: The key, as in `talker_config.codec_bos_id`.
        value: What the config has there.
        stop: The first integer that is too large.
        meaning: What the limit is.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < stop:
        yield Problem(path, value, f"should be an integer from 0 to {stop - 1} ({meaning})")


def token_ids(
    section: Mapping[str, Any], prefix: str, names: Sequence[str], vocab_size: int, whose: str
) -> Iterator[Problem]:
    """Problems of the token ids `names` of a section, which a vocabulary must hold.

    Args:
        section: The config's section.
        prefix: Path of the section with a dot behind, or nothing.
        names: Keys that must be there.
        vocab_size: Size of the vocabulary.
        whose: Where that size is from, as `talker_config.vocab_size`.
    """
    for name in names:
        meaning = f"{whose} is {vocab_size}"
        yield from whole_number(f"{prefix}{name}", section.get(name), vocab_size, meaning)


def equal(path: str, value: Any, other_path: str, other: Any) -> Iterator[Problem]:
    """A problem unless two numbers that must agree do."""
    if value != other:
        yield Problem(path, value, f"should equal {other_path}, which is {other!r}")
