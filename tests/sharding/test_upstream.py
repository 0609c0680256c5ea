"""Each sharded module, kernel and optimizer of the installed TorchRec and FBGEMM is tracked, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.sharding.upstream import KERNELS, MODULES, OPTIMIZERS, REFUSED, SERVED, TABLES, TRACKED, installed, markdown

_CASES = "tests.sharding.upstream_cases"
_README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("kind", list(TABLES))
def test_each_name_of_the_installed_packages_is_decided(kind: str) -> None:
    undecided = sorted(installed(kind) - TABLES[kind].keys())
    assert not undecided, "track them exactly or refuse them by name, with a test, and add them to upstream.py"


def test_each_sharded_module_is_tracked_or_refused_as_the_table_says(one_rank: RankPool) -> None:
    (found,) = one_rank.run(f"{_CASES}:modules")
    expected = {name: REFUSED if outcome == SERVED else outcome for name, outcome in MODULES.items() if name in found}
    assert found == expected  # test_pruning_is_refused shows what becomes of those that prune


@pytest.mark.promise("supported")
def test_each_kernel_is_tracked_or_refused_as_the_table_says(one_rank: RankPool) -> None:
    (found,) = one_rank.run(f"{_CASES}:kernels")
    assert found == {name: outcome for name, outcome in KERNELS.items() if name in found}


@pytest.mark.promise("supported")
def test_each_fused_optimizer_is_tracked_or_refused_as_the_table_says(one_rank: RankPool) -> None:
    (found,) = one_rank.run(f"{_CASES}:optimizers")
    assert found == {name: outcome for name, outcome in OPTIMIZERS.items() if name in found}
    assert {TRACKED, REFUSED} == set(found.values())


def test_the_readme_has_the_table() -> None:
    assert markdown() in _README.read_text()
