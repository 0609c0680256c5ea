"""Compiled lookups and compiled autograd report the rows that changed."""

from __future__ import annotations

import pytest

from tests.gpu.devices import IS_CUDA, needs
from tests.ranks import RankPool

pytestmark = pytest.mark.sweep("short", only=not IS_CUDA)  # some 10 s each


@pytest.mark.parametrize("autograd", [False, True], ids=["eager backward", "compiled autograd"])
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=needs("fbgemm"))], ids=["graph breaks", "fullgraph"])
def test_compiled_lookups_report_the_rows_that_changed(one_rank: RankPool, full: bool, autograd: bool) -> None:
    backend = "inductor" if IS_CUDA else "aot_eager"
    (num_changed,) = one_rank.run("tests.gpu.fbgemm.training:compiled", backend=backend, full=full, autograd=autograd)
    if num_changed is None:
        pytest.skip("torch cannot trace this build of FBGEMM without graph breaks, with or without a tracker")
    assert num_changed > 10
