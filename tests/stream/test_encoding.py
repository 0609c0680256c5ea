"""Encodings of rows and ids, against FBGEMM's operators, a scalar reference, and mutated bytes."""

from __future__ import annotations

import zlib
from itertools import pairwise

import fbgemm_gpu  # noqa: F401  its import registers the operators
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.codec import decode_rows, encode_rows, pack_ids, unpack_ids
from delta_tracker.stream.format.encoding import Encoding
from tests.members import unknown
from tests.stream.bounds import bound

_FBGEMM = torch.ops.fbgemm
_TABLE_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
_MAX_ID = 2**63 - 1


def _rows(kind, num_rows, num_columns):
    generator = torch.Generator().manual_seed(num_columns)
    normal = torch.randn(num_rows, num_columns, generator=generator)
    if kind == "bits":
        bits = torch.randint(-(2**31), 2**31, normal.shape, generator=generator)
        return bits.to(torch.int32).view(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    return {
        "normal": lambda: normal,
        "trained": lambda: normal * 0.01,
        "constant": lambda: normal[:, :1].repeat(1, num_columns),
        "zero": lambda: torch.zeros_like(normal),
        "negative_zero": lambda: -torch.zeros_like(normal),
        "integers": lambda: torch.round(normal * 8),
        "offset": lambda: 1 + normal * 1e-6,
        "between_halves": lambda: 1024.5 + normal.abs() % 0.5,
        "half_limit": lambda: normal * 3e4,
        "large": lambda: normal * 1e5,
        "huge": lambda: (normal * 1.5e38).clamp(-3.4e38, 3.4e38),
        "small": lambda: normal * 1e-6,
        "tiny": lambda: normal * 1e-8,
        "subnormal": lambda: normal * 1e-40,
        "mixed": lambda: normal * 10.0 ** (torch.rand(normal.shape, generator=generator) * 40 - 30),
    }[kind]()


_KINDS = ["normal", "trained", "constant", "zero", "negative_zero", "integers", "offset", "half_limit", "large", "huge"]
_KINDS += ["between_halves", "small", "tiny", "subnormal", "mixed", "bits"]


def _fbgemm_encode(values, encoding):
    if encoding is Encoding.INT8:
        return _FBGEMM.FloatToFused8BitRowwiseQuantized(values)
    return _FBGEMM.FloatToFusedNBitRowwiseQuantizedSBHalf(values, 4)


def _fbgemm_decode(stored, encoding):
    if encoding is Encoding.INT8:
        return _FBGEMM.Fused8BitRowwiseQuantizedToFloat(stored)
    return _FBGEMM.FusedNBitRowwiseQuantizedSBHalfToFloat(stored, 4)


def _same_bits(left, right):
    return (left.view(torch.int32) == right.view(torch.int32)) | (left.isnan() & right.isnan())


_WIDTHS = [
    *((Encoding.INT8, columns) for columns in (1, 2, 3, 5, 7, 8, 9, 15, 31, 32, 33, 63, 64, 100, 128, 257)),
    *((Encoding.INT4, columns) for columns in (4, 8, 12, 28, 32, 36, 60, 64, 68, 100, 128, 256)),
]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(("encoding", "num_columns"), _WIDTHS)
def test_bytes_are_fbgemms(encoding, num_columns, kind):
    values = _rows(kind, 150, num_columns)
    stored = encode_rows(values, encoding)
    assert torch.equal(stored, _fbgemm_encode(values, encoding))
    decoded, expected = decode_rows(stored, encoding, num_columns, torch.float32), _fbgemm_decode(stored, encoding)
    same = _same_bits(decoded, expected)
    if encoding is Encoding.INT8:
        bias = stored[:, num_columns:].clone().view(torch.float32)[:, 1:]
        is_tie = bias.abs() < expected.abs() * 2.0**-28
        same |= is_tie & ((decoded - expected).abs() <= expected.abs() * 2.0**-23)
    assert same.all()


@pytest.mark.parametrize("encoding", [Encoding.INT8, Encoding.INT4])
def test_rows_that_float32_cannot_hold_read_as_nan(encoding):
    values = torch.randn(7, 64)
    values[0, 3] = torch.inf
    values[1, 60] = -torch.inf
    values[2] = torch.inf
    values[3] = -torch.inf
    values[4, 0], values[4, 1] = 3e38, -3e38
    values[5, 17] = torch.nan
    stored = encode_rows(values, encoding)
    decoded = decode_rows(stored, encoding, 64, torch.float32)
    assert decoded[:6].isnan().all()
    assert decoded[6].isfinite().all()
    mixed = [0, 1, 4]
    assert torch.equal(stored[mixed], _fbgemm_encode(values[mixed], encoding))


@pytest.mark.parametrize(
    ("lowest", "highest", "is_nan"), [(-65519, 0, False), (-65521, 0, True), (0, 982799, False), (0, 982801, True)]
)
def test_int4_reads_as_nan_beyond_float16(lowest, highest, is_nan):
    stored = encode_rows(torch.tensor([[lowest, highest, 0, 0]]).float(), Encoding.INT4)
    assert decode_rows(stored, Encoding.INT4, 4, torch.float32).isnan().all() == is_nan


def _scalar_int4(row):
    """Encode one row by FBGEMM's formulas in numpy scalars."""
    bias = np.float16(row.min())
    spread = np.float32(row.max() - np.float32(bias))
    scale = np.float16(spread / np.float32(15))
    scale = scale if scale != 0 else np.float16(1)
    inverse = np.float32(1) / np.float32(scale)
    codes = [min(max(int(np.rint((value - np.float32(bias)) * inverse)), 0), 15) for value in row]
    packed = bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
    return packed + scale.tobytes() + bias.tobytes()


@pytest.mark.parametrize("kind", ["normal", "constant", "zero", "offset", "small", "tiny", "subnormal"])
@pytest.mark.parametrize("num_columns", [2, 6, 10, 34, 64])
def test_int4_takes_columns_in_twos(num_columns, kind):
    values = _rows(kind, 20, num_columns)
    stored = encode_rows(values, Encoding.INT4)
    assert [bytes(row.tolist()) for row in stored] == [_scalar_int4(row) for row in values.numpy()]


@pytest.mark.parametrize("num_rows", [0, 1, 3, 70])
@pytest.mark.parametrize("dtype", _TABLE_DTYPES)
@pytest.mark.parametrize("encoding", list(Encoding))
def test_strided_rows(encoding, dtype, num_rows):
    wide = torch.randn(num_rows, 40).to(dtype)
    values = wide[:, 7:21]
    expected = encode_rows(values.contiguous(), encoding)
    assert expected.shape == (num_rows, encoding.width(14))
    assert expected.dtype == encoding.dtype

    assert torch.equal(encode_rows(values, encoding), expected)

    stored = torch.full((num_rows + 2, encoding.width(14) + 3), 7, dtype=encoding.dtype)[1:-1, 1:-2]
    decoded = decode_rows(stored.copy_(expected), encoding, 14, dtype)
    assert decoded.dtype == dtype
    assert torch.equal(decoded, decode_rows(expected, encoding, 14, dtype))
    assert ((decoded.double() - values.double()).abs() <= bound(values, encoding)).all()


def test_an_encoding_without_a_case_is_refused() -> None:
    encoding = unknown(Encoding)
    for act in (
        lambda: encoding.width(4),
        lambda: encoding.dtype,
        lambda: encoding.listed_form,
        lambda: encode_rows(torch.zeros(1, 4), encoding),
        lambda: decode_rows(torch.zeros(1, 4), encoding, 4, torch.float32),
    ):
        with pytest.raises((AssertionError, KeyError), match="UNKNOWN"):
            act()


@pytest.mark.parametrize("dtype", _TABLE_DTYPES)
def test_a_tables_own_encoding_keeps_every_bit(dtype):
    values = _rows("bits", 50, 9).to(dtype)
    encoding = Encoding.of(dtype)
    assert encoding.dtype == dtype
    assert not encoding.is_quantized
    decoded = decode_rows(encode_rows(values, encoding), encoding, 9, dtype)
    assert torch.equal(decoded.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(bound(values.clamp(-1, 1), Encoding.F32), torch.zeros(50, 1))


@pytest.mark.parametrize("dtype", _TABLE_DTYPES)
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("encoding", list(Encoding))
def test_values_read_back_lie_within_the_bound(encoding, kind, dtype):
    values = _rows(kind, 300, 32).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    decoded = decode_rows(encode_rows(values, encoding), encoding, 32, dtype)
    limit = bound(values, encoding).double()
    known = limit.isfinite()[:, 0]
    error = (decoded.double() - values.double()).abs()[known]
    assert (error <= limit[known]).all()
    assert decoded[known].isfinite().all()
    assert bool(known.all()) or kind in ("half_limit", "large", "huge", "mixed", "bits")


@pytest.mark.parametrize("encoding", [Encoding.F16, Encoding.BF16, Encoding.INT8, Encoding.INT4])
@pytest.mark.parametrize("kind", ["normal", "trained"])
def test_the_bound_is_tight(encoding, kind):
    values = _rows(kind, 2000, 64)
    error = (decode_rows(encode_rows(values, encoding), encoding, 64, torch.float32) - values).abs()
    assert (error / bound(values, encoding)).max() > 0.8


def test_float16_overflows_to_infinity():
    values = torch.tensor([[65504.0, 65521.0, -1e9]])
    assert decode_rows(encode_rows(values, Encoding.F16), Encoding.F16, 3, torch.float32).tolist() == [
        [65504.0, torch.inf, -torch.inf]
    ]
    assert bound(values, Encoding.F16).tolist() == [[torch.inf]]


def test_values_that_cannot_be_stored_are_refused():
    with pytest.raises(InvalidArgumentError, match="INT4 with an even number"):
        encode_rows(torch.zeros(2, 3), Encoding.INT4)
    with pytest.raises(InvalidArgumentError, match="Pass 1 or more"):
        encode_rows(torch.zeros(2, 0), Encoding.INT8)
    with pytest.raises(InvalidArgumentError, match="float32, float16 or bfloat16"):
        Encoding.of(torch.uint8)
    for shape, dtype in [((2, 11), torch.uint8), ((2, 12), torch.float32), ((12,), torch.uint8)]:
        with pytest.raises(InvalidArgumentError, match="stored="):
            decode_rows(torch.zeros(shape, dtype=dtype), Encoding.INT8, 4, torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("encoding", list(Encoding))
def test_bytes_are_the_same_on_cuda(encoding):
    values = torch.cat([_rows(kind, 150, 64) for kind in _KINDS])
    stored = encode_rows(values, encoding)
    on_device = encode_rows(values.cuda(), encoding)
    assert torch.equal(on_device.cpu().view(torch.uint8), stored.view(torch.uint8))
    decoded = decode_rows(on_device, encoding, 64, torch.float32)
    assert _same_bits(decoded.cpu(), decode_rows(stored, encoding, 64, torch.float32)).all()


# Ids

_IDS = st.one_of(
    st.sets(st.integers(0, 3000), max_size=200),
    st.sets(st.integers(0, _MAX_ID), max_size=20),
    st.builds(lambda first, count: set(range(first, first + count)), st.integers(0, 600), st.integers(0, 600)),
).map(sorted)


@given(_IDS)
@example([254])
@example([255])
@example([0, 255])
@example([0, 256])
@example([_MAX_ID])
@example([0, _MAX_ID])
def test_ids_survive_a_round_trip(ids):
    packed, escapes = pack_ids(torch.tensor(ids, dtype=torch.int64))
    assert packed.dtype == torch.uint8
    assert escapes.dtype == torch.int64
    assert escapes.tolist() == [gap for last, each in pairwise([-1, *ids]) if (gap := each - last - 1) >= 255]
    unpacked = unpack_ids(packed, escapes, len(ids))
    assert unpacked.dtype == torch.int64
    assert unpacked.tolist() == ids


@pytest.mark.parametrize("ids", [[-1], [3, 3], [4, 2], [-5, 7], [0, 1, 2, 1]])
def test_ids_in_another_order_are_refused(ids):
    with pytest.raises(InvalidArgumentError, match="ascending"):
        pack_ids(torch.tensor(ids))


def test_packing_leaves_the_ids_alone():
    ids = torch.arange(5)
    pack_ids(ids)
    assert ids.tolist() == [0, 1, 2, 3, 4]


def _deflated(gaps):
    return torch.tensor(list(zlib.compress(bytes(gaps))), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("gaps", "escapes", "num_ids", "message"),
    [
        ([1, 2], [], 1, "end after 1 ids"),
        ([1, 2], [], 3, "end after 3 ids"),
        ([], [], 1, "end after 1 ids"),
        ([1], [], 0, "end after 0 ids"),
        ([1], [], -1, "cannot hold -1"),
        ([1], [], 2**63, "cannot hold"),
        ([255], [], 1, "1 packed ids need an escape: 0 escapes given"),
        ([1], [300], 1, "0 packed ids need an escape: 1 escapes given"),
        ([255], [254], 1, "need an escape"),
        ([255], [-1], 1, "need an escape"),
        ([255, 0], [_MAX_ID], 2, "overflow int64"),
        ([0, 255], [_MAX_ID], 2, "overflow int64"),
        ([255, 255], [_MAX_ID, _MAX_ID], 2, "overflow int64"),
        ([255, 255, 255], [_MAX_ID, _MAX_ID, 300], 3, "overflow int64"),
    ],
)
def test_bytes_that_packing_never_writes_are_refused(gaps, escapes, num_ids, message):
    with pytest.raises(ValueError, match=message):
        unpack_ids(_deflated(gaps), torch.tensor(escapes, dtype=torch.int64), num_ids)


def test_packed_ids_of_a_wrong_length_are_refused():
    packed, escapes = pack_ids(torch.arange(0, 3000, 3))
    more = torch.cat([packed, torch.zeros(1, dtype=torch.uint8)])
    for each in (packed[:-1], packed[:-4], packed[:0], more):
        with pytest.raises(ValueError, match="packed"):
            unpack_ids(each, escapes, 1000)


def test_a_bomb_is_not_inflated(monkeypatch):
    bomb = _deflated(bytes(10_000_000))
    inflated = []
    real = zlib.decompressobj

    class Counting:
        def __init__(self):
            self.inner = real()

        def decompress(self, data, max_length):
            inflated.append(len(result := self.inner.decompress(data, max_length)))
            return result

        def __getattr__(self, name):
            return getattr(self.inner, name)

    monkeypatch.setattr(zlib, "decompressobj", Counting)
    with pytest.raises(ValueError, match="end after 1000 ids"):
        unpack_ids(bomb, torch.empty(0, dtype=torch.int64), 1000)
    assert inflated == [1001]


@given(_IDS.filter(len), st.data())
def test_mutated_bytes_are_refused_or_change_nothing(ids, data):
    packed, escapes = pack_ids(torch.tensor(ids, dtype=torch.int64))
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] = int(packed[place]) ^ data.draw(st.integers(1, 255))
    try:
        unpacked = unpack_ids(packed, escapes, len(ids))
    except ValueError:
        return
    assert unpacked.tolist() == ids


@given(
    st.binary(max_size=60), st.lists(st.integers(-(2**63), _MAX_ID), max_size=3), st.integers(-2, 300), st.booleans()
)
def test_any_bytes_give_ascending_ids_or_are_refused(data, escapes, num_ids, is_deflated):
    packed = _deflated(data) if is_deflated else torch.tensor(list(data), dtype=torch.uint8)
    try:
        ids = unpack_ids(packed, torch.tensor(escapes, dtype=torch.int64), num_ids).tolist()
    except ValueError:
        return
    assert len(ids) == num_ids
    assert all(left < right for left, right in pairwise([-1, *ids]))
