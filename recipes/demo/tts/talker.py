# SPDX-License-Identifier: Apache-2.0
"""The talker and its code predictor as plain modules, for training; names are the checkpoint's."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recipes.demo.tts.layout import CODEBOOK, GROUPS, PREDICTOR, TALKER, token_ids


class Norm(nn.RMSNorm):
    """In the precision of its input, for which there is a fused kernel."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., width] -> the same."""
        weight = self.weight.to(hidden.dtype)
        return F.rms_norm(hidden, self.normalized_shape, weight, self.eps)


class Attention(nn.Module):
    """Causal attention with normalized queries and keys."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self._size = config["head_dim"]
        width, inner = config["hidden_size"], config["num_attention_heads"] * self._size
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, inner, bias=False)
        self.v_proj = nn.Linear(width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.q_norm = Norm(self._size, config["rms_norm_eps"])
        self.k_norm = Norm(self._size, config["rms_norm_eps"])

    def forward(
        self, hidden: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """[batch, time, width] -> the same; `turn` is of `rotation`."""
        batch, time, _ = hidden.shape
        shape = (batch, time, -1, self._size)
        query = rotated(self.q_norm(self.q_proj(hidden).view(shape)).transpose(1, 2), turn)
        key = rotated(self.k_norm(self.k_proj(hidden).view(shape)).transpose(1, 2), turn)
        value = self.v_proj(hidden).view(shape).transpose(1, 2)
        query, key = query.to(value.dtype), key.to(value.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, time, -1))


class FeedForward(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., width] -> the same."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = Norm(config["hidden_size"], config["rms_norm_eps"])
        self.post_attention_layernorm = Norm(config["hidden_size"], config["rms_norm_eps"])

    def forward(
        self, hidden: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """[batch, time, width] -> the same."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), turn)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    """A Qwen3 decoder without embeddings."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self._size, self._base = config["head_dim"], config["rope_theta"]
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = Norm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] -> the same."""
        turn = rotation(hidden.shape[1], self._size, self._base, hidden.device)
        for layer in self.layers:
            hidden = layer(hidden, turn)
        return self.norm(hidden)


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences, padded at their end.

    Attributes:
        text: int64 [batch, time], -1 for no text token.
        codes: int64 [batch, time, groups], -1 for none; what is fed.
        wanted: int64 [batch, time, groups], the frame that follows; -1 where none is to be learnt,
            and in further groups after the last frame.
    """

    text: torch.Tensor
    codes: torch.Tensor
    wanted: torch.Tensor


class CodePredictor(nn.Module):
    """Completes frames."""

    def __init__(self) -> None:
        super().__init__()
        wide, narrow = TALKER["hidden_size"], PREDICTOR["hidden_size"]
        others = range(GROUPS - 1)
        self.model = Decoder(PREDICTOR)
        self.model.codec_embedding = nn.ModuleList(nn.Embedding(CODEBOOK, wide) for _ in others)
        self.lm_head = nn.ModuleList(nn.Linear(narrow, CODEBOOK, bias=False) for _ in others)
        self.small_to_mtp_projection = nn.Linear(wide, narrow)


