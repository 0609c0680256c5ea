"""TorchRec's train pipelines on one rank and on two ranks of one device, tracked, published and followed."""

from __future__ import annotations

import pytest

from tests.gpu.devices import needs
from tests.ranks import RankPool

_CASES = [
    ("base", "fused", "id_only"),
    ("sparse dist", "fused", "embedding"),
    pytest.param("sparse dist", "fused_uvm", "embedding", marks=needs("uvm")),
    pytest.param("prefetch", "fused_uvm_caching", "id_only", marks=needs("uvm")),
    pytest.param("prefetch", "fused_uvm_caching", "embedding", marks=needs("uvm")),
    pytest.param("semi sync", "fused", "id_only", marks=needs("streams")),
]


def _run(ranks: RankPool, name: str, kernel: str, mode: str, tmp_path) -> None:
    arguments = {"name": name, "kernel": kernel, "mode": mode, "directory": str(tmp_path)}
    assert sum(ranks.run("tests.gpu.fbgemm.training:pipeline", **arguments)) > 100


@pytest.mark.parametrize(("name", "kernel", "mode"), _CASES)
def test_one_rank(one_rank: RankPool, name: str, kernel: str, mode: str, tmp_path) -> None:
    _run(one_rank, name, kernel, mode, tmp_path)


@pytest.mark.parametrize(("name", "kernel", "mode"), _CASES[1:])
def test_two_ranks(two_ranks: RankPool, name: str, kernel: str, mode: str, tmp_path) -> None:
    _run(two_ranks, name, kernel, mode, tmp_path)


@needs("uvm", "streams")
def test_snapshots_during_a_prefetch_do_not_disturb_the_cache(one_rank: RankPool, tmp_path) -> None:
    (version,) = one_rank.run("tests.gpu.fbgemm.training:snapshots_during_prefetch", directory=str(tmp_path))
    assert version >= 10
