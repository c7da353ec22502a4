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


class Moss:
    """MOSS-TTS's delay model by the code of its published checkpoints (`modeling_moss_tts.py`)."""

    def __init__(self, folder: Path, config: dict) -> None:
        weights = load_file(folder / "model.safetensors")
        language = config["language_config"]
        self._model = qwen3(language, under(weights, "language_model."))
        self._config = config
        self._groups: int = config["n_vq"]
        self._tables = [weights[f"emb_ext.{g}.weight"] for g in range(self._groups)]
        self._heads = [weights[f"lm_heads.{g}.weight"] for g in range(self._groups + 1)]

    @torch.inference_mode()
    def rows(self, prompt: Sequence[Position], limit: int) -> tuple[list[Row], bool]:
        """Greedy rows [text token, *codes] up to the one that closes the first sound (or ends the
        answer without one), that one included; and whether there is such a one."""
        token = self._config
        inputs = [self._embedded(position) for position in prompt]
        rows: list[Row] = []
        length, since, sounding = 0, None, False
        while len(rows) < limit:
            hidden = self._model(inputs_embeds=torch.stack(inputs)[None]).last_hidden_state[0, -1]
            if since is None:
                text = self._text(hidden, len(rows), sounding)
            elif since < self._groups:
                text = token["audio_assistant_delay_slot_token_id"]
            else:
                text = token["audio_end_token_id"]
            codes = [self._code(g, hidden, length, since) for g in range(self._groups)]
            rows.append([text, *codes])
            if text in (token["audio_end_token_id"], token["im_end_token_id"]):
                return rows, True
            inputs.append(self._embedded(Position(text, codes)))
            if text == token["audio_start_token_id"]:
                sounding = True
            if sounding:
                length += 1
            if text == token["audio_assistant_delay_slot_token_id"]:
                since = 1 if since is None else since + 1
        return rows, False

    def _text(self, hidden: torch.Tensor, step: int, sounding: bool) -> int:
        token = self._config
        generate = token["audio_assistant_gen_slot_token_id"]
        delay = token["audio_assistant_delay_slot_token_id"]
        logits = self._heads[0] @ hidden
        if sounding:
            return max((generate, delay), key=lambda each: float(logits[each]))
        banned = [token["pad_token_id"], generate, delay, token["audio_end_token_id"]]
        if step <= self._groups:
            banned.append(token["im_end_token_id"])
        logits[banned] = float("-inf")
        return int(logits.argmax())

    def _code(self, group: int, hidden: torch.Tensor, length: int, since: int | None) -> int:
        pad = self._config["audio_pad_code"]
        if length <= group or (since is not None and group < since):
            return pad
        logits = self._heads[group + 1] @ hidden
        logits[pad] = float("-inf")
        return int(logits.argmax())

    def _embedded(self, position: Position) -> torch.Tensor:
        pads = [self._config["audio_pad_code"]] * self._groups
        codes = pads if position.codes is None else position.codes
        parts = [self._tables[g][code] for g, code in enumerate(codes)]
        return sum(parts, self._model.embed_tokens.weight[position.text])
