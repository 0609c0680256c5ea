"""Operations on several row stores. Stores on the same device are marked, scanned and counted together.

On a GPU, the number of kernel launches for marking rows does not depend on the number of tables, unless old states are
kept. The same applies to the number of times that a read waits for the device. On the CPU, each store is marked and
read separately.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from delta_tracker.rows import ChangedRows
from delta_tracker.tracker.row_sets.engines import retried
from delta_tracker.tracker.row_sets.row_set import RowSet
from delta_tracker.tracker.store.marked_rows import whole_numbers
from delta_tracker.tracker.store.old_states import read_row_counts
from delta_tracker.tracker.store.segments import SegmentStore

_Result = TypeVar("_Result")


def _replaced(stores: Mapping[str, SegmentStore], error: Exception) -> bool:
    """Replace the engine of all stores if it raised ``error``. Return True if the engine was replaced."""
    replaced = [store.replace_engine(error) for store in stores.values()]
    return any(replaced)


def mark_in_each(stores: Mapping[str, SegmentStore], ids: Mapping[str, Tensor | None], key: int | None = None) -> None:
    """Mark rows in several stores.

    ``ids`` maps the name of each store to ``[N]`` integer local ids, or to None for all rows. If ``key`` is given, the
    call also records a write in progress with this key, as :meth:`SegmentStore.begin_write` does.
    """
    padded = {name: own for name, own in ids.items() if own is not None and stores[name].pads and stores[name].num_rows}
    for name, own in ids.items():
        if key is None:
            if name not in padded:
                stores[name].mark(own)
        elif name in padded:
            stores[name].writes[key] = own
        else:
            stores[name].begin_write(key, own)
    if padded:
        _mark(stores, padded)


@retried(_replaced)
def changed_in_each(
    stores: Mapping[str, SegmentStore], start: int, stop: int, *, with_states: bool
) -> dict[str, ChangedRows]:
    """Return the result of :meth:`SegmentStore.changed` of each store, by name. Stores on the CPU are not supported."""
    if with_states:
        read_row_counts(states for store in stores.values() for states in store.device_states)
    marked = {name: store.marked(start, stop) for name, store in stores.items()}
    scanned = _together(marked, lambda engine, sets: engine.scan_each(sets))
    return {fqn: store.found(*marked[fqn], scanned.get(fqn), with_states=with_states) for fqn, store in stores.items()}


@retried(_replaced)
def num_changed_in_each(stores: Mapping[str, SegmentStore], start: int, extra: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of distinct rows in each store that were marked since position ``start`` or are in ``extra``.

    ``start`` must be pinned. ``extra`` maps store names to ``[N]`` int64 local ids. Waits for each device once.
    """
    marked = {name: store.marked(start, None, extra.get(name)) for name, store in stores.items()}
    counted = _together(marked, lambda engine, sets: engine.count_each(sets))
    for name, (rows, segments) in marked.items():
        stores[name].release(rows, segments)
    return {name: counted.get(name, 0) for name in stores}


@retried(_replaced)
def _mark(stores: Mapping[str, SegmentStore], ids: Mapping[str, Tensor]) -> None:
    groups: dict[tuple[type[RowSet], torch.device, bool], list[str]] = {}
    for name in ids:
        store = stores[name]
        groups.setdefault((store.engine, store.device, store.keeps_states), []).append(name)
    for (engine, _, keeps_states), names in groups.items():
        chosen, own = [stores[name] for name in names], [whole_numbers(ids[name]) for name in names]
        sets = _newest_sets(engine, chosen)
        if not keeps_states:
            engine.mark_each(sets, own)
        else:
            for store, (new, count) in zip(chosen, engine.mark_new_padded_each(sets, own), strict=True):
                store.keep_states(new, count)


def _newest_sets(engine: type[RowSet], stores: Sequence[SegmentStore]) -> list[RowSet]:
    """Return each store's row set for the rows marked since the last cut. Missing sets are created in one call."""
    newest = [store.newest for store in stores]
    missing = [index for index, segment in enumerate(newest) if segment.rows is None]
    if missing:
        created = engine.create_each([stores[index].num_rows for index in missing], stores[0].device)
        for index, empty in zip(missing, created, strict=True):
            newest[index].rows = empty
    return [segment.rows for segment in newest if segment.rows is not None]


def _together(
    marked: Mapping[str, tuple[RowSet | None, object]],
    call: Callable[[type[RowSet], Sequence[RowSet]], Sequence[_Result]],
) -> dict[str, _Result]:
    """Call ``call`` once per engine and device, with all row sets that belong to both. Return the results by name.

    ``marked`` contains results of :meth:`SegmentStore.marked` by name. Names without a row set are skipped.
    """
    groups: dict[tuple[type[RowSet], torch.device], dict[str, RowSet]] = {}
    for name, (rows, _) in marked.items():
        if rows is not None:
            groups.setdefault((type(rows), rows.device), {})[name] = rows
    found: dict[str, _Result] = {}
    for (engine, _), group in groups.items():
        found |= zip(group, call(engine, list(group.values())), strict=True)
    return found
