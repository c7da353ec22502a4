# SPDX-License-Identifier: Apache-2.0
"""Write docs/configuration.md from the configuration schema, or check that it is up to date.

Usage: python tools/gen_config_docs.py [--check]
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic.fields import FieldInfo

from vllm_omni.config.cli import add_omni_args
from vllm_omni.config.engine_args import type_name
from vllm_omni.config.idle import (
    DEPLOY_IDLE,
    EXTRAS_IDLE,
    FLAG_IDLE,
    STAGE_IDLE,
    IdleKey,
)
from vllm_omni.config.schema import (
    ConnectorConfig,
    DeployConfig,
    PipelineWide,
    Section,
    StageDeployConfig,
    engines_of,
    flag_engines_of,
)
from vllm_omni.entrypoints.cli.serve import add_frontend_args

TARGET = Path(__file__).parents[1] / "docs" / "configuration.md"

INTRO = """\
<!-- Written by tools/gen_config_docs.py. Do not edit. -->

# Configuration

A deployment is a model, a *pipeline* (which stages the model has) and a *deploy file* (where they
run, and how). The pipeline is found from the checkpoint, and every pipeline has a packaged deploy
file, so `vllm serve MODEL --omni` is enough to start. To change something, give flags, stage
overrides or a deploy file of your own:

```bash
vllm serve Qwen/Qwen3-Omni-30B-A3B-Instruct --omni \\
    --max-model-len 32768 \\
    --stage-overrides '{"talker": {"max_num_seqs": 16}}'
```

```yaml
# vllm serve Qwen/Qwen3-Omni-30B-A3B-Instruct --omni --deploy-config three_gpus.yaml
base_config: qwen3_omni_moe.yaml
stages:
  - stage_id: 0
    devices: "0,2"
    tensor_parallel_size: 2
```

Text-to-speech pipelines have *profiles*, packaged files that build on the default one:
`--deploy-config qwen3_tts_low_latency` is for few listeners (small batches, a first packet of one
frame), `--deploy-config qwen3_tts_high_throughput` for many requests (large batches, sound in
larger pieces). `--deploy-config qwen3_omni_moe_one_gpu` puts all of Qwen3-Omni on one GPU with
140 GB. The other families have them by their names (`csm_low_latency`, ...); a name that
there is not is refused with those that there are.

## Precedence

From low to high:

1. the pipeline's defaults, and those of the platform;
2. the deploy file: keys at the top level, then `stages`, then `platforms`, then `stage_overrides`;
   a file wins over its `base_config`, whatever that says about the platform;
3. flags;
4. `--stage-overrides`.

Sampling defaults go the same way, with `--default-sampling-params` above other flags; a request's
own parameters are above all of them. What a model needs to work (such as its stop tokens) always
holds. Values are checked before anything starts. vLLM's own routes (`/v1/completions`,
`/v1/responses`, ...) take temperature, `top_p`, `top_k`, `min_p` and penalties from the first
stage's defaults; the others (`max_tokens`, `seed`, `stop`, ...) are for `/v1/chat/completions`.

A flag goes to every stage that can take it. Flags about prompts and media
(`--limit-mm-per-prompt`, `--mm-processor-kwargs`, `--tokenizer`, ...) go to the first stage alone.
A flag that one of the stages cannot take, such as `--tensor-parallel-size 2` with a stage that has
one device, is an error that names the stage.

`base_config` names one other file to build on, or a packaged one: values at the top level replace,
`connectors` are merged by name, `stages` by `stage_id`. Within a stage, values replace, but
sampling parameters and `engine_extras` are merged.

An unknown key, a wrong value or a contradiction is an error before anything starts. It names the
file, the key and the nearest key that exists:

```
deploy.yaml: stages[1].max_num_seqz = 64: unknown key; did you mean 'max_num_seqs'?
```

## Memory of GPUs

