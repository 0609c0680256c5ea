"""Lookups in quantized tables, of every width and placement, equal those in newly quantized tables of the trainer."""

from __future__ import annotations

import pytest

from tests.gpu.devices import needs
from tests.ranks import RankPool
from tests.sharding.quantized import KINDS

_CASES = [
    pytest.param(kind, bag, placement, marks=[] if placement == "whole" else needs("uvm"))
    for kind in KINDS
    for bag in (False, True)
    for placement in ("whole", "quant", "quant_uvm", "quant_uvm_caching")
]


@pytest.mark.parametrize(("kind", "bag", "placement"), _CASES)
def test_lookups_equal_those_in_newly_quantized_tables(
    one_rank: RankPool, kind: str, bag: bool, placement: str
) -> None:
    arguments = {"kind": kind, "bag": bag, "placement": placement}
    assert one_rank.run("tests.gpu.fbgemm.serving:follow", **arguments) == [4]
