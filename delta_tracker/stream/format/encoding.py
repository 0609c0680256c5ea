"""Rows and ids in fewer bytes.

Letters: ``N`` rows, ``C`` columns, ``B`` bytes, ``E`` escapes.

``INT8`` and ``INT4`` are FBGEMM's fused row-wise formats byte for byte (``FloatToFused8BitRowwiseQuantized`` and
``FloatToFusedNBitRowwiseQuantizedSBHalf`` with 4 bits), written in torch: whoever applies rows need not have FBGEMM.
A value is stored as ``code = round((value - bias) * inverse)``, ties to even, and read as ``code * scale + bias``.

- ``INT8``: ``C`` codes of a byte, then ``scale = (maximum - minimum) / 255`` and ``bias = minimum`` in float32.
  ``inverse`` is ``255 / (maximum - minimum + 1e-8)``.
- ``INT4``: ``C / 2`` bytes of two codes, the earlier column in the low four bits, then ``scale`` and ``bias`` in
  float16. ``bias`` is the minimum rounded to float16, ``scale`` is ``(maximum - bias) / 15`` rounded to float16, or 1
  where that is 0, ``inverse`` is ``1 / scale``; codes are clamped to 0..15.

All arithmetic is float32. The two orders of magnitude that float32 cannot hold are kept visible rather than clamped:
a row reads as NaN in every column if it holds a NaN or an infinity, if ``maximum - minimum`` overflows float32, or if
``scale`` or ``bias`` of ``INT4`` overflows float16 (beyond 65504). ``F16`` makes infinities of values beyond 65504.

FBGEMM's own loops differ in three places. A row with NaN: the AVX2 loop overlooks some of them, by their column, and
reads the row as numbers; here it is NaN. A row of nothing but infinities: scale and bias depend on the loop; all
read it as NaN. Reading ``INT8``: the AVX2 loop is compiled to a fused multiply-add, the scalar loop rounds twice; here
the sum is formed in float64 and is the same on every device. It equals the fused one, except that where ``bias`` is
less than 2^-28 of the product it may round a tie the other way, to the neighbouring float32. FBGEMM's ``INT4`` takes
columns in fours alone, this one in twos.
"""

from __future__ import annotations

import zlib
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError

_EPSILON = 1e-8  # FBGEMM's guard against a range of 0 in INT8
_ROUNDER = 1.5 * 2.0**23  # a float32 this large has no fraction: adding it leaves the rounded sum in the low bits
_ESCAPE = 255
_DEFLATE_RATIO = 1032  # the most that deflate inflates by: 258 bytes from two bits, https://zlib.net/zlib_tech.html


class Encoding(StrEnum):
    """How the values of rows stand in a part; the value is the name in manifests."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    INT8 = "INT8"
    INT4 = "INT4"

    @classmethod
    def of(cls, dtype: torch.dtype) -> Encoding:
        """The encoding that stores rows of a table's dtype as they are.

        Raises:
            InvalidArgumentError: if it is none of float32, float16 and bfloat16.
        """
        for encoding, stored in _DTYPES.items():
            if stored == dtype and not encoding.is_quantized:
                return encoding
        raise InvalidArgumentError("dtype", dtype, "Rows are float32, float16 or bfloat16")

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored tensor: uint8 if it is quantized."""
        return _DTYPES[self]

    @property
    def is_quantized(self) -> bool:
        """Whether rows are stored as codes with a scale and a bias."""
        return self in (Encoding.INT8, Encoding.INT4)

    def width(self, num_columns: int) -> int:
        """Columns of the stored tensor.

        Raises:
            InvalidArgumentError: if the encoding cannot store rows of so many columns.
        """
        if num_columns < 1:
            raise InvalidArgumentError("num_columns", num_columns, "Rows have at least one column")
        if self is Encoding.INT8:
            return num_columns + 8
        if self is Encoding.INT4:
            if num_columns % 2:
                raise InvalidArgumentError("num_columns", num_columns, "INT4 needs an even number; use INT8")
            return num_columns // 2 + 4
        return num_columns