Before anything is loaded, what the stages want of each GPU is compared with what is free there:
`gpu_memory_utilization` of a stage (vLLM's default if an `ar` stage gives none); of a `diffusion`
stage without one, the size of its weights and a tenth. A deployment that cannot fit is refused in
a line that names the GPU, its stages, what is free and the key to change; so are weights that are
larger than their stage's share. What fits is logged. Stages on different GPUs load at the same
time, those on one GPU in turn.

## Models of the hub

A model that is no folder is fetched from the Hugging Face hub (`HF_ENDPOINT`, `HF_TOKEN`) once,
before any stage starts: configs, tokenizers and one copy of the weights, in safetensors; of a
diffusers checkpoint, the folders that its `model_index.json` names. Servers that start on one node
at the same time wait for one another (locks in `$HF_HOME/locks`). A download that fails is tried
three times, one that is refused only once. With `HF_HUB_OFFLINE=1` a complete cache does without a
network, and `hf download MODEL` fills one. The time that a download takes counts towards neither
`--stage-init-timeout` nor `--init-timeout`.
"""


def render() -> str:
    """The document."""
    parts = [
        INTRO,
        "## Flags\n",
        "On top of all flags of `vllm serve`. These are about stages and requests:\n",
        _flags(add_omni_args),
        "These limit the HTTP server:\n",
        _flags(add_frontend_args),
        "## Top level of a deploy file\n",
        _keys(DeployConfig, skip=tuple(PipelineWide.model_fields)),
        "These are shared by all stages that do not set their own:\n",
        _keys(PipelineWide),
        "### `connectors`\n",
        _keys(ConnectorConfig),
        "## Entries of `stages`\n",
        "Every field of vLLM's `AsyncEngineArgs` is a key of an autoregressive stage, under its\n"
        "own name and with vLLM's own default. These keys are ours, or are checked more closely:\n",
        _keys(StageDeployConfig, stage=True),
        "## Accepted without effect\n",
        "These exist so that files and commands written for other releases work. Using one is\n"
        "said once, in a warning.\n",
        _idle("At the top level", DEPLOY_IDLE),
        _idle("In a stage", STAGE_IDLE),
        _idle("In `engine_extras`", EXTRAS_IDLE),
        _idle("On the command line", FLAG_IDLE),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _flags(add: Callable[[argparse.ArgumentParser], object]) -> str:
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    idle = FLAG_IDLE.keys() | {name for name, entry in STAGE_IDLE.items() if entry.flag}
    rows = []
    for action in parser._actions:
        if action.dest in idle:
            continue
        flags = ", ".join(f"`{option}`" for option in action.option_strings)
        default = "" if action.default in (None, False, []) else f" Default: {action.default}."
        rows.append((flags, (action.help or "").replace("%%", "%") + default))
    return _table(("flag", "meaning"), rows)


def _keys(section: type[Section], skip: tuple[str, ...] = (), stage: bool = False) -> str:
    rows = []
    fields = sorted(section.model_fields.items(), key=lambda item: not item[1].is_required())
    for name, field in fields:
        if name in skip:
            continue
        row = [f"`{name}`", _type(field), _description(field)]
        if stage:
            row[2:2] = [", ".join(engines_of(section, name)), _flag(name)]
        rows.append(tuple(row))
    if stage:
        return _table(("key", "type", "engines", "flag goes to", "meaning"), rows)
    return _table(("key", "type", "meaning"), rows)


def _type(field: FieldInfo) -> str:
    name = type_name(field.annotation).removesuffix(" or null")
    return {"dict": "mapping", "EngineExtras": "mapping", "tuple": "list"}.get(name, name)


def _description(field: FieldInfo) -> str:
    required = " Required." if field.is_required() else ""
    return (field.description or "") + required


def _flag(name: str) -> str:
    engines = flag_engines_of(name) if name != "stage_id" else ()
    return " and ".join(engines) or "-"


def _idle(title: str, keys: Mapping[str, IdleKey]) -> str:
    rows = [
        (f"`{name}`", entry.kind, "dead" if entry.dead else "planned", entry.help)
        for name, entry in keys.items()
    ]
    return f"### {title}\n\n" + _table(("key", "type", "state", "meaning"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return (
        "\n".join(f"| {' | '.join(cell.replace('|', '¦') for cell in row)} |" for row in lines)
        + "\n"
    )


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if it is stale")
    args = parser.parse_args()
    text = render()
    if not args.check:
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != text:
        print(f"{TARGET} is stale: run python tools/gen_config_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
