# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of the text encoders' families, trained offline on a few sentences."""

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    BertTokenizer,
    ByT5Tokenizer,
    CLIPTokenizer,
    GemmaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    T5Tokenizer,
)

from vllm_omni.testing.tiny.tokenizer import END_OF_TEXT, IM_END, IM_START, TEXT, make_tokenizer

VOCABULARY = 320
"""Tokens of the trained vocabularies, special ones included."""

ALPHABET = [chr(code) for code in range(33, 127)]

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif -%}
"""

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_NAMES = {
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}


def clip(max_length: int = 77) -> CLIPTokenizer:
    """Lower-case BPE over words, `<|startoftext|>` and `<|endoftext|>`, at most `max_length`."""
    vocabulary, merges = _clip_bpe()
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=max_length)


def t5(max_length: int = 512) -> T5Tokenizer:
    """Unigram pieces that end in `</s>`."""
    return T5Tokenizer(vocab=_t5_unigram(), extra_ids=0, model_max_length=max_length)


def byt5() -> ByT5Tokenizer:
    """Bytes; there is nothing to train."""
    return ByT5Tokenizer()


def qwen(
    *more: str, chat_template: str = CHAT_TEMPLATE, pad_token: str = END_OF_TEXT
) -> Qwen2Tokenizer:
    """Byte-level BPE with the chat format of Qwen and the tokens of its vision models."""
    special = (END_OF_TEXT, IM_START, IM_END, *VISION_TOKENS, *more)
    tokenizer = make_tokenizer(special, VISION_NAMES, chat_template)
    tokenizer.pad_token = pad_token
    return tokenizer


def gemma(max_length: int = 300) -> GemmaTokenizer:
    """BPE with spaces as `▁`; padded on the right as the pipelines ask."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    vocabulary, merges = _train_bpe(tokenizer, specials)
    return GemmaTokenizer(vocab=vocabulary, merges=merges, model_max_length=max_length)


def byte_level(
    specials: tuple[str, ...], *, chat_template: str | None = None, **named: object
) -> PreTrainedTokenizerFast:
    """Byte-level BPE as Llama 3, GLM and Mistral have it; `named` are e.g. `pad_token`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY + len(specials),
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=chat_template, model_max_length=4096, **named
    )


def bert(max_length: int = 77) -> BertTokenizer:
    """Word pieces that are single characters."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*specials, *ALPHABET, *(f"##{character}" for character in ALPHABET)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return BertTokenizer(vocab=vocabulary, model_max_length=max_length)


@cache
def _clip_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    specials = ["<|startoftext|>", "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<|endoftext|>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _train_bpe(tokenizer, specials, end_of_word_suffix="</w>", initial_alphabet=ALPHABET)


@cache
def _t5_unigram() -> list[tuple[str, float]]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return [(piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]


def _train_bpe(
    tokenizer: Tokenizer, specials: list[str], **options: object
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=specials, show_progress=False, **options
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]
