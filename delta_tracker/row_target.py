"""RowTarget: a table of a serving model that rows are written into, and the one that is made of tensors.

Letters: ``N`` rows handed over, ``R`` rows of a region, ``C`` columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from delta_tracker.rows import put_rows


@runtime_checkable
class RowTarget(Protocol):
    """A table of a serving model, or the block of it that this process holds. Derive from it for what is no tensor.

    Only rows and columns of the block are handed over. For each chunk of rows, :meth:`prepare` is called first, while
    lookups may go on, then :meth:`write`, while none does; neither is called twice at a time. All columns that a
    version has of a row are written before lookups go on.

    A method may raise. ``sync()`` then raises it, ``follow()`` tries again; either way the version is applied again
    from its beginning, and until then ``reading()`` names it as being applied. Rows of the chunk that was being
    written may be torn meanwhile: let ``write`` do nothing that can fail once it has written a part of them.

    Args:
        num_rows: rows of the whole table.
        dim: columns of the whole table.
        dtype: dtype that the stream's table must have, in which values are handed over; None if any will do.
        rows: half-open range of global row ids held here.
        columns: half-open column ranges held here, ascending and disjoint; none if nothing is held.
        needs_whole_rows: values are handed over with all the columns of one of ``columns``, never with a part of them.
            A version that has only a part of a row's columns is refused.

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

    def prepare(self, values: Tensor, columns: tuple[int, int]) -> Tensor:  # noqa: ARG002  a default for others
        """Bring values into the form in which :meth:`write` takes them: on its device, quantised, ...

        Args:
            values: ``[N, C]`` in the table's dtype, on the CPU; read only, and not to be kept.
            columns: which columns they are.

        Returns:
            What :meth:`write` is given; by default the values themselves.
        """
        return values

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        """Write rows in place.

        Args:
            ids: ``[N]`` int64 global row ids on the CPU, ascending and unique; or a slice of them, start to stop.
            values: what :meth:`prepare` gave.
            columns: which columns they are; they lie inside one of ``self.columns``.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A rectangle of a table, and the tensor that holds it.

    Args:
        rows: half-open range of global row ids.
        columns: half-open column range.
        memory: ``[R, ...]``, what lookups read.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    memory: Tensor


class TensorTarget(RowTarget):
    """A table whose rows stand in tensors: one, or several that each hold a rectangle of it.

    Args:
        num_rows: rows of the whole table.
        dim: columns of the whole table.
        dtype: dtype of the table.
        regions: what is held of it, disjoint: each column range with the same rows altogether. They are detached.
        written: called after every write, such as to drop cached rows.
        obstacle: why no row can be written, if so.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        dtype: torch.dtype | None,
        regions: Sequence[Region],
        *,
        written: Callable[[], None] | None = None,
        obstacle: str = "",
    ) -> None:
        self.num_rows = num_rows
        self.dim = dim
        self.dtype = dtype
        self.regions = tuple(Region(each.rows, each.columns, each.memory.detach()) for each in regions)
        devices = {region.memory.device for region in self.regions}
        self._device = devices.pop() if len(devices) == 1 else None
        held = [edge for region in self.regions for edge in region.rows]
        self.rows = (min(held, default=0), max(held, default=0))
        self.columns = tuple(sorted({region.columns for region in self.regions}))
        self._written = written
        self._obstacle = obstacle

    @classmethod
    def of(cls, table: Tensor) -> TensorTarget:
        """The target of a whole table, ``[num_rows, dim]``."""
        num_rows, dim = table.shape
        return cls(num_rows, dim, table.dtype, [Region((0, num_rows), (0, dim), table)])

    @property
    def obstacle(self) -> str:
        """Why rows cannot be written; nothing if they can."""
        return self._obstacle or next((found for region in self.regions if (found := obstacle_of(region.memory))), "")

    def prepare(self, values: Tensor, columns: tuple[int, int]) -> Tensor:  # noqa: ARG002
        """The values on the table's device, if it is all on one."""
        return values if self._device is None or values.device == self._device else values.to(self._device)

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        """Write rows in place; see :meth:`RowTarget.write`."""
        first, end = columns
        for region in self.regions:
            start, stop = region.columns
            if start <= first and end <= stop:
                # A view costs as much as some rows, and no_grad() does: the regions are detached.
                is_whole = columns == region.columns
                memory = region.memory if is_whole else region.memory[:, first - start : end - start]
                write_rows(memory, region.rows, ids, values)
        self.finish()

    def finish(self) -> None:
        """Tell whoever keeps copies of rows that these have changed."""
        if self._written is not None:
            with torch.no_grad():
                self._written()


def write_rows(memory: Tensor, rows: tuple[int, int], ids: Tensor | slice, values: Tensor) -> None:
    """Write those of the rows that lie in a range.

    Args:
        memory: ``[R, C]``, written in place.
        rows: half-open range of global ids that ``memory`` holds.
        ids: ``[N]`` int64 global ids on the CPU, ascending; or a slice of them.
        values: ``[N, C]`` in the dtype of ``memory``.
    """
    if isinstance(ids, slice):
        first, end = max(ids.start, rows[0]), min(ids.stop, rows[1])
        if first < end:
            memory[first - rows[0] : end - rows[0]].copy_(values[first - ids.start : end - ids.start])
        return
    if len(ids) and (int(ids[0]) < rows[0] or int(ids[-1]) >= rows[1]):
        first, end = torch.searchsorted(ids, torch.tensor(rows)).tolist()
        ids, values = ids[first:end], values[first:end]
    if not len(ids):
        return
    ids = ids - rows[0] if rows[0] else ids
    put_rows(memory, ids, values)


def obstacle_of(tensor: Tensor) -> str:
    """Why rows cannot be written into a tensor; nothing if they can."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return f"a {tensor.layout} tensor on {tensor.device}"
    if tensor.is_inference():
        return "a tensor made in inference mode, which nothing may write to"
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "an expanded tensor, whose rows share memory"
    return ""
