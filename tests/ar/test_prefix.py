# SPDX-License-Identifier: Apache-2.0
"""Which blocks two prompts of rows share (`vllm_omni.ar.prefix`), by vLLM's own block hashes."""

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from vllm_omni.ar.prefix import ContentHashing, contents_of

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

BLOCK = 4
ALGORITHM = "sha256"
HASH = get_hash_fn_by_name(ALGORITHM)


@pytest.fixture(autouse=True)
def root() -> None:
    """What an engine core does at its start."""
    init_none_hash(HASH)


def request(contents: str, request_id: str = "a", said: int = 0, **options: object) -> Request:
    """A request whose prompt has a position for each letter, and `said` tokens after it."""
    made = Request(
        request_id,
        [7] * len(contents),
        SamplingParams(max_tokens=9),
        None,
        block_hasher=get_request_block_hasher(BLOCK, HASH),
        **options,
    )
    positions = (letter.encode() for letter in contents)
    made = ContentHashing(ALGORITHM, BLOCK).hashed(made, contents_of(positions))
    made.append_output_token_ids([1] * said)
    return made


def shared(one: Request, other: Request) -> int:
    """Blocks that one would find of the other's."""
    same = [a == b for a, b in zip(one.block_hashes, other.block_hashes, strict=False)]
    return [*same, False].index(False)


@pytest.mark.parametrize(
    ("one", "other", "blocks"),
    [
        ("abcdefgh", "abcdefgh", 2),
        ("abcdefgh", "abcdefgX", 1),
        ("abcdefgh", "Xbcdefgh", 0),
        ("abcdefgh", "abcdefghij", 2),
        ("abcd", "bacd", 0),
        ("abc", "abc", 0),
    ],
)
def test_blocks_are_shared_as_far_as_contents_are_equal(one: str, other: str, blocks: int) -> None:
    assert shared(request(one, "a"), request(other, "b")) == blocks


def test_what_is_said_is_a_requests_own() -> None:
    """Token ids after the prompt are a part of the frames, and may be equal by chance."""
    one, other = request("abcdef", "a", said=6), request("abcdef", "b", said=6)
    assert len(one.block_hashes) == 3
    assert shared(one, other) == 1
    assert not set(one.block_hashes[1:]) & set(other.block_hashes[1:])
    again = request("abcdef", "a", said=6)
    assert shared(one, again) == 3, "it finds its own after a preemption"


def test_salts_and_adapters_keep_requests_apart() -> None:
    plain = request("abcdefgh")
    salted = [request("abcdefgh", cache_salt=salt) for salt in ("s", "s", "t")]
    assert shared(salted[0], salted[1]) == 2
    assert shared(salted[0], salted[2]) == shared(salted[0], plain) == 0
    adapted = request("abcdefgh", lora_request=LoRARequest("l", 1, "/l"))
    assert shared(adapted, plain) == 0


def test_blocks_of_ids_are_others() -> None:
    by_ids = Request(
        "a",
        [7] * 8,
        SamplingParams(max_tokens=9),
        None,
        block_hasher=get_request_block_hasher(BLOCK, HASH),
    )
    assert shared(by_ids, request("aaaaaaaa")) == 0


def test_the_request_stays_the_same() -> None:
    given = request("abcd", "x", cache_salt="s", priority=3, arrival_time=5.0, client_index=2)
    assert (given.request_id, given.cache_salt, given.priority) == ("x", "s", 3)
    assert (given.arrival_time, given.client_index, given.max_tokens) == (5.0, 2, 9)
    assert list(given.prompt_token_ids or ()) == [7] * 4
