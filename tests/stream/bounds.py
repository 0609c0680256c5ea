"""Bounds on the difference between a stored value and the value read back."""

from __future__ import annotations

import torch
from torch import Tensor

from delta_tracker.stream.format.encoding import Encoding

_EPSILON = 1e-8  # FBGEMM's guard against a range of 0 in INT8


def bound(values: Tensor, encoding: Encoding) -> Tensor:
    """Return the largest difference between a stored value and the value read back in the dtype of ``values``.

    With ``largest`` the row's largest magnitude and ``range`` its maximum less its minimum:

    - ``F32`` and the table's own dtype: 0. ``F16``, ``BF16``: half a unit in the last place, ``largest`` times 2^-11
      or 2^-8; of subnormals half the smallest.
    - ``INT8``: half a step, ``range / 510``; up to 1e-8 because ``inverse`` has the epsilon; and the float32 roundings
      of ``inverse`` and both products and sums, 13 x 2^-24 of ``largest``, here 2^-20.
    - ``INT4``: half a step, ``range / 30``; bias and scale in float16 move the lowest and the highest value out of
      reach by 2^-11 of the minimum and of the range, 3.1 x 2^-11 of ``largest``, here 2^-9; in subnormals by
      16 x 2^-25, here 2^-20.
    - Where the dtype of ``values`` is float16 or bfloat16, half a unit of its last place more.

    Args:
        values: ``[N, C]`` float32, float16 or bfloat16.
        encoding: encoding in which they are stored.

    Returns:
        ``[N, 1]`` float32; infinite where the row may not be read as numbers.
    """
    rows = values.detach().float()
    minimum, maximum = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    largest = torch.maximum(maximum, -minimum)
    if encoding in (Encoding.F32, Encoding.of(values.dtype)):
        return torch.zeros_like(largest)
    if encoding is Encoding.INT8:
        error = (maximum - minimum) / 510 + _EPSILON + largest * 2.0**-20
    elif encoding is Encoding.INT4:
        error = (maximum - minimum) / 30 + largest * 2.0**-9 + 2.0**-20
        bias = minimum.half()
        scale = ((maximum - bias.float()) / 15).half()
        error.masked_fill_(~(bias.isfinite() & scale.isfinite()), torch.inf)
    else:
        error = _rounding(largest, encoding.dtype)
    error.add_(_rounding(largest + error, values.dtype))
    return error.nan_to_num_(torch.inf, torch.inf)


def _rounding(largest: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        return torch.zeros_like(largest)
    limits = torch.finfo(dtype)
    error = (limits.eps / 2) * largest.clamp(min=limits.smallest_normal)
    return error.masked_fill_(~largest.to(dtype).isfinite(), torch.inf)
