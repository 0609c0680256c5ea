"""Conversion of rows and ids to the stored form of a part, and back.

``INT8`` and ``INT4`` are byte for byte FBGEMM's fused row-wise formats (``FloatToFused8BitRowwiseQuantized`` and
``FloatToFusedNBitRowwiseQuantizedSBHalf`` with 4 bits). They are implemented in torch, so readers do not need FBGEMM. A
value is stored as ``code = round((value - bias) * inverse)``, ties to even, and read as ``code * scale + bias``.

- ``INT8``: codes of one byte, then ``scale = (maximum - minimum) / 255`` and ``bias = minimum`` in float32. ``inverse``
  is ``255 / (maximum - minimum + 1e-8)``.
- ``INT4``: bytes of two codes, the earlier column in the low four bits, then ``scale`` and ``bias`` in float16.
  ``bias`` is the minimum rounded to float16. ``scale`` is ``(maximum - bias) / 15`` rounded to float16, or 1 if this is
  0. ``inverse`` is ``1 / scale``. Codes are clamped to 0..15.

Rows are encoded in float32. Overflow is not clamped: every column of a row reads as NaN if the row contains a NaN or an
infinity, if ``maximum - minimum`` overflows float32, or if ``scale`` or ``bias`` of ``INT4`` overflows float16 (beyond
65504). ``F16`` turns values that round to more than 65504 into infinities.

FBGEMM's implementations differ from this one as follows:

- Row with NaN: FBGEMM's AVX2 kernel ignores a NaN in some columns, and the row reads as numbers. Here it reads as NaN.
- Row of infinities only: the stored scale and bias depend on which FBGEMM kernel runs. The row always reads as NaN.
- Reading ``INT8``: the AVX2 kernel uses a fused multiply-add, the scalar kernel rounds twice. Here the sum is computed
  in float64 and is the same on every device. It equals the fused result, except that a tie may round to the other
  neighboring float32 if ``bias`` is less than 2^-28 of the product.
- ``INT4``: FBGEMM needs a multiple of four columns; this implementation needs an even number of columns.
"""

import zlib
from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.encoding import Encoding

_EPSILON = 1e-8  # FBGEMM's guard against a range of 0 in INT8
_ROUNDER = 1.5 * 2.0**23  # adding it to a small float32 leaves the rounded value in the low bits of the sum
_ESCAPE = 255
_DEFLATE_RATIO = 1032  # maximum ratio of deflate: 258 bytes from two bits, https://zlib.net/zlib_tech.html


def encode_rows(values: Tensor, encoding: Encoding) -> Tensor:
    """Encode ``values``, ``[N, C]`` of a floating point dtype, as ``[N, encoding.width(C)]`` in ``encoding.dtype``.

    ``values`` may be on any device and need not be contiguous. The result is on the same device. Encode many rows in
    chunks that fit the CPU cache, for example 16,384 x 64 values. Raises InvalidArgumentError if ``C`` columns are not
    supported.
    """
    num_rows, num_columns = values.shape
    out = torch.empty(num_rows, encoding.width(num_columns), dtype=encoding.dtype, device=values.device)
    values = values.detach()
    match encoding:
        case Encoding.F32 | Encoding.F16 | Encoding.BF16:
            return out.copy_(values)
        case Encoding.INT8:
            return _encode_int8(values.float(), out)
        case Encoding.INT4:
            return _encode_int4(values.float(), out)
        case _:
            assert_never(encoding)


