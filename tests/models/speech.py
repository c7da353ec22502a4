# SPDX-License-Identifier: Apache-2.0
"""One answer of transformers, and the same talker in vLLM driven by hand.

This stands in for the AR engine: rows are tensors in memory, and every step is a fresh request
whose prompt is what has been fed so far.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm import LLM, SamplingParams

from tests.reference.hf_omni import HFOmni, Media, Reference
from vllm_omni.config.pipeline import EdgeContext
from vllm_omni.handles import RowSpan, TensorHandle
from vllm_omni.inputs import RowInput, RowPrompt
from vllm_omni.models.hf_overrides import talker_config
from vllm_omni.models.interfaces import FrameSampling
from vllm_omni.models.noise import Noise
from vllm_omni.outputs import TokenOutput
from vllm_omni.pipelines import qwen2_5_omni, qwen3_omni_moe

PIPELINES = {"qwen3_omni_moe": qwen3_omni_moe, "qwen2_5_omni": qwen2_5_omni}


@dataclass
class Spoken:
    """What transformers' talker was given and said.

    Attributes:
        reference: The whole answer.
        prompt: The talker's prompt rows, codec embeddings added, [prompt length, width].
        trailing: Its `trailing_text_hidden` or `thinker_reply_part`, [n, width].
        pad: The row after that, [width].
        positions: int64 [3, prompt length].
        scores: float32 [steps, vocabulary], logits with suppressed codes.
    """

    reference: Reference
    prompt: torch.Tensor
    trailing: torch.Tensor
    pad: torch.Tensor
    positions: torch.Tensor
    scores: torch.Tensor


def ask_transformers(hf: HFOmni, messages: Any, media: Media, **options: Any) -> Spoken:
    """Run `generate`, watching what the talker is given."""
    talker = hf.model.talker
    seen: dict[str, Any] = {}
    positions: list[torch.Tensor] = []
    prompts: list[torch.Tensor] = []
    generate = talker.generate

    def watch(**kwargs: Any) -> Any:
        seen["kwargs"] = kwargs
        seen["result"] = generate(**kwargs)
        return seen["result"]

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        positions.append(kwargs["position_ids"])

    def note_input(module: torch.nn.Module, args: Any) -> None:
        prompts.append(args[0][0].clone())

    hooks = [talker.model.register_forward_pre_hook(note, with_kwargs=True)]
    if hf.family == "qwen2_5_omni":
        hooks.append(talker.thinker_to_talker_proj.register_forward_pre_hook(note_input))
    with mock.patch.object(talker, "generate", watch), talker_mask(hf):
        reference = hf.run(messages, media, **options)
    for hook in hooks:
        hook.remove()
    kwargs = seen["kwargs"]
    if hf.family == "qwen3_omni_moe":
        trailing, pad = kwargs["trailing_text_hidden"][0], kwargs["tts_pad_embed"][0, 0]
    else:
        # The last row of this part is used again for ever.
        trailing, pad = kwargs["thinker_reply_part"][0, :-1], kwargs["thinker_reply_part"][0, -1]
    return Spoken(
        reference=reference,
        prompt=prompts[0] if prompts else reference.talker_prompt,
        trailing=trailing,
        pad=pad,
        positions=positions[0][-3:, 0],
        scores=torch.cat(seen["result"].scores),
    )


@contextmanager
def talker_mask(hf: HFOmni) -> Iterator[None]:
    """Give Qwen2.5's talker back the attention mask that transformers 5.19 takes from it.

    `generate` drops a mask that is all ones. The talker's forward takes a missing mask as a sign to
    leave out the codec embeddings of its prompt and the M-RoPE positions, so an unpadded prompt is
    answered differently from the same prompt in a padded batch (and from what was trained).
    """
    if hf.family != "qwen2_5_omni":
        yield
        return

    def restore(
        module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("attention_mask") is None:
            inputs = kwargs.get("inputs_embeds")
            new = 1 if inputs is None else inputs.shape[1]
            length = kwargs["past_key_values"].get_seq_length() + new
            kwargs = {**kwargs, "attention_mask": torch.ones(1, length, dtype=torch.int64)}
        return args, kwargs

    hook = hf.model.talker.register_forward_pre_hook(restore, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


class Talker:
    """A talker checkpoint in an in-process vLLM engine."""

    def __init__(self, path: Path) -> None:
        self.llm = LLM(
            str(path),
            hf_overrides=talker_config,
            dtype="float32",
            enforce_eager=True,
            enable_prompt_embeds=True,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            generation_config="vllm",
            distributed_executor_backend="uni",
            kv_cache_memory_bytes=16 << 20,
            max_model_len=1024,
            max_num_seqs=8,
        )
        self.config = self.llm.llm_engine.model_config
        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self.model = worker.get_model()

    @contextmanager
    def positions(self, positions: torch.Tensor) -> Iterator[None]:
        """Requests begin at these M-RoPE positions, int64 [3, prompt length], and count up."""
        prompt_len = positions.shape[1]
        following = positions.max() + 1

        def of(_: Any, input_tokens: list[int], mm_features: Any) -> tuple[torch.Tensor, int]:
            more = len(input_tokens) - prompt_len
            tail = (following + torch.arange(more)).expand(3, -1)
            return torch.cat([positions, tail], dim=1), int(following) - prompt_len

        with mock.patch.object(type(self.model), "get_mrope_input_positions", of):
            yield

    def step(self, inputs_embeds: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The greedy token after these inputs [n, hidden_size], and its hidden state."""
        hidden: list[torch.Tensor] = []
        hook = self.model.register_forward_hook(lambda m, a, output: hidden.append(output.clone()))
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        output = self.llm.generate({"prompt_embeds": inputs_embeds}, params, use_tqdm=False)
        hook.remove()
        return output[0].outputs[0].token_ids[0], hidden[-1][inputs_embeds.shape[0] - 1]


