"""Encodings of rows; :mod:`~delta_tracker.stream.format.codec` describes their formulas."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal, assert_never

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.types import dtype_name, torch_dtype

if TYPE_CHECKING:
    import torch


class Encoding(StrEnum):
    """Encoding of rows in a part. The value of a member is its name in manifests.

    Example:
        >>> Encoding.INT8.width(64)  # bytes of a row of 64 columns: a code per column, a scale and a bias
        72
    """

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    INT8 = "INT8"
    INT4 = "INT4"

    @classmethod
    def of(cls, dtype: torch.dtype | str) -> Encoding:
        """Return the encoding that stores rows of ``dtype`` (float32, float16 or bfloat16) unchanged."""
        found = _UNCHANGED.get(dtype_name(dtype))
        if found is None:
            raise InvalidArgumentError("dtype", dtype, "Pass float32, float16 or bfloat16")
        return found

    @classmethod
    def named(cls, name: object) -> Encoding:
        """Return the encoding called ``name`` (case-insensitive). An :class:`Encoding` is returned unchanged."""
        found = cls.__members__.get(name.upper()) if isinstance(name, str) else None
        if found is None:
            raise InvalidArgumentError("encoding", name, f"Pass some of {list(cls.__members__)}")
        return found

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored rows; uint8 if the encoding is quantized."""
        return torch_dtype(_NAMES[self])

    @property
    def dtype_name(self) -> str:
        """Name of :attr:`dtype` in torch, such as ``float32``."""
        return _NAMES[self]

    @cached_property
    def is_quantized(self) -> bool:
        """True if rows are stored as codes with a scale and a bias."""
        return _NAMES[self] == "uint8"

    @cached_property
    def listed_form(self) -> Literal["list", "gaps"]:
        """Form in which the ids of listed rows are stored: ``gaps`` for quantized rows, ``list`` for other rows."""
        return "gaps" if self.is_quantized else "list"

    def width(self, num_columns: int) -> int:
        """Return the number of stored columns for ``num_columns``. Raises InvalidArgumentError if it is unsupported."""
        if num_columns < 1:
            raise InvalidArgumentError("num_columns", num_columns, "Pass 1 or more")
        match self:
            case Encoding.F32 | Encoding.F16 | Encoding.BF16:
                return num_columns
            case Encoding.INT8:
                return num_columns + 8
            case Encoding.INT4:
                if num_columns % 2:
                    raise InvalidArgumentError("num_columns", num_columns, "Use INT8, or INT4 with an even number")
                return num_columns // 2 + 4
            case _:
                assert_never(self)


_NAMES = {
    Encoding.F32: "float32",
    Encoding.F16: "float16",
    Encoding.BF16: "bfloat16",
    Encoding.INT8: "uint8",
    Encoding.INT4: "uint8",
}
_UNCHANGED = {name: encoding for encoding, name in _NAMES.items() if not encoding.is_quantized}