_DTYPES = {
    Encoding.F32: torch.float32,
    Encoding.F16: torch.float16,
    Encoding.BF16: torch.bfloat16,
    Encoding.INT8: torch.uint8,
    Encoding.INT4: torch.uint8,
}


def encode_rows(values: Tensor, encoding: Encoding, out: Tensor | None = None) -> Tensor:
    """Store rows. Rows of 16,384 x 64 at a time stay in the cache.

    Args:
        values: ``[N, C]`` floating, on any device, strided or not.
        encoding: how to store them.
        out: ``[N, encoding.width(C)]`` in ``encoding.dtype``, to write to instead of a new tensor.

    Returns:
        ``[N, encoding.width(C)]`` in ``encoding.dtype``, on the device of ``values``; ``out`` if it is given.

    Raises:
        InvalidArgumentError: if the encoding cannot store so many columns, or ``out`` has another shape or dtype.

    Example:
        >>> stored = encode_rows(torch.tensor([[0.0, 1.0, 2.0, 255.0]]), Encoding.INT8)
        >>> stored[0, :4].tolist(), decode_rows(stored, Encoding.INT8, 4, torch.float32).tolist()
        ([0, 1, 2, 255], [[0.0, 1.0, 2.0, 255.0]])
    """
    num_columns = values.shape[1]
    shape = (values.shape[0], encoding.width(num_columns))
    if out is None:
        out = torch.empty(shape, dtype=encoding.dtype, device=values.device)
    elif out.shape != shape or out.dtype != encoding.dtype:
        raise InvalidArgumentError("out", (tuple(out.shape), out.dtype), f"Pass {shape} in {encoding.dtype}")
    values = values.detach()
    if encoding is Encoding.INT8:
        return _encode_int8(values.float(), out)
    if encoding is Encoding.INT4:
        return _encode_int4(values.float(), out)
    return out.copy_(values)


def decode_rows(stored: Tensor, encoding: Encoding, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Read stored rows.

    Args:
        stored: ``[N, encoding.width(num_columns)]`` in ``encoding.dtype``, on any device, strided or not.
        encoding: how they are stored.
        num_columns: ``C`` of the rows.
        dtype: of the result; the table's.

    Returns:
        ``[N, C]`` in ``dtype``; ``stored`` itself if it already is that.

    Raises:
        InvalidArgumentError: if ``stored`` has another width or dtype.
    """
    if stored.shape[1:] != (encoding.width(num_columns),) or stored.dtype != encoding.dtype:
        raise InvalidArgumentError(
            "stored", (tuple(stored.shape), stored.dtype), f"{encoding} has other rows of {num_columns} columns"
        )
    if encoding is Encoding.INT8:
        scale_bias = _read_bytes(stored[:, num_columns:], torch.float32).double()
        rows = stored[:, :num_columns].double().mul_(scale_bias[:, :1]).add_(scale_bias[:, 1:]).float()
    elif encoding is Encoding.INT4:
        num_bytes = num_columns // 2
        pairs = stored[:, :num_bytes].to(torch.int16)
        codes = (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.uint8)
        scale_bias = _read_bytes(stored[:, num_bytes:], torch.float16).float()
        # Exact up to the addition: a code has 4 bits and a scale 11.
        rows = codes.float().mul_(scale_bias[:, :1]).add_(scale_bias[:, 1:])
    else:
        rows = stored
    return rows.to(dtype)


def pack_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Store ids by the gaps between them, a byte each, deflated.

    A gap is the number of ids that are left out between two, or before the first. Gaps from 255 up are the byte 255
    and stand in full beside. Deflate runs as zlib's ``Z_RLE``: gaps of a random set have no repetition to look for,
    only unequal frequencies, and gaps of a dense one are runs of zeros.

    Args:
        ids: ``[N]`` int64, ascending and unique, none negative.

    Returns:
        ``[B]`` uint8, a zlib stream, and ``[E]`` int64, the gaps from 255 up; both on the CPU.

    Raises:
        InvalidArgumentError: if the ids are not ascending, unique and without negatives.

    Example:
        >>> packed, escapes = pack_ids(torch.tensor([0, 1, 5, 1000]))
        >>> escapes, unpack_ids(packed, escapes, 4)
        (tensor([994]), tensor([   0,    1,    5, 1000]))
    """
    gaps = ids.detach().cpu().numpy().copy()
    gaps[1:] -= gaps[:-1] + 1
    if (gaps < 0).any():
        raise InvalidArgumentError("ids", ids, "Pass ids in ascending order, each once, none negative")
    deflate = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    packed = deflate.compress(np.minimum(gaps, _ESCAPE).astype(np.uint8)) + deflate.flush()
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8), torch.from_numpy(gaps[gaps >= _ESCAPE])