@dataclass
class Rows:
    """A talker's row part, resolved from the messages of an edge.

    Attributes:
        prompt: [prompt length, width].
        following: [n, width]; after that the pad row.
    """

    prompt: torch.Tensor
    following: torch.Tensor
    token_ids: list[int] = field(default_factory=list)


def resolve(
    talker: Talker, hf: HFOmni, reference: Reference, streaming: bool, chunk: int = 1000
) -> Rows:
    """Send a reference answer's thinker rows over the edge and make the talker's inputs of them."""
    module = PIPELINES[hf.family]
    ctx = EdgeContext(model=str(hf.path), config=hf.config, voice=None, streaming=streaming)
    edge = module.thinker_to_talker(ctx)
    parts: list[torch.Tensor] = []
    token_ids: list[int] = []
    for output in thinker_outputs(reference, chunk):
        message = edge.feed(output)
        if message is None:
            continue
        rows = message.rows if isinstance(message, RowPrompt) else message
        assert isinstance(rows, RowInput)
        if isinstance(message, RowPrompt):
            token_ids = message.token_ids
        ids = token_ids if isinstance(message, RowPrompt) else []
        ids = torch.tensor(ids + [-1] * (len(rows.index) - len(ids)))
        parts.append(
            talker.model.row_inputs(
                gather(rows, reference),
                torch.frombuffer(bytearray(rows.kinds), dtype=torch.uint8),
                ids,
            )
        )
    joined = torch.cat(parts)
    return Rows(joined[: len(token_ids)], joined[len(token_ids) :], token_ids)


def gather(rows: RowInput, reference: Reference) -> dict[str, torch.Tensor]:
    """The message's row tensors, zeros where a position takes no row."""
    if not rows.spans:
        return {}
    index = torch.tensor(rows.index)
    result = {}
    for name in ("embeds", "hidden"):
        source = getattr(reference, name)
        joined = torch.cat([source[span.start : span.stop] for span in rows.spans])
        result[name] = joined[index.clamp_min(0)] * (index >= 0)[:, None]
    return result


def thinker_outputs(reference: Reference, chunk: int) -> Iterator[TokenOutput]:
    """The answer as an engine would emit it: the prompt in chunks, then one row per step."""
    length, tokens = len(reference.prompt_token_ids), reference.token_ids
    cuts = [*range(0, length, chunk), length]
    steps = [*pairwise(cuts)]
    steps += [(p, p + 1) for p in range(length, length + len(tokens) - 1)]
    sampled = 0
    for start, stop in steps:
        new = tokens[sampled : max(stop - length + 1, 0)]
        sampled += len(new)
        yield TokenOutput(
            request_id="r",
            new_token_ids=new,
            prompt_token_ids=reference.prompt_token_ids if start == 0 else None,
            spans=(RowSpan(start, stop - start, TensorHandle(key=str(start), nbytes=0)),),
            finished=sampled == len(tokens),
            finish_reason="stop" if sampled == len(tokens) else None,
        )


def greedy(batch: int) -> FrameSampling:
    """Sampling parameters that draw nothing at random."""
    return FrameSampling(
        temperature=torch.zeros(batch),
        top_k=torch.zeros(batch, dtype=torch.int64),
        top_p=torch.ones(batch),
        noise=Noise(torch.arange(batch), torch.zeros(batch, dtype=torch.int64)),
        all_greedy=True,
        memory=torch.zeros(batch, 0, dtype=torch.int64),
    )
