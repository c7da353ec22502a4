# SPDX-License-Identifier: Apache-2.0
"""Serialization: every dtype and shape survives, and no input does worse than a ValueError."""

import struct

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.connectors.serialization import (
    _DTYPES,
    ALIGNMENT,
    MAX_HEADER_BYTES,
    decode,
    decode_rows,
    encode,
    encode_rows,
    header_of,
)

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype with random bytes, sometimes empty or not contiguous."""
    dtype = draw(st.sampled_from(sorted(_DTYPES.values(), key=str)))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = torch.Size(shape).numel() * dtype.itemsize
    top = 1 if dtype == torch.bool else 255
    raw = draw(st.lists(st.integers(0, top), min_size=count, max_size=count))
    tensor = torch.tensor(raw, dtype=torch.uint8).view(dtype).reshape(shape)
    if len(shape) >= 2 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    return tensor


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert right[name].dtype == tensor.dtype, name
        assert right[name].shape == tensor.shape, name
        assert raw_bytes(right[name]) == raw_bytes(tensor), name


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=20), tensors(), max_size=4))
def test_any_dtype_and_shape_survives(payload: dict[str, torch.Tensor]) -> None:
    encoded = encode(payload)
    target = bytearray(encoded.size)
    encoded.write_into(memoryview(target))

    assert bytes(target) == encoded.to_bytes()
    assert_same(payload, decode(target))


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.text(max_size=20), tensors(), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_rows_are_the_payloads_of_each(row: dict[str, torch.Tensor], count: int) -> None:
    rows = {name: torch.stack([tensor] * count) for name, tensor in row.items()}
    payloads = encode_rows(rows)

    assert payloads == [encode({n: t[None] for n, t in row.items()}).to_bytes()] * count
    assert len({header_of(each) for each in payloads}) == 1
    assert_same(rows, decode_rows(payloads))


def test_each_row_is_its_own() -> None:
    rows = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(4)}
    payloads = encode_rows(rows)

    for i, payload in enumerate(payloads):
        assert_same({name: each[i : i + 1] for name, each in rows.items()}, decode(payload))
    assert_same({name: each[[2, 0]] for name, each in rows.items()}, decode_rows(payloads[2::-2]))


def test_payloads_that_are_not_alike() -> None:
    (one,), (other,) = encode_rows({"a": torch.ones(1)}), encode_rows({"b": torch.ones(1)})
    (flat,) = [encode({"a": torch.tensor(1.0)}).to_bytes()]
    for broken in ([one, other], [one, one[:-1]], [one[:6]], [b"no payload", one], [], [flat]):
        with pytest.raises(ValueError, match="payload"):
            decode_rows(broken)


@pytest.mark.parametrize(
    "rows",
    [
        {},
        {"a": torch.ones(0, 2)},
        {"a": torch.ones(2), "b": torch.tensor(1.0)},
        {"a": torch.ones(2, 4), "b": torch.ones(5, 0)},
    ],
)
def test_rows_that_are_none(rows: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="one leading size"):
        encode_rows(rows)


@pytest.mark.parametrize("payload", [b"", b"VOT1", b"VOT1\xff\xff\xff"])
def test_the_header_of_what_is_cut_short(payload: bytes) -> None:
    assert header_of(payload) == payload


@pytest.mark.parametrize("dtype", sorted(_DTYPES))
def test_every_dtype(dtype: str) -> None:
    raw = torch.tensor([0, 1] * 16, dtype=torch.uint8)
    payload = {"x": raw.view(_DTYPES[dtype])}
    assert_same(payload, decode(encode(payload).to_bytes()))


def test_views_share_memory_with_the_buffer_and_are_aligned() -> None:
    payload = {"a": torch.arange(7), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.zeros(0)}
    buffer = bytearray(encode(payload).to_bytes())
    start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    result = decode(buffer)

    for name in ("a", "b"):
        assert (result[name].data_ptr() - start) % ALIGNMENT == 0
        assert start < result[name].data_ptr() < start + len(buffer)
    buffer[-6:] = bytes(6)
    assert result["b"].tolist() == [0, 0, 0]


def test_read_only_bytes_give_writable_tensors() -> None:
    encoded = encode({"a": torch.ones(4)}).to_bytes()
    decode(encoded)["a"].zero_()
    assert decode(encoded)["a"].tolist() == [1, 1, 1, 1]


def test_lazy_views_are_resolved() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    payload = {"conj": z.conj(), "imag": z.conj().imag, "wide": torch.ones(1).expand(3)}
    result = decode(encode(payload).to_bytes())
    assert result["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert result["imag"].tolist() == [-2, 4]
    assert result["wide"].tolist() == [1, 1, 1]


def test_gradients_stay_behind() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not decode(encode({"p": parameter}).to_bytes())["p"].requires_grad


def test_what_cannot_be_sent_names_the_tensor() -> None:
    with pytest.raises(TypeError, match=r"'adjacency'.*sparse"):
        encode({"adjacency": torch.eye(2).to_sparse()})


def test_header_is_bounded_when_writing() -> None:
    with pytest.raises(ValueError, match="header"):
        encode({"n" * MAX_HEADER_BYTES: torch.ones(1)})


GOOD = encode({"a": torch.arange(6).reshape(2, 3), "b": torch.tensor(True)}).to_bytes()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_a_value_error(garbage: bytes) -> None:
    for data in (garbage, GOOD[:4] + garbage, GOOD[:8] + garbage):
        with pytest.raises(ValueError, match="payload"):
            decode(data)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_one_wrong_byte_is_a_value_error_or_other_values(position: int, byte: int) -> None:
    data = bytearray(GOOD)
    data[position] = byte
    try:
        result = decode(data)
    except ValueError:
        return
    assert sum(tensor.nbytes for tensor in result.values()) <= len(GOOD)


@pytest.mark.parametrize("length", range(0, len(GOOD), 7))
def test_truncated_is_a_value_error(length: int) -> None:
    with pytest.raises(ValueError, match="payload"):
        decode(GOOD[:length])


@pytest.mark.parametrize(
    "entries",
    [
        [["a", "float32", [1 << 60]]],
        [["a", "float32", [1 << 63, 1 << 63]]],
        [["a", "float32", [0, 1 << 62]]],
        [["a", "float32", [1] * 65]],
        [["a", "float32", [-1]]],
        [["a", "float32", [1.5]]],
        [["a", "object", [1]]],
        [["a", "uint8", [0]], ["a", "uint8", [0]]],
        [["a", "uint8"]],
        [["a", "uint8", [0], 7]],
        {"a": 1},
    ],
)
def test_impossible_headers(entries: object) -> None:
    header = msgspec.msgpack.encode(entries)
    with pytest.raises(ValueError, match="payload"):
        decode(struct.pack("<4sI", b"VOT1", len(header)) + header)
