"""Targets of a predictor: tables of a serving model, to which the predictor writes rows.

Notation: ``N`` is the number of rows of a write, ``C`` its number of columns, and ``R`` the number of rows of a region.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from delta_tracker.rows import copy_from_host, put_pieces, to_device


@runtime_checkable
class RowTarget(Protocol):
    """Interface through which a predictor writes rows to this process's block of a table.

    Derive from this class if the rows of a table are not stored in tensors.

    The predictor passes only rows and columns inside the block. For each chunk of rows it calls :meth:`prepare`, during
    which lookups may run, and then :meth:`write`, during which no lookup runs. Calls never overlap. All columns
    that a version contains for a row are written before the next lookup.

    If a method raises, the predictor's ``sync()`` raises the same error, and its ``follow()`` retries. The retry, or
    the next ``sync()``, applies the version again from its start. Until the version is complete, ``reading()`` reports
    the version as ``applying``. Rows of the interrupted chunk may be partly written, so ``write`` should not fail
    after writing some rows.

    If the rows are in the memory of CUDA devices, add an attribute ``devices``, an iterable of these devices. Calls of
    :meth:`write` are then also ordered with respect to lookups that are queued on the devices, and :meth:`write` may
    return before its work on the current streams is complete.

    Args:
        num_rows: number of rows of the whole table.
        dim: number of columns of the whole table.
        dtype: dtype that the table must have in the stream; None if every dtype is accepted.
        rows: half-open range of the block's global row ids.
        columns: half-open column ranges of the block, ascending and disjoint; empty if no part of the table is in this
            process.
        needs_whole_rows: True to receive all columns of each range in ``columns`` in a single call. A version that
            contains only some of these columns for a row is rejected.

    Example:
        A table in a file, for lookups in other processes:

        >>> import tempfile
        >>> import numpy as np
        >>> class FileTable(RowTarget):
        ...     def __init__(self, path: str, num_rows: int, dim: int) -> None:
        ...         self.num_rows, self.dim, self.dtype = num_rows, dim, torch.float32
        ...         self.rows, self.columns = (0, num_rows), ((0, dim),)
        ...         self.array = np.memmap(path, np.float32, mode="w+", shape=(num_rows, dim))
        ...
        ...     def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        ...         where = ids if isinstance(ids, slice) else ids.numpy()
        ...         self.array[where, columns[0] : columns[1]] = values.numpy()
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     table = FileTable(file.name, num_rows=10, dim=2)
        ...     table.write(torch.tensor([3, 5]), torch.ones(2, 2), (0, 2))
        ...     table.array.sum(axis=1).tolist()
        [0.0, 0.0, 0.0, 2.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    """

    num_rows: int
    dim: int
    dtype: torch.dtype | None
    rows: tuple[int, int]
    columns: tuple[tuple[int, int], ...]
    needs_whole_rows: bool = False

    def prepare(self, values: Tensor, columns: tuple[int, int]) -> Tensor:  # noqa: ARG002  a default
        """Convert values for :meth:`write`, for example by moving them to a device or quantizing them.

        Args:
            values: ``[N, C]`` on the CPU, in the table's dtype in the stream. Read-only; valid until :meth:`write`
                returns.
            columns: half-open range of the columns of ``values``.

        Returns:
            The values to pass to :meth:`write`. The default implementation returns ``values`` unchanged.
        """
        return values

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        """Write rows in place.

        Args:
            ids: ``[N]`` int64 global row ids on the CPU, ascending and unique, or a slice with a start and a stop.
            values: result of :meth:`prepare`.
            columns: half-open range of the columns of ``values``, inside one range of ``self.columns``.
        """


class RowCopies(Protocol):
    """Interface to a cache that contains copies of some rows of a region. Lookups read the copies."""

    def write(self, ids: Tensor, values: Tensor, columns: tuple[int, int]) -> None:
        """Update the copies of the given rows. Ignore rows without a copy.

        ``ids`` are ``[N]`` unique int64 row numbers in the region, with ``N >= 1``. ``values`` are the new values
        ``[N, C]`` of the half-open column range ``columns`` of the region. Both tensors are on the region's device.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Rectangular block of a table, and the tensor that contains its values.

    Args:
        rows: half-open range of global row ids.
        columns: half-open column range.
        memory: tensor ``[R, ...]`` that lookups read.
        copies: cache of some rows, updated by each write; None if there is no cache.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    memory: Tensor
    copies: RowCopies | None = None

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int] | None = None) -> None:
        """Write the rows whose ids are in the region, and update their copies. Ignore the other rows.

        ``ids`` are global row ids, as in :meth:`RowTarget.write`. ``values`` are ``[N, C]`` in the dtype of the memory.
        ``columns`` is the half-open range of the memory's columns to write; None for all columns.
        """
        # Creating a view takes as long as writing several rows. no_grad() is not needed for detached tensors.
        memory = self.memory if columns is None else self.memory[:, slice(*columns)]
        indices, values = _within(self.rows, ids, values)
        if isinstance(indices, slice):
            copy_from_host(memory[indices], values)
        elif len(indices):
            put_pieces(memory, indices, [values])
        if self.copies is not None and len(values):
            held = torch.arange(indices.start, indices.stop, device="cpu") if isinstance(indices, slice) else indices
            device = memory.device
            self.copies.write(to_device(held, device), to_device(values, device), columns or (0, memory.shape[1]))


