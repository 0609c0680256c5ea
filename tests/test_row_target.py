"""Rows are written to tensors bit for bit, whatever their layout."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from delta_tracker.row_target import Region


@settings(deadline=None)
@given(st.data())
def test_rows_are_written_bit_for_bit_whatever_the_layout(data: Any) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.float64]))
    width = dtype.itemsize
    num_rows, dim, margin = (data.draw(st.integers(low, 9)) for low in (1, 1, 0))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def noise(rows: int, columns: int, offset: int) -> Tensor:
        """Return random bits, including NaN payloads, at any and possibly unaligned address."""
        start = width * data.draw(st.integers(0, 3))
        num_bytes = start + width * (offset + rows * columns + 1)
        items = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).numpy()
        return torch.from_numpy(items[start:]).view(dtype)[offset:-1].view(rows, columns)

    memory = noise(num_rows + 2, dim + margin, data.draw(st.integers(0, 3)))
    first = data.draw(st.integers(0, 5))
    ids = sorted(data.draw(st.sets(st.integers(0, num_rows + 12))))
    values = noise(len(ids), dim + margin, data.draw(st.integers(0, 3)))[:, :dim]
    if data.draw(st.booleans()):
        values = values.t().contiguous().t()
    if data.draw(st.booleans()):
        memory = memory.t().contiguous().t()
    expected = [[memory[row, column].clone() for column in range(dim + margin)] for row in range(num_rows + 2)]
    rows = (first, first + num_rows)
    region = Region(rows, (0, dim), memory[1 : num_rows + 1, :dim])
    region.write(torch.tensor(ids, dtype=torch.int64), values)
    for number, row in enumerate(ids):
        if rows[0] <= row < rows[1]:
            for column in range(dim):
                expected[row - first + 1][column] = values[number, column]
    for row, cells in enumerate(expected):
        for column, cell in enumerate(cells):
            assert torch.equal(memory[row, column].view(1).view(torch.uint8), cell.view(1).view(torch.uint8))


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 6))
def test_slices_are_cut_to_the_region(start: int, length: int, first: int) -> None:
    memory = torch.zeros(6, 2)
    ids = slice(start, start + length)
    values = torch.arange(start, start + length).view(-1, 1).expand(-1, 2) + 1.0
    Region((first, first + 6), (0, 2), memory).write(ids, values)
    expected = [row + 1 if start <= row < start + length else 0 for row in range(first, first + 6)]
    assert memory[:, 0].tolist() == expected


@pytest.mark.parametrize("dim", [64, 60], ids=["whole rows", "columns of rows"])
def test_a_write_copies_no_table(dim: int) -> None:
    memory = torch.zeros(10_000, 64)
    ids = torch.tensor([3, 9_999])
    tracemalloc.start()  # numpy reports its arrays to it
    try:
        Region((0, len(memory)), (0, dim), memory[:, :dim]).write(ids, torch.ones(2, dim))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < memory.nbytes // 10
    assert memory.sum() == 2 * dim
    assert bool((memory[ids, :dim] == 1).all())
