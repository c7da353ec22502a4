# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint has what its pipeline needs, before any stage is started.

What every family needs (its stages' configs, a tokenizer, the files that it declares) is checked
here; what its own numbers must be, the family says in `Pipeline.problems`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig
from vllm.transformers_utils.repo_utils import file_or_path_exists

from vllm_omni.config.pipeline import Pipeline
from vllm_omni.config.plan import StagePlan
from vllm_omni.config.problems import Problem, config_error
from vllm_omni.errors import OmniConfigError

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "tekken.json")
"""A tokenizer comes in one of these."""


def check_config(
    model: str, pipeline: Pipeline, hf_config: PretrainedConfig, revision: str | None
) -> None:
    """Check the checkpoint's config.

    Raises:
        OmniConfigError: Names every key at fault.
    """
    problems = list(_missing_sections(model, pipeline, revision))
    if not problems and pipeline.problems is not None:
        problems = list(pipeline.problems(hf_config, model))
    if problems:
        raise config_error(f"model {model!r}: config.json", problems)


def _missing_sections(model: str, pipeline: Pipeline, revision: str | None) -> Iterator[Problem]:
    """Configs of stages that the file lacks; transformers would make them up."""
    names = {s.config_name: s.name for s in pipeline.stages if s.config_name is not None}
    if not names:
        return
    raw, _ = PretrainedConfig.get_config_dict(model, revision=revision)
    for key, stage in names.items():
        if not isinstance(raw.get(key), Mapping):
            found = raw.get(key)
            yield Problem(
                key, found, f"should be the config of stage {stage!r}, a mapping, and not missing"
            )


def check_files(model: str, pipeline: Pipeline, stages: tuple[StagePlan, ...]) -> None:
    """Check that the checkpoint's files are there.

    Raises:
        OmniConfigError: Names what is missing.
    """
    entry = stages[pipeline.stage_id(pipeline.entry.name)]
    args: Mapping[str, Any] = entry.engine_args
    wanted = [(model, args.get("revision"), names) for names in pipeline.files]
    if entry.stage.owns_tokenizer and not args.get("skip_tokenizer_init"):
        own = args.get("tokenizer")
        revision = args.get("tokenizer_revision") or (None if own else args.get("revision"))
        wanted.append((own or model, revision, TOKENIZER_FILES))
    for place, revision, names in wanted:
        if not any(file_or_path_exists(place, name, revision) for name in names):
            raise OmniConfigError(f"model {place!r}: it has no {' or '.join(names)}")
