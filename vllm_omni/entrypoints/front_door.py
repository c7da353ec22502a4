# SPDX-License-Identifier: Apache-2.0
"""What `Omni` and `AsyncOmni` have in common: how they come to be, and that they are closed."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.config.build import build_plan
from vllm_omni.config.plan import DeploymentPlan
from vllm_omni.engine.launcher import LaunchedPipeline, launch_pipeline
from vllm_omni.errors import OmniError
from vllm_omni.start_report import no_check


class EngineClosedError(OmniError, EngineDeadError):
    """The engine did not die: its owner closed it.

    Args:
        name: What was closed.
    """

    def __init__(self, name: str) -> None:
        # Not `EngineDeadError`'s, whose message sends one to look for a failure.
        Exception.__init__(self, f"this {name} is closed; make a new one")


class FrontDoor(ABC):
    """A pipeline in Python.

    Args:
        model: Folder or hub name of the checkpoint.
        deploy_config: A deploy YAML's path, the name of a packaged one, or a mapping.
        stage_overrides: By stage id or name.
        default_sampling_params: By stage id or name.
        async_chunk: Whether stages start before the one above has ended.
        stage_init_timeout: Seconds that one stage may take to start.
        init_timeout: Seconds that all of them may take.
        log_stats: Log vLLM's statistics.
        engine_args: Any stage key or engine argument of vLLM, for every stage that takes it.

    Raises:
        OmniConfigError: The configuration is wrong.
        StageStartError: A stage did not come up.
    """

    def __init__(
        self,
        model: str,
        *,
        deploy_config: str | Path | Mapping[str, Any] | None = None,
        stage_overrides: str | Mapping[str, Any] | None = None,
        default_sampling_params: str | Mapping[str, Any] | None = None,
        async_chunk: bool | None = None,
        stage_init_timeout: float = 300.0,
        init_timeout: float = 600.0,
        log_stats: bool = False,
        **engine_args: Any,
    ) -> None:
        plan = build_plan(
            model,
            deploy_config=deploy_config,
            stage_overrides=stage_overrides,
            default_sampling_params=default_sampling_params,
            async_chunk=async_chunk,
            stage_init_timeout=stage_init_timeout,
            init_timeout=init_timeout,
            log_stats=log_stats,
            cli=engine_args,
            flag_style="{name}",
        )
        self._launch(plan, no_check)

    @classmethod
    def from_plan(cls, plan: DeploymentPlan, check: Callable[[], None] = no_check) -> Self:
        """Start every stage of a plan; blocks until all are ready.

        Args:
            plan: What to start.
            check: Called often meanwhile; what it raises ends the start.

        Raises:
            OmniConfigError: The plan cannot be deployed.
            StageStartError: A stage did not come up; the message says which and why.
        """
        self = cls.__new__(cls)
        self._launch(plan, check)
        return self

    @classmethod
    def of(cls, launched: LaunchedPipeline) -> Self:
        """In front of a pipeline whose stages run; it is closed with it."""
        self = cls.__new__(cls)
        self._open(launched)
        return self

    def _launch(self, plan: DeploymentPlan, check: Callable[[], None]) -> None:
        launched = _launched(plan, check)
        try:
            self._open(launched)
        except BaseException:
            launched.shutdown(0)
            raise

    @abstractmethod
    def _open(self, launched: LaunchedPipeline) -> None:
        """Set all attributes; the stages run."""


def _launched(plan: DeploymentPlan, check: Callable[[], None]) -> LaunchedPipeline:
    """Start the stages; vLLM's front end starts tasks of its own where it sees a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return launch_pipeline(plan, check)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(launch_pipeline, plan, check).result()
