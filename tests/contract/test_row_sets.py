"""One contract for the row sets of every engine, against a Python set."""

from __future__ import annotations

import itertools
import os
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.tracker.row_sets import numba as numba_rows
from delta_tracker.tracker.row_sets.engines import ENGINES, choose_engine
from delta_tracker.tracker.row_sets.numba import NumbaRows
from delta_tracker.tracker.row_sets.row_set import RowSet
from delta_tracker.tracker.row_sets.torch import TorchRows
from delta_tracker.tracker.row_sets.triton import TritonRows
from delta_tracker.tracker.store.segments import SegmentStore
from tests.sweeps import SWEEPS_ARE_WHOLE, num_examples

_CPU = torch.device("cpu")

_HAS_NUMBA, _HAS_TRITON = (find_spec(name) is not None for name in ("numba", "triton"))

_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"

_HAS_GPU = torch.cuda.is_available() and not _INTERPRETS


class _LargeRows(NumbaRows):
    """Marks as sets do that are too large for a cache."""

    _max_cached_words = 0


_needs_numba = pytest.mark.skipif(not _HAS_NUMBA, reason="numba is not installed")

_needs_triton = pytest.mark.skipif(not _HAS_TRITON, reason="triton is not installed")

_engines = [
    pytest.param(TorchRows, _CPU, id="torch"),
    pytest.param(NumbaRows, _CPU, id="numba", marks=_needs_numba),
    pytest.param(_LargeRows, _CPU, id="numba, large", marks=_needs_numba),
]

if _HAS_GPU:
    _engines.append(pytest.param(TorchRows, torch.device("cuda"), id="torch-cuda"))

if _HAS_GPU or _INTERPRETS:
    device = torch.device("cuda" if _HAS_GPU else "cpu")
    _engines.append(pytest.param(TritonRows, device, id="triton", marks=_needs_triton))

_every_engine = pytest.mark.parametrize(("engine", "device"), _engines)

_SIZES = [1, 63, 64, 65, 511, 512, 513, 5000]

# One row either side of where a word of some engine's summary ends.
_LARGE_SIZES = [2**14 - 1, 2**14 + 1, 2**15, 2**15 + 1]

_FAR = [-(2**63), -(2**32), 2**32, 2**32 + 1, 2**63 - 1]


