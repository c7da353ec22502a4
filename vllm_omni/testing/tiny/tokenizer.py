# SPDX-License-Identifier: Apache-2.0
"""A small byte-level BPE tokenizer with the Qwen pre-tokenizer, trained on the text below."""

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

ALPHABET_SIZE = 256
ROLES = ("system", "user", "assistant")


def text_tokens(vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train on ``TEXT``; returns the vocabulary (bytes and merges, ids from 0) and its merges."""
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
        vocab_size=vocab_size,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    roles = "\n".join(ROLES) + "\n"
    tokenizer.train_from_iterator([TEXT] + [roles] * 50, trainer)
    model = tokenizer.to_str()
    import json

    bpe = json.loads(model)["model"]
    return bpe["vocab"], [tuple(merge) for merge in bpe["merges"]]
