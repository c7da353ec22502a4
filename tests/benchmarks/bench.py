# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve --omni` within this process, which has imported vLLM already."""

import gc
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from vllm_omni.entrypoints.cli.main import main


def command_line(*args: str) -> None:
    """Run it to its end; what it changes of the process is changed back."""
    with mock.patch.dict("os.environ"), mock.patch.object(sys, "argv", ["vllm", "bench", "serve"]):
        try:
            main(["bench", "serve", "--omni", "--disable-tqdm", *args])
        finally:
            gc.unfreeze()


def bench(url: str, backend: str, folder: Path, *args: str) -> dict[str, Any]:
    """Ask a server of the model `tiny` and return the saved result."""
    file = folder / "result.json"
    saving = ("--save-result", "--save-detailed", "--result-filename", str(file))
    command_line("--base-url", url, "--model", "tiny", "--backend", backend, *saving, *args)
    result: dict[str, Any] = json.loads(file.read_text())
    return result