class SetReference:
    """The contract, on a Python set."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.rows: set[int] = set()

    def within(self, ids: list[int]) -> list[int]:
        return [i if 0 <= i < self.num_rows else 0 for i in ids]

    def mark_new(self, ids: list[int]) -> set[int]:
        new = set(self.within(ids)) - self.rows
        self.rows |= new
        return new

    def contains(self, ids: list[int]) -> list[bool]:
        return [i in self.rows for i in self.within(ids)]

    def rank(self, ids: list[int]) -> list[int]:
        ordered = sorted(self.rows)
        return [bisect_left(ordered, i) for i in self.within(ids)]


class Pair:
    """A row set and its reference, which get the same calls; all results are compared."""

    def __init__(self, engine: type[RowSet], num_rows: int, device: torch.device) -> None:
        self.rows = engine(num_rows, device)
        self.reference = SetReference(num_rows)
        self.most_bytes = num_rows if issubclass(engine, TorchRows) else num_rows / 8 * 1.01 + 128
        self.news: list[list[int]] = []  # every answer whose order the engine chooses

    def ids(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.rows.device)

    def mark(self, ids: list[int]) -> None:
        given_ids = self.ids(ids)
        self.rows.mark(given_ids)
        assert given_ids.tolist() == ids
        self.reference.mark_new(ids)

    def mark_all(self, _ids: list[int]) -> None:
        self.rows.mark_all()
        self.reference.rows = set(range(self.reference.num_rows))

    def clear(self, _ids: list[int]) -> None:
        before = self.rows.scan()
        assert self.rows.count() == len(before)
        kept = before.clone()
        self.rows.clear()
        self.reference.rows = set()
        assert torch.equal(before, kept)
        assert len(self.rows.scan()) == 0

    def mark_new(self, ids: list[int]) -> None:
        new = self.rows.mark_new(self.ids(ids))
        self.compare_new(new, self.reference.mark_new(ids))

    def mark_new_padded(self, ids: list[int]) -> None:
        padded, count = self.rows.mark_new_padded(self.ids(ids))
        assert (padded.dtype, padded.shape) == (torch.int64, (len(ids),))
        assert (count.dtype, count.shape, count.device) == (torch.int64, (1,), padded.device)
        assert padded[int(count) :].tolist() == [-1] * (len(ids) - int(count))
        self.compare_new(padded[: int(count)], self.reference.mark_new(ids))

    def compare_new(self, new: Tensor, expected: set[int]) -> None:
        assert (new.dtype, new.dim(), new.device.type) == (torch.int64, 1, self.rows.device.type)
        assert sorted(new.tolist()) == sorted(expected)
        self.news.append(new.tolist())

    def contains(self, ids: list[int]) -> None:
        found = self.rows.contains(self.ids(ids))
        assert found.dtype == torch.bool
        assert found.tolist() == self.reference.contains(ids)

    def rank(self, ids: list[int]) -> None:
        ranks = self.rows.rank(self.ids(ids), self.ids(sorted(self.reference.rows)))
        assert ranks.dtype == torch.int64
        assert ranks.tolist() == self.reference.rank(ids)

    def merge(self, ids: list[int]) -> None:
        other = type(self.rows)(self.rows.num_rows, self.rows.device)
        other.mark(self.ids(ids))
        before = other.scan()
        self.rows.merge(other)
        self.reference.mark_new(ids)
        self.rows.mark(self.ids([1]))
        self.reference.mark_new([1])
        assert torch.equal(other.scan(), before)

    def scan(self, _ids: list[int]) -> None:
        rows = self.rows.scan()
        assert rows.dtype == torch.int64
        assert rows.tolist() == sorted(self.reference.rows)
        assert torch.equal(self.rows.rank(rows, rows), torch.arange(len(rows), device=rows.device))
        assert self.rows.num_bytes <= self.most_bytes

    def run(self, steps: list[tuple[str, list[int]]]) -> None:
        for name, ids in steps:
            getattr(self, name)(ids)
        self.scan([])


_OPERATIONS = ["mark", "mark", "mark_new", "mark_new_padded", "contains", "rank", "merge", "scan"]


@st.composite
def _schedules(draw: Any) -> tuple[int, list[tuple[str, list[int]]]]:
    num_rows = draw(st.sampled_from(_SIZES))
    edges = [edge for edge in (0, 1, 63, 64, 127, 128, 511, 512, num_rows - 1, num_rows) if edge <= num_rows]
    ids = st.lists(st.integers(-2, num_rows + 2) | st.sampled_from(edges + _FAR), max_size=40)
    names = st.sampled_from(_OPERATIONS) | st.sampled_from([*_OPERATIONS, "mark_all", "clear"])
    return num_rows, draw(st.lists(st.tuples(names, ids), max_size=10))


@pytest.mark.sweep("short")
@_every_engine
def test_random_operations_agree_with_a_python_set(engine: type[RowSet], device: torch.device) -> None:
    @settings(
        max_examples=20 if _INTERPRETS else 150 if SWEEPS_ARE_WHOLE else num_examples(50),
        phases=[Phase.generate] if _INTERPRETS else Phase,  # it is too slow there for shrinking
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.nested_given],
    )
    @given(_schedules())
    def run(schedule: tuple[int, list[tuple[str, list[int]]]]) -> None:
        num_rows, steps = schedule
        pairs = [Pair(engine, num_rows, device) for _ in range(1 if _INTERPRETS else 2)]
        for pair in pairs:
            pair.run(steps)
        if engine is not TritonRows:  # its docstring says that the order is random
            assert pairs[0].news == pairs[-1].news, "the order is not deterministic"

    run()


@_every_engine
@pytest.mark.parametrize("num_rows", _SIZES)
def test_every_operation_at_every_size(engine: type[RowSet], device: torch.device, num_rows: int) -> None:
    draw = np.random.default_rng(num_rows)
    few, many = (
        draw.integers(-3, num_rows + 3, size).tolist() for size in (5, 1100)
    )  # more than one program of Triton
    pair = Pair(engine, num_rows, device)
    pair.run([("scan", []), ("mark", few), ("mark_new", [*many, *_FAR]), ("mark_new_padded", many + few)])
    pair.run([("contains", few + _FAR), ("rank", many + _FAR), ("mark", []), ("mark_new", []), ("mark_new_padded", [])])
    pair.run([("mark_all", []), ("mark_new", few), ("mark_new_padded", few), ("contains", []), ("rank", [])])


@_every_engine
def test_a_union_with_all_rows_is_all_rows(engine: type[RowSet], device: torch.device) -> None:
    for num_rows in (1, 64, 513):
        full, pair = engine(num_rows, device), Pair(engine, num_rows, device)
        full.mark_all()
        pair.mark([0])
        pair.rows.merge(full)
        pair.mark_all([])
        pair.scan([])


@_every_engine
@pytest.mark.parametrize("num_rows", _LARGE_SIZES)
def test_summaries_of_several_words(engine: type[RowSet], device: torch.device, num_rows: int) -> None:
    last = num_rows - 1
    pair = Pair(engine, num_rows, device)
    pair.run([("mark", [last, 7]), ("merge", [last - 1, last - 600]), ("mark_new", [last // 2, last, last, num_rows])])
    pair.rank([last, 7, last - 600])


@_needs_numba
@pytest.mark.parametrize("first", ["mark", "mark_new"])
@pytest.mark.parametrize("then", ["scan", "rank", "contains", "merge", "mark_new", "mark_all", "clear"])
def test_what_is_marked_without_summary_is_there_for_all(first: str, then: str) -> None:
    sets = NumbaRows(5000, _CPU), TorchRows(5000, _CPU)
    generator = torch.Generator().manual_seed(0)
    many, few = (torch.randint(5000, (count,), generator=generator) for count in (2000, 7))
    for rows in sets:
        getattr(rows, first)(few)
        rows.mark(many)  # so many that the summary is left for later
    if then in ("scan", "mark_all", "clear"):
        for rows in sets:
            getattr(rows, then)()
    elif then == "merge":
        for rows in sets:
            fresh = type(rows)(5000, _CPU)
            fresh.mark(torch.arange(20))
            fresh.merge(rows)
            rows.merge(fresh)
            rows.mark(torch.tensor([4999]))
            assert set(many.tolist()) <= set(fresh.scan().tolist())
    else:
        given = torch.arange(0, 5000, 3), *([sets[1].scan()] if then == "rank" else [])
        found = [getattr(rows, then)(*given) for rows in sets]
        assert torch.equal(*found)
    assert sets[0].count() == sets[1].count()
    assert torch.equal(*(rows.scan() for rows in sets))
    assert torch.equal(*(rows.rank(few, rows.scan()) for rows in sets))


@_needs_numba
@pytest.mark.parametrize("num_ids", [1000, 200_000])
def test_numba_and_torch_agree_on_large_shards(num_ids: int) -> None:
    num_rows = 3_000_000
    draw = np.random.default_rng(0)
    sets = NumbaRows(num_rows, _CPU), TorchRows(num_rows, _CPU)
    for _ in range(3):
        uniform = torch.from_numpy(draw.integers(-5, num_rows + 5, num_ids))
        skewed = torch.from_numpy(np.minimum(draw.pareto(0.3, num_ids), num_rows).astype(np.int64))
        for rows in sets:
            rows.mark(uniform)
        new, expected = (rows.mark_new(skewed) for rows in sets)
        assert torch.equal(new.sort().values, expected)
        assert new.untyped_storage().nbytes() == new.nbytes
        assert torch.equal(*(rows.contains(uniform + 1) for rows in sets))
        assert torch.equal(*(rows.rank(uniform + 1, rows.scan()) for rows in sets))
        assert torch.equal(*(rows.scan() for rows in sets))
    more = [type(rows)(num_rows, _CPU) for rows in sets]
    for rows, other in zip(sets, more, strict=True):
        other.mark(torch.arange(0, num_rows, 1001))
        rows.merge(other)
    assert torch.equal(*(rows.scan() for rows in sets))


@_every_engine
def test_ids_with_gaps_are_taken(engine: type[RowSet], device: torch.device) -> None:
    ids = torch.arange(20, device=device)[::3]
    rows = engine(20, device)
    rows.mark(ids[:2])
    assert rows.contains(ids).tolist() == [True, True, False, False, False, False, False]
    assert sorted(rows.mark_new(ids).tolist()) == ids[2:].tolist()
    assert rows.rank(ids, rows.scan()).tolist() == [0, 1, 2, 3, 4, 5, 6]


class _JointRows(TorchRows):
    """Sets that share memory, as on a device."""

    @classmethod
    def create_each(cls, nums_rows: Sequence[int], device: torch.device) -> list[Self]:
        shared = torch.zeros(sum(nums_rows), dtype=torch.bool, device=device)
        begins = itertools.accumulate(nums_rows, initial=0)
        return [cls(rows, device, shared=shared, begin=begin) for rows, begin in zip(nums_rows, begins, strict=False)]


@pytest.mark.sweep("short")
@pytest.mark.parametrize(("engine", "device"), [pytest.param(_JointRows, _CPU, id="torch, shared"), *_engines])
def test_sets_that_are_marked_together_are_as_sets_marked_alone(engine: type[RowSet], device: torch.device) -> None:
    @settings(
        max_examples=12 if _INTERPRETS else 60 if SWEEPS_ARE_WHOLE else num_examples(20),
        phases=[Phase.generate] if _INTERPRETS else Phase,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.nested_given],
    )
    @given(st.lists(st.sampled_from(_SIZES), min_size=1, max_size=5), st.data())
    def run(nums_rows: list[int], data: Any) -> None:
        pairs = [Pair(engine, num_rows, device) for num_rows in nums_rows]
        together = engine.create_each(nums_rows, device)
        for pair, rows in zip(pairs, together, strict=True):
            pair.rows = rows
        for _ in range(data.draw(st.integers(1, 5))):
            chosen = data.draw(st.permutations(pairs))[: data.draw(st.integers(1, len(pairs)))]
            ids = [data.draw(st.lists(st.integers(-2, pair.rows.num_rows + 2), max_size=40)) for pair in chosen]
            sets, given_ids = (
                [pair.rows for pair in chosen],
                [pair.ids(each) for pair, each in zip(chosen, ids, strict=True)],
            )
            if data.draw(st.booleans()):
                engine.mark_each(sets, given_ids)
                for pair, each in zip(chosen, ids, strict=True):
                    pair.reference.mark_new(each)
            else:
                found = engine.mark_new_padded_each(sets, given_ids)
                for pair, each, (padded, count) in zip(chosen, ids, found, strict=True):
                    assert (padded.shape, count.shape) == ((len(each),), (1,))
                    assert padded[int(count) :].tolist() == [-1] * (len(each) - int(count))
                    pair.compare_new(padded[: int(count)], pair.reference.mark_new(each))
            assert [each.tolist() for each in given_ids] == ids
            listed, counts = engine.scan_each(together), engine.count_each(together)
            assert [rows.tolist() for rows in listed] == [sorted(pair.reference.rows) for pair in pairs]
            assert counts == [len(pair.reference.rows) for pair in pairs]
        pairs[0].run([("clear", []), ("mark", [1])])
        for pair in pairs:
            pair.scan([])

    run()


@_every_engine
def test_results_outlive_later_calls(engine: type[RowSet], device: torch.device) -> None:
    rows = engine(100, device)
    ids = torch.tensor([3, 4, 3, 99], device=device)
    results = [rows.mark_new(ids), *rows.mark_new_padded(ids + 1), rows.scan(), rows.contains(ids)]
    results.append(rows.rank(ids, results[3]))
    copies = [result.clone() for result in results]
    rows.mark_all()
    rows.mark_new(ids)
    rows.rank(ids, rows.scan())
    assert all(itertools.starmap(torch.equal, zip(results, copies, strict=True)))


@_every_engine
def test_a_set_made_in_inference_mode_can_be_used_outside(engine: type[RowSet], device: torch.device) -> None:
    with torch.inference_mode():
        rows = engine(10, device)
        ids = torch.tensor([3, 4], device=device)
        rows.mark(ids)
    rows.mark(ids + 1)
    assert rows.mark_new(ids + 2).tolist() == [6]
    rows.merge(engine(10, device))
    rows.mark_all()


def test_memory_is_a_byte_or_a_bit_per_row() -> None:
    for num_rows in (0, 1, 1000, 10**6, 10**8):
        assert TorchRows(num_rows, _CPU).num_bytes == num_rows
        if _HAS_NUMBA:
            rows = NumbaRows(num_rows, _CPU)
            assert num_rows / 8 <= rows.num_bytes <= num_rows / 8 * 1.01 + 128


@_needs_numba
def test_numba_lets_other_threads_run() -> None:
    loops = numba_rows.load_loops()
    names = [
        "mark",
        "mark_octets",
        "mark_new",
        "summarize",
        "clear",
        "contains",
        "merge",
        "unpack",
        "count_before",
        "rank",
    ]
    for name in names:
        assert getattr(loops, name).targetoptions["nogil"], name


@_needs_numba
def test_a_scan_writes_no_further_than_it_may() -> None:
    loops = numba_rows.load_loops()
    generator = np.random.default_rng(0)
    for density in (0.001, 0.1, 0.5, 0.99, 1.0):
        bits = (generator.random(128 * 64) < density).astype(np.uint8)
        words = np.packbits(bits, bitorder="little").view(np.int64)
        summary = np.zeros(1, dtype=np.int64)
        count = loops.summarize(words, summary)
        rows = np.full(count + loops.SPARE + 64, -7, dtype=np.int64)
        loops.unpack(words, summary, rows)
        assert rows[:count].tolist() == bits.nonzero()[0].tolist()
        assert (rows[count + loops.SPARE :] == -7).all()


class _Interrupted:
    """The compiled loops, with Ctrl-C directly after one of them."""

    def __init__(self, loops: Any) -> None:
        self._loops = loops
        self.name = ""

    def __getattr__(self, name: str) -> Any:
        loop = getattr(self._loops, name)
        if name != self.name:
            return loop

        def interrupted(*args: Any) -> None:
            loop(*args)
            raise KeyboardInterrupt

        return interrupted


@_needs_numba
@pytest.mark.parametrize("kind", [NumbaRows, _LargeRows])
@pytest.mark.parametrize("name", ["mark_octets", "mark", "mark_new", "merge", "clear", "summarize"])
def test_an_interrupt_after_a_loop_loses_no_row(
    kind: type[NumbaRows], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = _Interrupted(numba_rows.load_loops())
    monkeypatch.setattr(numba_rows, "load_loops", lambda: loops)
    num_interrupts = 0
    for before, ids in itertools.product([[], [0, 3], list(range(0, 5000, 3))], [[7, 4999], list(range(1, 5000, 2))]):
        rows, other = kind(5000, _CPU), kind(5000, _CPU)
        rows.mark(torch.tensor(before, dtype=torch.int64))
        other.mark(torch.tensor(ids))
        other.count()
        calls = {"mark_new": rows.mark_new, "merge": partial(_merge, rows, other), "clear": partial(_clear, rows)}
        loops.name = name
        try:
            calls.get(name, rows.mark)(torch.tensor(ids))
            rows.count()
        except KeyboardInterrupt:
            num_interrupts += 1
        loops.name = ""
        again = [11, 4000]
        for _ in range(2):
            rows.mark(torch.tensor(again))
        found = rows.scan().tolist()
        assert found == sorted(set(found))
        assert rows.count() == len(found)
        assert {*again, *([] if name == "clear" else before)} <= set(found) <= {*again, *before, *ids}
        rows.clear()
        assert rows.scan().tolist() == []
    assert num_interrupts or (kind is _LargeRows and name in ("mark_octets", "summarize"))


def _merge(rows: NumbaRows, other: NumbaRows, ids: Tensor) -> None:
    del ids
    rows.merge(other)


def _clear(rows: NumbaRows, ids: Tensor) -> None:
    rows.mark(ids)
    rows.clear()


@_needs_numba
def test_numba_compiles_without_a_folder_for_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    caching = pytest.importorskip("numba.core.caching")
    compile_loop = import_module("delta_tracker.tracker.row_sets.numba_loops")._loop("int64(int64)")
    assert compile_loop(lambda x: x + 1).stats.cache_path
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    loop = compile_loop(lambda x: x + 2)
    assert (loop.stats.cache_path, loop(1)) == (None, 3)


@_every_engine
def test_a_set_takes_the_stated_bits_per_row(engine: type[RowSet], device: torch.device) -> None:
    rows = engine(1 << 20, device)
    rows.mark_all()
    assert 8 * rows.num_bytes == pytest.approx(engine.row_bits << 20, rel=0.02)


def test_engines_are_chosen_by_device_and_by_name() -> None:
    cuda = torch.device("cuda", 0)
    assert choose_engine(None, _CPU) is (NumbaRows if _HAS_NUMBA else TorchRows)
    assert choose_engine(None, cuda) is TorchRows
    assert choose_engine("torch", _CPU) is choose_engine("torch", cuda) is TorchRows
    assert choose_engine("numba", _CPU) is NumbaRows
    assert choose_engine("triton", cuda) is TritonRows
    for name, engine in ENGINES.items():
        device = next(each for each in (_CPU, cuda) if engine.serves(each))
        assert choose_engine(name, device) is engine


@pytest.mark.parametrize(("name", "device"), [("sort", "cpu"), ("", "cuda"), ("numba", "cuda"), ("triton", "cpu")])
def test_an_engine_that_cannot_serve_is_refused(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InvalidArgumentError, match=rf"engine='{name}'.*Use one of \['torch', ") as caught:
        choose_engine(name, torch.device(device))
    assert (caught.value.argument, caught.value.value) == ("engine", name)


@_needs_triton
@pytest.mark.skipif(_INTERPRETS, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("capability", [80, 90])
def test_triton_compiles_for_a_gpu_that_is_not_here(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    compiler = pytest.importorskip("triton.compiler")
    backend = pytest.importorskip("triton.backends.compiler")
    programs = import_module("delta_tracker.tracker.row_sets.triton_programs")
    pointers = {"words": "*i32", "summary": "*i32", "ids": "*i64", "fresh": "*i64", "num_fresh": "*i64"}
    pointers |= {
        "sets": "*i64",
        "counts": "*i32",
        "touched": "*i32",
        "num_touched": "*i64",
        "before": "*i64",
        "out": "*i64",
    }
    for name, constants in [
        ("mark", {"size": 1024, "wants_fresh": True}),
        ("mark", {"size": 1024, "wants_fresh": False}),
        ("count", {"size": 64}),
        ("scan", {}),
    ]:
        kernel = getattr(programs, name)
        signature = {each: "constexpr" if each in constants else pointers.get(each, "i64") for each in kernel.arg_names}
        compiled = compiler.compile(
            compiler.ASTSource(kernel, signature, constants), target=backend.GPUTarget("cuda", capability, 32)
        )
        is_atomic = any(word in compiled.asm["ptx"] for word in ("atom.global", "red.global", "atom.relaxed"))
        assert is_atomic == (name in ("mark", "count")), name
        assert compiled.asm["cubin"]


@_needs_triton
@pytest.mark.skipif(_INTERPRETS, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("capability", [80, 90])
def test_triton_compiles_one_variant_for_all_sizes_and_alignments(
    capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every size and alignment once had a variant, which was compiled inside a backward pass."""
    backend = pytest.importorskip("triton.backends.compiler")
    runtime = pytest.importorskip("triton.runtime")
    programs = import_module("delta_tracker.tracker.row_sets.triton_programs")
    driver = SimpleNamespace(
        get_current_target=lambda: backend.GPUTarget("cuda", capability, 32),
        get_current_device=lambda: f"a GPU of capability {capability}",
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(runtime.driver, "_active", driver)
    launched: dict[str, set[str]] = {}

    def launch(self: TritonRows, name: str, grid: tuple[int, ...], *arguments: Any, **constants: int) -> None:
        kernel = getattr(programs, name)
        kernel.warmup(*arguments, **constants, grid=grid)
        launched.setdefault(name, set()).update(kernel.device_caches[driver.get_current_device()][0])

    monkeypatch.setattr(TritonRows, "_launch", launch)
    monkeypatch.setattr(TritonRows, "serves", classmethod(lambda cls, device: True))
    monkeypatch.setattr(TritonRows, "warm_up", classmethod(lambda cls, device: None))
    for num_rows in (1, 16, 512, 5003, 10_000):
        rows = TritonRows(num_rows, _CPU)
        for num_ids, offset in ((1, 0), (1, 1), (16, 0), (16, 3), (1001, 5)):
            ids = torch.zeros(2000, dtype=torch.int64)[offset : offset + num_ids]
            rows.mark(ids)
            rows.mark_new_padded(ids)
            TritonRows.mark_each([rows, rows], [ids, ids])
            TritonRows.mark_new_padded_each([rows, rows], [ids, ids])
        rows.count_blocks()
        rows._launch(
            "scan", (1,), rows._words, *(torch.zeros(9, dtype=t) for t in (torch.int64, torch.int32, torch.int64))
        )
    num_variants = {name: len(variants) for name, variants in launched.items()}
    assert num_variants == {"mark": 2, "count": 1, "scan": 1}


@_needs_triton
@pytest.mark.skipif(not _INTERPRETS, reason="runs only in Triton's interpreter: `make test-triton`")
def test_a_scan_of_triton_visits_only_blocks_with_marked_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of 100 M rows once started 195,000 programs, one for each block of 512 rows."""
    rows = TritonRows(512 * 1000, _CPU)
    rows.mark(torch.tensor([5, 512 * 700 + 3, 6]))
    launched, launch = [], TritonRows._launch

    def counting(self: TritonRows, name: str, grid: tuple[int, ...], *arguments: Any, **constants: int) -> None:
        launched.append((name, *grid))
        launch(self, name, grid, *arguments, **constants)

    monkeypatch.setattr(TritonRows, "_launch", counting)
    assert rows.scan().tolist() == [5, 6, 512 * 700 + 3]
    assert launched == [("count", 16), ("scan", 2)]


@_needs_triton
@pytest.mark.skipif(not _INTERPRETS, reason="runs only in Triton's interpreter: `make test-triton`")
def test_mark_new_of_triton_sorts_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = TritonRows(1000, _CPU)
    monkeypatch.setattr(Tensor, "sort", None)
    assert sorted(rows.mark_new(torch.tensor([7, 3, 7, 2])).tolist()) == [2, 3, 7]


def test_the_engine_is_warm_before_the_first_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store creates its first set in a backward pass, where Triton once compiled its kernels."""
    calls: list[torch.device] = []
    monkeypatch.setattr(TorchRows, "warm_up", calls.append)
    SegmentStore(10, _CPU, engine="torch")
    assert calls == [_CPU]