def unpack_ids(packed: Tensor, escapes: Tensor, num_ids: int) -> Tensor:
    """Read ids that :func:`pack_ids` stored.

    Memory is bounded by ``num_ids`` and by the size of ``packed``, whatever they hold. A part's hash is what guards
    against changed bytes; that result and arguments fit together is checked here.

    Args:
        packed: ``[B]`` uint8.
        escapes: ``[E]`` int64.
        num_ids: ``N``.

    Returns:
        ``[N]`` int64 on the CPU, ascending and unique, none negative.

    Raises:
        ValueError: if they are not the bytes of so many ids.
    """
    if not 0 <= num_ids <= _DEFLATE_RATIO * len(packed):
        raise ValueError(f"{len(packed)} packed bytes cannot hold {num_ids} ids")
    inflate = zlib.decompressobj()
    try:
        # One byte more than wanted: a limit of 0 would be none, and an end at the limit would not be seen.
        data = inflate.decompress(packed.cpu().contiguous().numpy().data, num_ids + 1)
    except zlib.error as error:
        raise ValueError(f"packed ids are no zlib stream: {error}") from error
    if len(data) != num_ids or not inflate.eof or inflate.unused_data:
        raise ValueError(f"packed ids do not end after {num_ids} ids")
    gaps = np.frombuffer(data, np.uint8).astype(np.int64)
    escaped, wide = np.flatnonzero(gaps == _ESCAPE), escapes.cpu().numpy()
    if len(escaped) != len(wide) or (wide < _ESCAPE).any():
        raise ValueError(f"{len(escaped)} packed ids have wide gaps, of which {len(wide)} are given")
    gaps[escaped] = wide
    gaps[1:] += 1
    ids = gaps.cumsum()
    # Every step is positive or overflowed: a sum that overflows shows as a descent.
    if (ids[1:] <= ids[:-1]).any():
        raise ValueError("packed ids pass the largest int64")
    return torch.from_numpy(ids)


def _encode_int8(values: Tensor, out: Tensor) -> Tensor:
    num_columns = values.shape[1]
    minimum = values.amin(1, keepdim=True)
    spread = values.amax(1, keepdim=True).sub_(minimum)
    levels = torch.full_like(spread, 255)  # a tensor: torch multiplies by the reciprocal of a number, on some devices
    codes = (values - minimum).mul_(levels / (spread + _EPSILON)).add_(_ROUNDER)
    out[:, :num_columns] = codes.view(torch.int32)
    out[:, num_columns:] = torch.cat([spread / levels, minimum], 1).view(torch.uint8)
    return out


def _encode_int4(values: Tensor, out: Tensor) -> Tensor:
    num_bytes = values.shape[1] // 2
    minimum = values.amin(1, keepdim=True).half()
    bias = minimum.float()
    spread = values.amax(1, keepdim=True).sub_(bias)
    scale = (spread / torch.full_like(spread, 15)).half()
    scale.masked_fill_(scale == 0, 1)
    codes = (values - bias).mul_(torch.ones_like(spread) / scale.float()).clamp_(0, 15).add_(_ROUNDER)
    pairs = codes.view(torch.int32).to(torch.uint8).view(torch.int16)
    out[:, :num_bytes] = (pairs >> 4).bitwise_or_(pairs)
    out[:, num_bytes:] = torch.cat([scale, minimum], 1).view(torch.uint8)
    return out


def _read_bytes(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy: scale and bias stand at any address."""
    return stored.clone(memory_format=torch.contiguous_format).view(dtype)
