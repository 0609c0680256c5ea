"""Every sharding, kernel, module and mode that TorchRec runs on CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.conformance import (
    EBC_ONLY,
    FOUR_RANKS,
    GROUPS,
    KERNELS,
    MODES,
    MODULES,
    SHARDINGS,
    Group,
    Results,
    torchrec_limit,
)
from tests.ranks import RankPool

_RUN: list[tuple[Group, dict[str, dict[str, str]]]] = []


def test_every_cell_is_run_or_torchrec_cannot_run_it() -> None:
    run = {(name, group.kernel, group.module) for group in GROUPS for name in group.places}
    for sharding in SHARDINGS:
        for kernel in KERNELS:
            for module in MODULES:
                cell = sharding, kernel, module
                assert (cell in run) == (torchrec_limit(*cell) is None), cell


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a_cell_has_the_declared_result(two_ranks: RankPool, four_ranks: RankPool, group: Group) -> None:
    found = group.run({2: two_ranks, 4: four_ranks}[group.world_size])
    results = Results()
    results.add(group, found)
    assert results.faults == []
    assert all(list(verdicts) == list(MODES) for verdicts in found.values())
    _RUN.append((group, found))


def test_the_committed_table_is_of_this_run() -> None:
    if len(_RUN) < len(GROUPS):
        pytest.skip("only after all cells were run")
    results = Results()
    for group, found in _RUN:
        results.add(group, found)
    committed = (Path(__file__).parent.parent.parent / "benchmarks" / "results" / "conformance.md").read_text()
    assert f"<!-- conformance -->\n{results.markdown().strip()}\n<!-- /conformance -->" in committed


def test_torchrec_refuses_this_sharding_of_an_ec(four_ranks: RankPool) -> None:
    for place in (FOUR_RANKS[sharding] for sharding in EBC_ONLY):
        for said in four_ranks.run("tests.tracker.conformance_cases:refusal", place=place):
            assert "not supported" in said


def test_the_table_is_made_of_results() -> None:
    group = Group("EBC", "FUSED")
    found = {name: dict.fromkeys(MODES, "exact") for name in group.places}
    results = Results()
    results.add(group, found)
    results.add(group, found | {"ROW_WISE": dict.fromkeys(MODES, "exact") | {"EMBEDDING": "FAILED: old rows"}})
    assert len(results.faults) == 1
    lines = results.markdown().splitlines()
    assert "| EBC `ROW_WISE` | I L D R **FAILED: EMBEDDING** | NOT RUN | NOT RUN | NOT RUN |" in lines
    assert "| EBC `COLUMN_WISE` | I E L D R | NOT RUN | NOT RUN | NOT RUN |" in lines