WRITABLE = (
    "Give the predictor's model ordinary tensors with values: build it outside torch.inference_mode(), call "
    "to_empty(device=...) on a model on the meta device, and do not expand tensors"
)
"""Remedy for every obstacle that :func:`obstacle_of` returns."""


class TensorTarget(RowTarget):
    """Target for a table that is stored in one tensor, or in several tensors that each contain a rectangular block.

    Args:
        num_rows: number of rows of the whole table.
        dim: number of columns of the whole table.
        dtype: dtype of the table; None to accept versions of every dtype.
        regions: disjoint blocks in this process; all column ranges cover the same rows. The tensors are detached.
        obstacle: reason why rows cannot be written; empty if they can be written.

    Attributes:
        devices: devices of the tensors.
        remedy: action that removes the :attr:`obstacle`.
    """

    remedy = WRITABLE

    def __init__(
        self, num_rows: int, dim: int, dtype: torch.dtype | None, regions: Sequence[Region], *, obstacle: str = ""
    ) -> None:
        self.num_rows = num_rows
        self.dim = dim
        self.dtype = dtype
        self.regions = tuple(Region(each.rows, each.columns, each.memory.detach(), each.copies) for each in regions)
        self.devices = {region.memory.device for region in self.regions}
        self._device = next(iter(self.devices)) if len(self.devices) == 1 else None
        held = [edge for region in self.regions for edge in region.rows]
        self.rows = (min(held, default=0), max(held, default=0))
        self.columns = tuple(sorted({region.columns for region in self.regions}))
        self._obstacle = obstacle

    @classmethod
    def of(cls, table: Tensor) -> Self:
        """Return a target for the tensor ``table``, ``[num_rows, dim]``, which contains a whole table."""
        num_rows, dim = table.shape
        return cls(num_rows, dim, table.dtype, [Region((0, num_rows), (0, dim), table)])

    @property
    def obstacle(self) -> str:
        """Reason why rows cannot be written; empty if they can be written."""
        return self._obstacle or next((found for region in self.regions if (found := obstacle_of(region.memory))), "")

    def prepare(self, values: Tensor, columns: tuple[int, int]) -> Tensor:  # noqa: ARG002
        """Move the values to the device of the regions, asynchronously if it is a CUDA device.

        If the regions are on several devices, the values are returned unchanged.
        """
        return values if self._device is None else to_device(values, self._device)

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        """Write rows to the tensors in place; see :meth:`RowTarget.write`."""
        first, end = columns
        for region in self.regions:
            start, stop = region.columns
            if start <= first and end <= stop:
                region.write(ids, values, None if columns == region.columns else (first - start, end - start))


def _within(rows: tuple[int, int], ids: Tensor | slice, values: Tensor) -> tuple[Tensor | slice, Tensor]:
    """Return the row numbers (``id - rows[0]``) and the values of the rows whose ids are in the range ``rows``."""
    if isinstance(ids, slice):
        first = min(max(ids.start, rows[0]), rows[1])
        end = max(first, min(ids.stop, rows[1]))
        return slice(first - rows[0], end - rows[0]), values[max(0, first - ids.start) : max(0, end - ids.start)]
    if len(ids) and (int(ids[0]) < rows[0] or int(ids[-1]) >= rows[1]):
        first, end = torch.searchsorted(ids, torch.tensor(rows, device="cpu")).tolist()
        ids, values = ids[first:end], values[first:end]
    return ids - rows[0] if rows[0] else ids, values


def obstacle_of(tensor: Tensor) -> str:
    """Return the reason why rows cannot be written to a tensor, or an empty string if they can be written."""
    if tensor.is_meta:
        return "on the meta device, without values"
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor"
    if tensor.is_inference():
        return "an inference tensor, which is read-only"
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "an expanded tensor, whose rows share memory"
    return ""