def decode_rows(stored: Tensor, encoding: Encoding, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Decode ``stored``, ``[N, encoding.width(num_columns)]``, to ``[N, num_columns]`` in ``dtype``.

    ``stored`` may be on any device and need not be contiguous. Returns ``stored`` if no conversion is needed.
    """
    if stored.shape[1:] != (encoding.width(num_columns),) or stored.dtype != encoding.dtype:
        remedy = f"Pass rows of {num_columns} columns in {encoding}"
        raise InvalidArgumentError("stored", (tuple(stored.shape), stored.dtype), remedy)
    match encoding:
        case Encoding.F32 | Encoding.F16 | Encoding.BF16:
            rows = stored
        case Encoding.INT8:
            scale_bias = _read_bytes(stored[:, num_columns:], torch.float32).double()
            rows = stored[:, :num_columns].double().mul_(scale_bias[:, :1]).add_(scale_bias[:, 1:]).float()
        case Encoding.INT4:
            num_bytes = num_columns // 2
            pairs = stored[:, :num_bytes].to(torch.int16)
            codes = (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.uint8)
            scale_bias = _read_bytes(stored[:, num_bytes:], torch.float16).float()
            # The product is exact: a code has 4 bits and a scale 11.
            rows = codes.float().mul_(scale_bias[:, :1]).add_(scale_bias[:, 1:])
        case _:
            assert_never(encoding)
    return rows.to(dtype)


def pack_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Encode ``ids``, ``[N]`` int64 on any device, as the gaps between them, in one byte each, compressed with zlib.

    A gap is the number of missing ids between two ids, or before the first id. A gap of 255 or more (an escape) is
    stored as the byte 255, and in full in a second tensor. The results, on the CPU, are ``[B]`` uint8, a zlib stream,
    and ``[E]`` int64, the escapes. Raises InvalidArgumentError if the ids are not ascending, unique and non-negative.
    """
    gaps = ids.detach().cpu().numpy().copy()
    gaps[1:] -= gaps[:-1] + 1
    if (gaps < 0).any():
        raise InvalidArgumentError("ids", ids, "Pass ascending, unique, non-negative ids")
    # Gaps of a random set have unequal frequencies but no repetitions, and gaps of a dense set are runs of zeros.
    deflate = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    packed = deflate.compress(np.minimum(gaps, _ESCAPE).astype(np.uint8)) + deflate.flush()
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8), torch.from_numpy(gaps[gaps >= _ESCAPE])


def unpack_ids(packed: Tensor, escapes: Tensor, num_ids: int) -> Tensor:
    """Decode ``num_ids`` ids that :func:`pack_ids` encoded, to ``[N]`` int64 on the CPU.

    Memory is bounded by ``num_ids`` and the size of ``packed``, even if the contents are invalid. Raises ValueError if
    the arguments contradict each other. Other corruption must be detected by the hash of the part.
    """
    if not 0 <= num_ids <= _DEFLATE_RATIO * len(packed):
        raise ValueError(f"{len(packed)} packed bytes cannot hold {num_ids} ids")
    inflate = zlib.decompressobj()
    try:
        # One byte more than expected: a limit of 0 means no limit, and zlib does not report an end at the limit.
        data = inflate.decompress(packed.cpu().contiguous().numpy().data, num_ids + 1)
    except zlib.error as error:
        raise ValueError(f"packed ids are not a zlib stream: {error}") from error
    if len(data) != num_ids or not inflate.eof or inflate.unused_data:
        raise ValueError(f"packed ids do not end after {num_ids} ids")
    gaps = np.frombuffer(data, np.uint8).astype(np.int64)
    escaped, wide = np.flatnonzero(gaps == _ESCAPE), escapes.cpu().numpy()
    if len(escaped) != len(wide) or (wide < _ESCAPE).any():
        raise ValueError(f"{len(escaped)} packed ids need an escape: {len(wide)} escapes given")
    gaps[escaped] = wide
    gaps[1:] += 1
    ids = gaps.cumsum()
    # All gaps are positive, so ids descend only after an overflow.
    if (ids[1:] <= ids[:-1]).any():
        raise ValueError("packed ids overflow int64")
    return torch.from_numpy(ids)


def _encode_int8(values: Tensor, out: Tensor) -> Tensor:
    num_columns = values.shape[1]
    minimum = values.amin(1, keepdim=True)
    spread = values.amax(1, keepdim=True).sub_(minimum)
    levels = torch.full_like(spread, 255)  # not a scalar: on some devices torch would multiply by its reciprocal
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
    """Return a copy of ``stored``, whose bytes may be unaligned, reinterpreted as ``dtype``."""
    return stored.clone(memory_format=torch.contiguous_format).view(dtype)
