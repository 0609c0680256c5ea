"""Kernels of the row sets on a GPU: 50 launches between CUDA events, each with a fresh set and its own Zipf ids.

The results of all launches are compared with masks on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from benchmarks.harness import Sample
from benchmarks.ids import zipf_ids
from delta_tracker.tracker.row_sets.engines import choose_engine

if TYPE_CHECKING:
    from benchmarks.bench_gpu import Bench

_T = TypeVar("_T")

_LAUNCHES = 50
# The device queues some 1,000 operations, and the torch engine has up to 33 per launch.
_PER_SLEEP = 10
_CYCLES = 40_000_000  # 20 ms at 2 GHz
_NUM_WARM = 2


@dataclass(frozen=True, slots=True)
class Launches(Generic[_T]):
    """Times and results of launches on a device.

    Args:
        sample: seconds of each launch.
        results: result of each launch.
        is_host_bound: True if the device waited for the host, so that the times are those of the host.
    """

    sample: Sample
    results: Sequence[_T]
    is_host_bound: bool


def time_launches(device: torch.device, launches: Sequence[Callable[[], _T]]) -> Launches[_T]:
    """Measure each launch between two CUDA events, or with the host's clock on the CPU.

    The device sleeps while the host launches, so that it then runs the launches without waiting for the host.
    """
    seconds, results, is_host_bound = [], [], False
    if device.type != "cuda":
        for launch in launches:
            begin = time.perf_counter()
            results.append(launch())
            seconds.append(time.perf_counter() - begin)
        return Launches(Sample(tuple(seconds)), results, is_host_bound=True)
    for start in range(0, len(launches), _PER_SLEEP):
        few = launches[start : start + _PER_SLEEP]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(few) + 1)]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001  torch's own tests use it
        events[0].record()
        for launch, event in zip(few, events[1:], strict=True):
            results.append(launch())
            event.record()
        is_host_bound |= events[0].query()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        seconds += [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
    return Launches(Sample(tuple(seconds)), results, is_host_bound)


@dataclass(frozen=True, slots=True)
class _Case:
    """Sizes of tables that are marked together.

    Args:
        name: the case.
        num_rows: rows of each table.
        num_ids: ids of a launch for each table.
    """

    name: str
    num_rows: Sequence[int]
    num_ids: Sequence[int]


def _cases(bench: Bench) -> list[_Case]:
    small, large, many = bench.size(1_000), bench.size(1_300_000), bench.size(65_536)
    return [
        _Case("", [bench.size(10_000_000)], [large]),
        _Case("", [bench.size(100_000_000)], [bench.size(100_000)]),
        _Case("26 tables", [bench.size(1_000_000)] * 26, [many] * 26),
        _Case("200 tables, one long", [bench.size(10_000_000), *[bench.size(100_000)] * 199], [large, *[small] * 199]),
    ]


@cache
def _ids(num_rows: int, num_ids: int, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ids with a number on the device, and on the CPU their rows, sorted."""
    ids = zipf_ids(num_rows, num_ids, torch.Generator().manual_seed(number))
    mask = torch.zeros(num_rows, dtype=torch.bool)
    mask[ids] = True
    return ids.to(device), mask.nonzero().flatten()


def row_sets(bench: Bench) -> None:
    """Mark, list new rows, and scan, against the bytes that these move, in each case and with each engine."""
    num_launches = _NUM_WARM + (3 if bench.is_tiny else _LAUNCHES)
    for case in _cases(bench):
        sizes = list(zip(case.num_rows, case.num_ids, strict=True))
        # Neighbours share lists, since it takes minutes to draw one for each launch and table.
        found = [
            [_ids(*size, launch + table, bench.device) for table, size in enumerate(sizes)]
            for launch in range(num_launches)
        ]
        lists = [[ids for ids, _ in each] for each in found]
        expected = [[rows for _, rows in each] for each in found]
        for engine in bench.engines:
            _measure(bench, case, engine, lists, expected)


def _measure(bench: Bench, case: _Case, engine: str, lists: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    """Measure a case with an engine. ``expected`` are the sorted rows of each launch and table."""
    kind = choose_engine(engine, bench.device)
    name = f"{engine}, {case.name or f'{case.num_rows[0]:,} rows'}, {sum(case.num_ids):,} Zipf ids"
    num_ids, num_marked = sum(case.num_ids), sum(map(len, expected[0]))

    def measure(work: str, launches: Sequence[Callable[[], _T]], num_bytes: int) -> list[_T]:
        warm = [launch() for launch in launches[:_NUM_WARM]]
        found = time_launches(bench.device, launches[_NUM_WARM:])
        of = "bytes, host-bound" if found.is_host_bound else "bytes"
        bench.add(f"{work}: {name}", found.sample, num_bytes / bench.copy_bytes, of)
        return [*warm, *found.results]

    sets = [kind.create_each(case.num_rows, bench.device) for _ in lists]
    set_bytes = sum(rows.num_bytes for rows in sets[0])
    moved = num_ids * 8 + 2 * min(32 * num_marked, set_bytes)  # ids once, a sector of each row twice
    measure("mark", [partial(kind.mark_each, own, ids) for own, ids in zip(sets, lists, strict=True)], moved)
    scanned = measure("scan", [partial(kind.scan_each, own) for own in sets], set_bytes + 8 * num_marked)
    for found, own in zip(scanned, expected, strict=True):
        assert all(torch.equal(rows.cpu(), ids) for rows, ids in zip(found, own, strict=True)), name
    for each in sets:
        for rows in each:
            rows.clear()
    marks = [partial(kind.mark_new_padded_each, own, ids) for own, ids in zip(sets, lists, strict=True)]
    for new, own in zip(measure("mark_new_padded", marks, moved + num_ids * 8), expected, strict=True):
        for (padded, count), ids in zip(new, own, strict=True):
            assert torch.equal(padded[: int(count)].sort().values.cpu(), ids), name