class Talker(nn.Module):
    """`talker.*` of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        width, text = TALKER["hidden_size"], TALKER["text_hidden_size"]
        self.model = Decoder(TALKER)
        self.model.codec_embedding = nn.Embedding(TALKER["vocab_size"], width)
        self.model.text_embedding = nn.Embedding(TALKER["text_vocab_size"], text)
        self.text_projection = nn.Module()
        self.text_projection.linear_fc1 = nn.Linear(text, text)
        self.text_projection.linear_fc2 = nn.Linear(text, width)
        self.codec_head = nn.Linear(width, TALKER["vocab_size"], bias=False)
        self.code_predictor = CodePredictor()
        self.apply(_initialize)

    def hidden(self, text: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Of a `Batch`'s inputs, [batch, time, width]."""
        inner = F.silu(
            self.text_projection.linear_fc1(self.model.text_embedding(text.clamp(min=0)))
        )
        hidden = self.text_projection.linear_fc2(inner) * (text >= 0)[..., None]
        for group in range(GROUPS):
            given = codes[..., group]
            hidden = hidden + self._embedding(group)(given.clamp(min=0)) * (given >= 0)[..., None]
        return self.model(hidden)

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean cross-entropy of first codes, and of the others."""
        hidden = self.hidden(batch.text, batch.codes)
        learnt = batch.wanted[..., 0] >= 0
        hidden, wanted = hidden[learnt], batch.wanted[learnt]
        first = F.cross_entropy(self.codec_head(hidden).float(), wanted[:, 0])
        whole = wanted[:, -1] >= 0
        return first, self._others(hidden[whole], wanted[whole])

    def _others(self, hidden: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        predictor = self.code_predictor
        given = [self._embedding(group)(frames[:, group]) for group in range(GROUPS - 1)]
        inputs = torch.stack([hidden, *given], dim=1)
        made = predictor.model(predictor.small_to_mtp_projection(inputs))
        losses = [
            F.cross_entropy(head(made[:, group + 1]).float(), frames[:, group + 1])
            for group, head in enumerate(predictor.lm_head)
        ]
        return torch.stack(losses).mean()

    def _embedding(self, group: int) -> nn.Embedding:
        if group == 0:
            return self.model.codec_embedding
        return self.code_predictor.model.codec_embedding[group - 1]

    @torch.no_grad()
    def complete(
        self, hidden: torch.Tensor, first: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """Frames, int64 [batch, groups], of hidden states [batch, width] and first codes."""
        predictor = self.code_predictor
        inputs, codes = [hidden, self._embedding(0)(first)], [first]
        for index, head in enumerate(predictor.lm_head):
            made = predictor.model(predictor.small_to_mtp_projection(torch.stack(inputs, dim=1)))
            codes.append(drawn(head(made[:, -1]), temperature))
            if index + 1 < GROUPS - 1:
                inputs.append(self._embedding(index + 1)(codes[-1]))
        return torch.stack(codes, dim=1)


def drawn(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[batch, vocabulary] -> int64 [batch]; at temperature 0 the likeliest."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    return (logits.float() / temperature).softmax(dim=-1).multinomial(1)[:, 0]


@torch.no_grad()
def generate(
    talker: Talker, prompts: list[tuple[list[int], list[list[int]]]], most: int, temperature: float
) -> list[torch.Tensor]:
    """Speak; everything is computed anew for each frame.

    Args:
        talker: In evaluation mode.
        prompts: Text tokens and rows of codes, of the same number of positions each.
        most: Frames.
        temperature: 0 for the likeliest.

    Returns:
        int64 [frames, groups] of each.
    """
    device = talker.codec_head.weight.device
    lengths = torch.tensor([len(text) for text, _ in prompts], device=device)
    count, longest = len(prompts), int(lengths.max())
    text = torch.full((count, longest + most), -1, device=device)
    codes = torch.full((count, longest + most, GROUPS), -1, device=device)
    pad = token_ids()["<tts_pad>"]
    for row, (tokens, rows) in enumerate(prompts):
        text[row, : len(tokens)] = torch.tensor(tokens, device=device)
        text[row, len(tokens) :] = pad
        codes[row, : len(tokens)] = torch.tensor(rows, device=device)
    rows = torch.arange(count, device=device)
    end = TALKER["codec_eos_token_id"]
    frames = torch.full((count,), most, device=device)
    for step in range(most):
        now = int(lengths.max()) + step
        hidden = talker.hidden(text[:, :now], codes[:, :now])[rows, lengths + step - 1]
        logits = talker.codec_head(hidden).float()
        allowed = torch.full_like(logits, float("-inf"))
        allowed[:, :CODEBOOK] = 0
        if step >= 2:
            allowed[:, end] = 0
        first = drawn(logits + allowed, temperature)
        frames = torch.where((first == end) & (frames == most), step, frames)
        if bool((frames < most).all()):
            break
        codes[rows, lengths + step] = talker.complete(
            hidden, first.clamp(max=CODEBOOK - 1), temperature
        )
    return [
        codes[row, start : start + n]
        for row, (start, n) in enumerate(zip(lengths.tolist(), frames.tolist(), strict=True))
    ]


def rotation(
    time: int, size: int, base: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [time, size]."""
    speeds = base ** (-torch.arange(0, size, 2, device=device).float() / size)
    angles = torch.outer(torch.arange(time, device=device).float(), speeds).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotated(heads: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """[..., time, size] -> the same."""
    cosines, sines = turn
    left, right = heads.chunk(2, dim=-1)
    return (heads * cosines + torch.cat([-right, left], dim=-1) * sines).to(heads.dtype)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.3)
