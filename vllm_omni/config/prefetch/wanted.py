# SPDX-License-Identifier: Apache-2.0
"""Which repositories of the hub a deployment reads, and what of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm import envs

from vllm_omni.config.plan import DeploymentPlan, StagePlan
from vllm_omni.config.weights import safe_load_format

SAFETENSORS_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "bitsandbytes"}
)
"""vLLM's load formats that read the checkpoint's own safetensors files (under `auto` and `hf`,
pickles if there are none). For the others vLLM fetches what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A repository of the hub.

    Attributes:
        model: Its name.
        revision: Branch, tag or commit; None for the default branch.
        cache_dir: The hub's cache folder; None for the usual one.
        token: For the hub, where not the environment's; True for the one that was logged in with.
        weights: Its weights are read, not only what describes it.
        trusted: Its code may be run, and weights be pickles if there are no safetensors.
    """

    model: str
    revision: str | None = None
    cache_dir: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    weights: bool = True
    trusted: bool = False


def checkpoints(plan: DeploymentPlan) -> tuple[Checkpoint, ...]:
    """What the stages of a plan read from the hub; nothing for local folders.

    Raises:
        OmniConfigError: A stage would read pickled weights.
    """
    if envs.VLLM_USE_MODELSCOPE:
        return ()
    found: dict[tuple[str, str | None, str | None], Checkpoint] = {}
    for stage in plan.stages:
        for one in _of_stage(plan, stage):
            key = (one.model, one.revision, one.cache_dir)
            other = found.get(key, one)
            found[key] = replace(
                one,
                token=other.token if one.token is None else one.token,
                weights=one.weights or other.weights,
                trusted=one.trusted or other.trusted,
            )
    return tuple(one for one in found.values() if _on_hub(one.model))


def _of_stage(plan: DeploymentPlan, stage: StagePlan) -> Iterator[Checkpoint]:
    if (own := stage.diffusion) is not None:
        yield Checkpoint(
            model=own.model,
            revision=own.revision,
            weights=own.load_format != "dummy",
            trusted=own.trust_remote_code,
        )
        return
    args = {"model": plan.model, **stage.engine_args}
    checkpoint = Checkpoint(
        model=args["model"],
        revision=args.get("revision"),
        cache_dir=args.get("download_dir"),
        token=args.get("hf_token"),
        weights=safe_load_format(args) in SAFETENSORS_FORMATS,
        trusted=bool(args.get("trust_remote_code")),
    )
    yield checkpoint
    tokenizer = args.get("tokenizer")
    if tokenizer and tokenizer != checkpoint.model and not args.get("skip_tokenizer_init"):
        yield Checkpoint(
            model=tokenizer,
            revision=args.get("tokenizer_revision"),
            token=checkpoint.token,
            weights=False,
            trusted=checkpoint.trusted,
        )


def _on_hub(model: str) -> bool:
    """Whether it is neither on this disk nor in some other store (`s3://...`)."""
    return "://" not in model and not Path(model).exists()
