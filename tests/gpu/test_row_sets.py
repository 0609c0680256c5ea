"""Row sets of each engine on the device: large sets, ids at any alignment, and no wait for the device."""

from __future__ import annotations

import pytest
import torch

from delta_tracker.tracker.row_sets.engines import choose_engine
from tests.gpu.devices import ENGINES, IS_TINY, device, needs, no_sync, put, take

pytestmark = pytest.mark.usefixtures("tensors_on_device")

_SIZES = [(5_000, 700)] if IS_TINY else [(5_000, 700), (10_000_000, 1_300_000), (100_000_000, 100_000)]


@pytest.mark.parametrize(("num_rows", "num_ids"), _SIZES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_set_agrees_with_a_mask(engine: str, num_rows: int, num_ids: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lists = [torch.randint(-3, num_rows + 3, (num_ids,), generator=generator) for _ in range(3)]
    on_it = [put(ids)[number:] for number, ids in enumerate(lists)]  # the slices have different alignments
    lists = [ids[number:] for number, ids in enumerate(lists)]
    lists = [torch.where((ids < 0) | (ids >= num_rows), 0, ids) for ids in lists]
    rows, other = (choose_engine(engine, device())(num_rows, device()) for _ in range(2))
    rows.mark(on_it[0][:0])
    with no_sync():
        rows.mark(on_it[0])
        padded, count = rows.mark_new_padded(on_it[1])
        other.mark(on_it[2])
        other.merge(rows)
        found = rows.contains(on_it[2])
    mask = torch.zeros(num_rows, dtype=torch.bool)
    mask[lists[0]] = True
    before = mask.clone()
    mask[lists[1]] = True
    new = (mask & ~before).nonzero().flatten()
    assert int(take(count)) == len(new)
    assert torch.equal(take(padded)[: len(new)].sort().values, new)
    assert bool((take(padded)[len(new) :] == -1).all())
    assert torch.equal(take(found), mask[lists[2]])
    assert torch.equal(take(rows.scan()), mask.nonzero().flatten())
    assert rows.count() == int(mask.sum())
    assert torch.equal(take(rows.rank(on_it[2], rows.scan())), (mask.cumsum(0) - mask.long())[lists[2]])
    mask[lists[2]] = True
    assert torch.equal(take(other.scan()), mask.nonzero().flatten())
    with no_sync():
        rows.mark_all()
        other.clear()
    assert (rows.count(), other.count()) == (num_rows, 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_sets_that_are_marked_together_agree_with_masks(engine: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [2, 1, 5_000, 513] if IS_TINY else [2, 1, 1_000_000, 513, 5_000_000]
    kind = choose_engine(engine, device())
    sets, masks = kind.create_each(sizes, device()), [torch.zeros(size, dtype=torch.bool) for size in sizes]
    for step in range(4):
        lists = [torch.randint(-3, size + 3, (100 * number,), generator=generator) for number, size in enumerate(sizes)]
        on_it = [put(ids) for ids in lists]
        if step == 0:
            kind.mark_each(sets, on_it)  # the first one may allocate pinned memory
        with no_sync():
            if step % 2:
                kind.mark_each(sets, on_it)
            else:
                found = kind.mark_new_padded_each(sets, on_it)
        for place, (rows, mask, ids) in enumerate(zip(sets, masks, lists, strict=True)):
            before = mask.clone()
            mask[torch.where((ids < 0) | (ids >= len(mask)), 0, ids)] = True
            assert torch.equal(take(rows.scan()), mask.nonzero().flatten())
            if step == 2:
                padded, count = found[place]
                new = (mask & ~before).nonzero().flatten()
                assert torch.equal(take(padded)[: int(take(count))].sort().values, new)


@needs("memory")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_set_of_more_than_2_31_rows(engine: str) -> None:
    num_rows = 2**31 + 5_000
    rows = choose_engine(engine, device())(num_rows, device())
    ids = [0, 511, 2**31 - 1, 2**31, num_rows - 1]
    rows.mark(torch.tensor(ids[::2], device=device()))
    assert rows.mark_new(torch.tensor(ids, device=device())).sort().values.tolist() == ids[1::2]
    assert rows.scan().tolist() == ids
    assert rows.rank(torch.tensor(ids, device=device()), rows.scan()).tolist() == list(range(5))
