# SPDX-License-Identifier: Apache-2.0
"""Settings that must not be read in a log."""

from collections.abc import Mapping
from typing import Any

import regex as re

_SECRET = re.compile(r"(^|_)(token|secret|password|passwd|credentials?|api_?key|access_?key)$")
_HIDDEN = "***"


def redacted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the values of secret ones hidden, in mappings within them too."""
    return {
        key: _HIDDEN if _SECRET.search(str(key).lower()) and value is not None else _deeper(value)
        for key, value in settings.items()
    }


def _deeper(value: Any) -> Any:
    return redacted(value) if isinstance(value, Mapping) else value
