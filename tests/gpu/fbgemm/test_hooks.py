"""Hooks on FBGEMM's kernels do not wait for the device, in any mode and with any engine."""

from __future__ import annotations

import pytest

from delta_tracker import TrackingMode
from tests.gpu.devices import ENGINES, IS_SHORT, needs
from tests.ranks import RankPool

_MODES = [each.value for each in TrackingMode if each is not TrackingMode.ROWWISE_ADAGRAD]  # a former name
_CASES = [
    pytest.param(mode, record, kernel, bag, engine, marks=[] if kernel == "fused" else needs("uvm"))
    for engine in ENGINES
    for mode in _MODES
    for record, kernel, bag in [
        ("updates", "fused", True),
        ("lookups", "fused", False),
        ("updates", "fused_uvm_caching", True),
    ]
    if not IS_SHORT or kernel != "fused" or (mode == "embedding" and bag)
]


@pytest.mark.parametrize(("mode", "record", "kernel", "bag", "engine"), _CASES)
def test_hooks_do_not_wait_for_the_device(
    one_rank: RankPool, mode: str, record: str, kernel: str, bag: bool, engine: str
) -> None:
    (found,) = one_rank.run(
        "tests.gpu.fbgemm.training:hooks_without_syncs",
        mode=mode,
        record=record,
        kernel=kernel,
        bag=bag,
        engine=engine,
    )
    assert found["errors"] == 0
    assert found["waiting"] == []
    assert found["hooks"] >= 3 * 3
    assert found["rows"] > 0
