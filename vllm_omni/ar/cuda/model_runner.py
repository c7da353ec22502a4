# SPDX-License-Identifier: Apache-2.0
"""vLLM's Model Runner V2 with rows out and rows in (used on CUDA; see docs/design/ar_engine.md).

The same `StageRows` as on CPU, called at the same points. Nothing of a step waits for the device:
rows are copied to the host on a stream of their own, and handed on where vLLM waits for the step's
tokens anyway.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import ExecuteModelState, GPUModelRunner

from vllm_omni.ar.cuda.frame_graphs import FrameGraphs, with_fused_norms
from vllm_omni.ar.row_state import RowState, Step
from vllm_omni.ar.stage_rows import Emitted, StageRows, StepStates, with_spans
from vllm_omni.platforms import to_device
from vllm_omni.platforms.cuda.model_state import EmbedsModelState, RowModelState


class OmniGPUModelRunner(GPUModelRunner):
    """Model runner of an AR stage on a GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows = StageRows(self.vllm_config)
        self._rows_stream = torch.cuda.Stream(self.device)
        self._sampled: Emitted | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and keep its inputs if it is row-driven."""
        super().load_model(*args, **kwargs)
        layer = self._rows.stage.hidden_layer
        if layer is not None:
            self.model.set_aux_hidden_state_layers((layer,))
            self.use_aux_hidden_state_outputs = True
        if "embeds" in self._rows.stage.emits:
            # vLLM asks the model class for its state; this one's class is vLLM's own.
            self.model_state = EmbedsModelState(
                self.vllm_config, self.model, self.encoder_cache, self.device
            )
        self._rows.attach(self.model, self.device, self.dtype)
        if self._rows.inputs is not None:
            assert isinstance(self.model_state, RowModelState)
            self.model_state.feed = _Feed(self._rows.inputs)
            self._rows.inputs.complete = with_fused_norms(self._rows.inputs.complete)

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture the backbone's graphs, then those of completing frames."""
        size = super().capture_model(profile_only=profile_only)
        if self._rows.inputs is not None and not profile_only:
            kept = self.model.omni_capabilities
            if kept.frame_state:
                return size  # these numbers are no input of the graphs
            graphs = FrameGraphs(self._rows.inputs.complete)
            width = kept.frame_hidden or self.model_config.get_hidden_size()
            graphs.capture(self.max_num_reqs, width, kept.frame_memory, self.device, self.dtype)
            self._rows.inputs.complete = graphs
        return size

    def shutdown(self) -> None:
        """Release the device's memory."""
        super().shutdown()
        self._rows.close()

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """A forward pass; a dummy run has no requests."""
        dummy = kwargs.get("dummy_run", False)
        if not dummy:
            self._rows.update(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: Any
    ) -> Any:
        """Sample tokens, then complete the frames that they begin."""
        sampled = super().sample(hidden_states, input_batch, grammar_output)
        inputs = self._rows.inputs
        if inputs is not None and inputs.knows(input_batch.req_ids[0]):
            tokens = sampled[0].sampled_token_ids
            self._sampled = self._complete_frames(inputs, hidden_states, input_batch, tokens)
        return sampled

    def _complete_frames(
        self, inputs: RowState, hidden: torch.Tensor, batch: InputBatch, tokens: torch.Tensor
    ) -> Emitted | None:
        """Frames of the requests whose prompt is complete.

        Args:
            inputs: Of the requests.
            hidden: [n, hidden_size]; of all of the step's tokens.
            batch: The step.
            tokens: int64 [b, 1]; those that the model replaces are written over.
        """
        step = _step(batch)
        done = step.starts + step.counts >= batch.prefill_len_np
        last = batch.logits_indices
        if done.all():
            frames = inputs.sampled(step, hidden[last], tokens[:, 0].to(torch.int64))
            if frames.tokens is not None:
                tokens[:, 0] = frames.tokens
        elif done.any():
            kept = np.flatnonzero(done)
            step = step.of(kept)
            chosen = to_device(torch.from_numpy(kept), self.device)
            frames = inputs.sampled(step, hidden[last[chosen]], tokens[chosen, 0].to(torch.int64))
            if frames.tokens is not None:
                tokens[chosen, 0] = frames.tokens.to(tokens.dtype)
        else:
            return None
        wanted, indices = self._rows.frames_wanted(step)
        codes = frames.codes
        if len(indices) < len(step.request_ids):
            codes = codes[to_device(torch.tensor(indices, dtype=torch.int64), self.device)]
        return Emitted(wanted, self._rows.frames_as_rows(codes))

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Finish the step; what it emits comes with its output."""
        step = self.execute_model_state
        if step is None or not self._rows.stage.emits:
            return super().sample_tokens(grammar_output)
        hidden = None if self._rows.inputs is not None else self._hidden_rows(step)
        self._sampled = None
        output = super().sample_tokens(grammar_output)
        made = self._sampled or hidden
        if made is None or not made.emissions:
            return output
        assert isinstance(output, AsyncModelRunnerOutput)
        return _WithRows(output, self._rows, made, self.main_stream, self._rows_stream)

    def _hidden_rows(self, step: ExecuteModelState) -> Emitted | None:
        """Copies of what the step's requests emit: the buffers are the next step's, too."""
        wanted, tokens = self._rows.hidden_wanted(_step(step.input_batch))
        if not wanted:
            return None
        assert step.hidden_states is not None
        rope = self.model_state.rope_state
        states = StepStates(
            embeds=self._inputs(step.input_batch),
            hidden=step.hidden_states,
            positions=None if rope is None else rope.positions,
            layer=step.aux_hidden_states[0] if step.aux_hidden_states else None,
        )
        chosen = to_device(torch.from_numpy(tokens), self.device)
        return Emitted(wanted, self._rows.hidden_rows(states, chosen))

    def _inputs(self, batch: InputBatch) -> torch.Tensor | None:
        """What the model was given, [n, hidden_size], where it is wanted downstream."""
        if not isinstance(self.model_state, EmbedsModelState):
            return None
        if self.model_state.supports_mm_inputs or self.model_config.enable_prompt_embeds:
            return self.model_state.embeds
        # It was given token ids: media are switched off (`limit_mm_per_prompt`).
        return self.model.embed_input_ids(batch.input_ids[: batch.num_tokens])


def _step(batch: InputBatch) -> Step:
    """What a step computes, as the host knows it."""
    starts = batch.num_computed_tokens_np.astype(np.int64)
    return Step(batch.req_ids, starts, batch.num_scheduled_tokens.astype(np.int64))


class _Feed:
    """See `Feed`."""

    def __init__(self, inputs: RowState) -> None:
        self._inputs = inputs
        self.knows = inputs.knows
        self.mrope_positions = inputs.mrope_positions

    def embeds(self, batch: InputBatch) -> torch.Tensor:
        """See `Feed`."""
        return self._inputs.inputs(_step(batch))


class _WithRows(AsyncModelRunnerOutput):
    """A step's output that takes its rows along.

    Args:
        output: vLLM's.
        stage: Where rows are handed on.
        made: What the step made, on the device.
        main: The stream that makes it.
        side: The stream that copies it.
    """

    def __init__(
        self,
        output: AsyncModelRunnerOutput,
        stage: StageRows,
        made: Emitted,
        main: torch.cuda.Stream,
        side: torch.cuda.Stream,
    ) -> None:
        self._output = output
        self._stage = stage
        self._made = made  # keeps the device's tensors until they are copied
        self._copied = torch.cuda.Event(blocking=True)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            # `to` pins the memory that it copies into when it does not wait.
            rows = {
                name: rows.contiguous().to("cpu", non_blocking=True)
                for name, rows in made.rows.items()
            }
            self._on_host = Emitted(made.emissions, rows)
            self._copied.record(side)

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step's tokens and rows, and hand the rows on."""
        output = self._output.get_output()
        self._copied.synchronize()
        return with_spans(output, self._stage.hand_on(self._on_host))
