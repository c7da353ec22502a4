# SPDX-License-Identifier: Apache-2.0
"""Prefix hits of prompts that are rows: block hashes that know what stands at each position.

vLLM hashes a block by its token ids. Those of a codec language model's prompt are placeholders, all
alike, so their blocks are hashed by the contents of their positions. What follows the prompt is
said by whole frames, of which token ids are a part, and is a request's own.
"""

import hashlib
from collections.abc import Callable, Iterable

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    hash_block_tokens,
)
from vllm.v1.request import Request

CONTENT_BYTES = hashlib.sha256().digest_size
"""Of each position, in `contents_of`."""


def contents_of(positions: Iterable[bytes]) -> bytes:
    """What a prompt's positions are recognized by: `CONTENT_BYTES` for each, in order."""
    return b"".join(hashlib.sha256(position).digest() for position in positions)


class ContentHashing:
    """Block hashes of requests whose prompts are rows.

    Args:
        algorithm: vLLM's `prefix_caching_hash_algo`.
        block_size: Tokens of a hash.
    """

    def __init__(self, algorithm: str, block_size: int) -> None:
        self._hash = get_hash_fn_by_name(algorithm)
        self._block_size = block_size

    def hashed(self, request: Request, contents: bytes) -> Request:
        """The same request, not yet scheduled, with hashes of its contents.

        vLLM makes a request with the hasher that its engine core has, and takes another one only
        where a request is made: so it is made again.
        """
        assert len(contents) == CONTENT_BYTES * request.num_prompt_tokens
        return Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            pooling_params=None,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            priority=request.priority,
            trace_headers=request.trace_headers,
            block_hasher=self._hasher(contents),
            session_id=request.session_id,
            abort_immediately=request.abort_immediately,
            kv_hints=request.kv_hints,
        )

    def _hasher(self, contents: bytes) -> Callable[[Request], list[BlockHash]]:
        def hashes(request: Request) -> list[BlockHash]:
            """Of the full blocks that have none yet."""
            made: list[BlockHash] = []
            parent = request.block_hashes[-1] if request.block_hashes else None
            start = len(request.block_hashes) * self._block_size
            while (stop := start + self._block_size) <= request.num_tokens:
                # An adapter and the salt that the caller gave.
                keys, _ = generate_block_hash_extra_keys(request, start, stop, 0)
                own = _block_key(request, contents, start, stop)
                parent = hash_block_tokens(
                    self._hash, parent, request.all_token_ids[start:stop], (*(keys or ()), own)
                )
                made.append(parent)
                start = stop
            return made

        return hashes


def _block_key(request: Request, contents: bytes, start: int, stop: int) -> tuple[str, bytes | str]:
    """What tells a block from others: what stands there, or whose it is."""
    if stop <= request.num_prompt_tokens:
        return ("rows", contents[start * CONTENT_BYTES : stop * CONTENT_BYTES])
    return ("request", request.request_id)
