# SPDX-License-Identifier: Apache-2.0
"""The stages' timing as clients get it: in a JSON answer's `metrics`, or in a file's header."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_omni.outputs import StageMetrics

STAGES_HEADER = "x-vllm-omni-stages"


def stages_told(stages: Sequence[StageMetrics]) -> list[dict[str, Any]]:
    """Each stage's timing as an object of JSON, in the order of the pipeline."""
    return [msgspec.to_builtins(stage) for stage in stages]


def stages_header(stages: Sequence[StageMetrics]) -> dict[str, str]:
    """The header of an answer that is a file: the same list on one line, in ASCII."""
    return {STAGES_HEADER: json.dumps(stages_told(stages), separators=(",", ":"))}
