# SPDX-License-Identifier: Apache-2.0
"""Requests that need no download: vLLM's own datasets, with sounds, and a list of sentences."""

import argparse
import base64
import io
import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

import numpy as np
import soundfile
from vllm.benchmarks.datasets import RandomMultiModalDataset, SampleRequest, get_samples
from vllm.tokenizers import TokenizerLike

from vllm_omni.errors import OmniConfigError

SENTENCES = ("sentences", "sentences-mm")
"""Of ours: the shipped sentences, alone and with random media."""
AUDIO_RATE = 16_000
LIMITS = {**RandomMultiModalDataset.DEFAULT_LIMIT_MM_PER_PROMPT, "audio": 1}
CHAT_BACKENDS = ("openai-chat", "openai-audio")


def has_sounds(buckets: Mapping[tuple[int, int, int], float]) -> bool:
    """Whether there is a bucket of sounds among those of random media."""
    return any(height == 0 for height, _, _ in buckets)


class RandomMedia(RandomMultiModalDataset):
    """vLLM's random pictures and videos, and sounds: a bucket `(0, seconds, channels)`."""

    def map_config_to_modality(self, config: tuple[int, int, int]) -> str:
        """See `RandomMultiModalDataset`."""
        return "audio" if config[0] == 0 else super().map_config_to_modality(config)

    def generate_mm_item(self, mm_item_config: tuple[int, int, int]) -> Mapping[str, Any]:
        """See `RandomMultiModalDataset`."""
        if self.map_config_to_modality(mm_item_config) != "audio":
            return super().generate_mm_item(mm_item_config)
        _, seconds, channels = (int(each) for each in mm_item_config)
        noise = self._rng.uniform(-0.5, 0.5, (seconds * AUDIO_RATE, channels))
        file = io.BytesIO()
        soundfile.write(file, noise.astype(np.float32), AUDIO_RATE, format="WAV")
        data = base64.b64encode(file.getvalue()).decode()
        return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}}

    def media(self, args: argparse.Namespace) -> Iterator[list[Mapping[str, Any]]]:
        """Endlessly, the media of one request after another."""
        least, most, limits, buckets = self.get_mm_item_sampling_params(
            args.random_mm_base_items_per_request,
            args.random_mm_num_mm_items_range_ratio,
            args.random_mm_limit_mm_per_prompt,
            args.random_mm_bucket_config,
        )
        while True:
            configs = self.get_mm_item_iterator(least, most, buckets, limits)
            yield [self.generate_mm_item(config) for config in configs]


def requests_of(
    args: argparse.Namespace, tokenizer: TokenizerLike | None, ours: tuple[str, ...]
) -> list[SampleRequest]:
    """The requests of a run.

    Args:
        args: Of the command line.
        tokenizer: Of the model; the sentences need none.
        ours: Backends that take media beside vLLM's.

    Raises:
        OmniConfigError: The dataset cannot be had with these arguments.
    """
    if args.num_prompts <= 0:
        raise OmniConfigError(f"--num-prompts: must be above 0, not {args.num_prompts}")
    if args.dataset_name in SENTENCES:
        return _sentences(args, tokenizer)
    if tokenizer is None:
        raise OmniConfigError(
            f"--dataset-name {args.dataset_name} needs a tokenizer: name one with --tokenizer, or "
            f"take {' or '.join(SENTENCES)}"
        )
    if args.dataset_name == "random-mm":
        return _random_media(args, tokenizer)
    return get_samples(args, tokenizer, multimodal_backends=(*CHAT_BACKENDS, *ours))


def _sentences(args: argparse.Namespace, tokenizer: TokenizerLike | None) -> list[SampleRequest]:
    texts = (files(__package__) / "sentences.txt").read_text(encoding="utf-8").splitlines()
    if not args.disable_shuffle:
        np.random.default_rng(args.seed).shuffle(texts)
    media = _media(args).media(args) if args.dataset_name.endswith("-mm") else None
    requests = []
    for index in range(args.num_prompts):
        text = texts[index % len(texts)]
        requests.append(
            SampleRequest(
                prompt=text,
                prompt_len=len(tokenizer.encode(text)) if tokenizer else 0,
                expected_output_len=args.output_len or 0,
                multi_modal_data=next(media) if media else None,
                request_id=f"{args.request_id_prefix}{index}",
            )
        )
    return requests


def _media(args: argparse.Namespace) -> RandomMedia:
    if args.dataset_path is not None:
        raise OmniConfigError(f"--dataset-path: {args.dataset_name} is made up and has no file")
    return RandomMedia(random_seed=args.seed)


def _random_media(args: argparse.Namespace, tokenizer: TokenizerLike) -> list[SampleRequest]:
    return _media(args).sample(
        tokenizer=tokenizer,
        num_requests=args.num_prompts,
        prefix_len=args.random_prefix_len,
        range_ratio=json.loads(args.random_range_ratio),
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        base_items_per_request=args.random_mm_base_items_per_request,
        limit_mm_per_prompt=args.random_mm_limit_mm_per_prompt,
        num_mm_items_range_ratio=args.random_mm_num_mm_items_range_ratio,
        bucket_config=args.random_mm_bucket_config,
        request_id_prefix=args.request_id_prefix,
    )
