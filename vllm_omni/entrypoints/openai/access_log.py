# SPDX-License-Identifier: Apache-2.0
"""uvicorn's log: vLLM's choice of format, with request ids."""

import argparse
import copy
from typing import Any

from uvicorn.config import LOGGING_CONFIG
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

_FILTER = "request_id"
_ACCESS_FORMAT = LOGGING_CONFIG["formatters"]["access"]["fmt"]


def http_log_config(args: argparse.Namespace) -> dict[str, Any]:
    """What uvicorn is configured with; a configuration file of the user's own stays as it is."""
    chosen = get_uvicorn_log_config(args)
    if chosen is not None and args.logging_config.pylogging_config_file is not None:
        return chosen
    config = copy.deepcopy(chosen or LOGGING_CONFIG)
    config.setdefault("filters", {})[_FILTER] = {"()": "vllm_omni.logs.RequestIdFilter"}
    for handler in config["handlers"].values():
        handler["filters"] = [*handler.get("filters", ()), _FILTER]
    for formatter in config["formatters"].values():
        if formatter.get("fmt") == _ACCESS_FORMAT:
            formatter["fmt"] += " %(request_id)s"
    return config
