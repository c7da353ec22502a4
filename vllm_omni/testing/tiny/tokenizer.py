# SPDX-License-Identifier: Apache-2.0
"""A small byte-level BPE tokenizer with the Qwen pre-tokenizer, trained on the text below."""

import json
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

TEXT = """\
system
user
assistant
You are a helpful assistant. The user asks and the assistant answers in one or two sentences.
Describe this picture. What is in the image? A red square on a white ground, a blue circle.
Listen to the sound and say what you hear. It is a clear tone that rises and then falls again.
What happens in this video? A small ball moves from left to right and comes to rest at the end.
Hello, how are you today? I am well, thank you. The weather is warm and the sky is bright blue.
Please read the following sentence out loud, slowly, with a calm and friendly voice.
One, two, three, four, five. The quick brown fox jumps over the lazy dog near the river bank.
Bonjour, ça va? Très bien, merci, à bientôt. Guten Tag, schöne Grüße. ¿Qué tal? Mañana será.
你好，世界。请用普通话回答。今天天气很好。こんにちは。안녕하세요. Привет, мир.
"""

ROLES = ("system", "user", "assistant")
TEXT_TOKENS = 400
END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"


def make_tokenizer(
    special_tokens: tuple[str, ...], named: dict[str, str], chat_template: str
) -> Qwen2Tokenizer:
    """A tokenizer of ``TEXT_TOKENS`` text tokens followed by ``special_tokens``, in that order.

    Any text in Unicode normal form C round-trips. The role names are single tokens, as in the real
    vocabulary. ``named`` are the attributes that a processor reads, e.g.
    ``{"image_token": "<|IMAGE|>"}``.
    """
    vocab, merges = _train()
    vocab |= {token: len(vocab) + index for index, token in enumerate(special_tokens)}
    return qwen2_tokenizer(vocab, merges, special_tokens, named, chat_template, 32768)


def qwen2_tokenizer(
    vocab: dict[str, int],
    merges: Sequence[tuple[str, str]],
    special_tokens: Sequence[str],
    named: dict[str, str],
    chat_template: str,
    longest: int,
) -> Qwen2Tokenizer:
    """A tokenizer as the checkpoints of Qwen's families have it.

    Args:
        vocab: Ids of all tokens, special ones too.
        merges: Pairs that become one token.
        special_tokens: That are never a part of text.
        named: See `make_tokenizer`.
        chat_template: Jinja.
        longest: `model_max_length`, in tokens.
    """
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        unk_token=None,
        add_bos_token=False,
        clean_up_tokenization_spaces=False,
        split_special_tokens=False,
        model_max_length=longest,
        extra_special_tokens=named,
        chat_template=chat_template,
    )
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in special_tokens])
    return tokenizer


def whole_text_ids(tokenizer: Qwen2Tokenizer) -> set[int]:
    """The text tokens that are printable by themselves: no lone UTF-8 bytes, no controls."""
    texts = ((i, tokenizer.decode([i])) for i in range(TEXT_TOKENS))
    return {i for i, text in texts if "\ufffd" not in text and (text.isprintable() or text == "\n")}


def _train() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train on ``TEXT``; the vocabulary (256 bytes, then merges, ids from 0) and the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_TOKENS,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    roles = "\n".join(ROLES) + "\n"
    tokenizer.train_from_iterator([TEXT] + [roles] * 50, trainer)
    bpe = json.loads(tokenizer.to_str())["model"]
    return bpe["vocab"], [tuple(merge) for merge in bpe["merges"]]
