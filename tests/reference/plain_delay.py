# SPDX-License-Identifier: Apache-2.0
"""Codec language models of which no package runs here, written down plainly.

One request, one code at a time, no cache: the whole sequence goes through transformers' backbone in
each step. Weights are read from the checkpoint by the names that it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3Model

Row = list[int]


@dataclass
class Position:
    """What stands at a position: a text token, a row of codes, or both (None for neither)."""

    text: int | None = None
    codes: Sequence[int] | None = None


def qwen3(config: dict, weights: dict[str, torch.Tensor]) -> Qwen3Model:
    """The backbone, in float32."""
    model = Qwen3Model(Qwen3Config(**config, attn_implementation="eager"))
    model.load_state_dict(weights)
    return model.eval()


def under(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors under a prefix, named without it."""
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


class HiggsV3:
    """Higgs-Audio v3 by its published description (`sglang-omni` 0.1.3, row A-60)."""

    def __init__(self, folder: Path, text_config: dict, groups: int, begin: int, end: int) -> None:
        weights = load_file(folder / "model.safetensors")
        backbone = under(weights, "body.")
        backbone["embed_tokens.weight"] = weights["tied.embedding.text_embedding.weight"]
        self._model = qwen3({**text_config, "rope_theta": 1e6}, backbone)
        table = weights["tied.embedding.modality_embeddings.0.embedding.weight"]
        self._tables = table.view(groups, -1, table.shape[-1])
        self._groups, self._begin, self._end = groups, begin, end

    @torch.inference_mode()
    def rows(self, prompt: Sequence[Position], limit: int) -> tuple[list[Row], bool]:
        """Greedy rows, and whether they ended by themselves."""
        inputs = [self._embedded(position) for position in prompt]
        rows: list[Row] = []
        countdown: int | None = None
        while len(rows) < limit:
            hidden = self._model(inputs_embeds=torch.stack(inputs)[None]).last_hidden_state[0, -1]
            row = [self._code(g, hidden, len(rows), countdown) for g in range(self._groups)]
            rows.append(row)
            inputs.append(self._embedded(Position(codes=row)))
            if countdown is not None:
                countdown -= 1
            elif row[0] == self._end:
                countdown = self._groups - 2
            if countdown is not None and countdown <= 0:
                return rows, True
        return rows, False

    def _code(self, group: int, hidden: torch.Tensor, step: int, countdown: int | None) -> int:
        if countdown is not None and group < self._groups - countdown:
            return self._end
        if group > step:
            return self._begin
        logits = self._tables[group] @ hidden
        logits[self._begin] = float("-inf")
        if group > 0 or countdown is not None:
            logits[self._end] = float("-inf")
        return int(logits.argmax())

    def _embedded(self, position: Position) -> torch.Tensor:
        if position.codes is None:
            return self._model.embed_tokens.weight[position.text]
        return sum(self._tables[g][code] for g, code in enumerate(position.codes))


def frames_of(rows: Sequence[Row], groups: int) -> torch.Tensor:
    """int64 [n, groups]: code k of frame i stands in row i + k."""
    count = max(0, len(rows) - groups + 1)
    frames = [[rows[i + k][k] for k in range(groups)] for i in range(count)]
    return torch.tensor(frames, dtype=torch.int64).reshape(-1, groups)
