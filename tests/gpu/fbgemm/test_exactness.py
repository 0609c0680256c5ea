"""Exact tracking of every fused optimizer, kind of lookup, placement and dtype; training is undisturbed."""

from __future__ import annotations

import itertools

import pytest

from tests.gpu.devices import IS_SHORT, needs
from tests.ranks import RankPool

_ON_CPU = ["SGD", "RowWiseAdagrad", "Adagrad"]
_OPTIMIZERS = [*_ON_CPU, "Adam", "PartialRowWiseAdam", "LAMB", "LarsSGD"]
_KERNELS = ["fused", "fused_uvm_caching", "fused_uvm"]
_DTYPES = ["FP32", "FP16", "BF16"]

_CASES = [
    pytest.param(
        optimizer,
        bag,
        kernel,
        dtype,
        marks=[
            *([needs("optimizers")] if optimizer not in _ON_CPU else []),
            *([needs("uvm")] if kernel != "fused" else []),
            *([needs("bfloat16")] if dtype == "BF16" else []),
        ],
    )
    for optimizer, kernel, bag, dtype in itertools.product(_OPTIMIZERS, _KERNELS, [False, True], _DTYPES)
]
# Every value that the CPU has occurs in at least one case.
_FEW = [
    ("SGD", True, "fused", "FP32"),
    ("RowWiseAdagrad", False, "fused", "FP16"),
    ("Adagrad", True, "fused", "FP16"),
]
if IS_SHORT:
    _CASES = [case for case in _CASES if case.values in _FEW or case.marks]


@pytest.mark.parametrize(("optimizer", "bag", "kernel", "dtype"), _CASES)
def test_reported_rows_are_those_whose_bits_changed(
    one_rank: RankPool, optimizer: str, bag: bool, kernel: str, dtype: str, tmp_path
) -> None:
    (num_changed,) = one_rank.run(
        "tests.gpu.fbgemm.training:exact",
        optimizer=optimizer,
        bag=bag,
        kernel=kernel,
        dtype=dtype,
        directory=str(tmp_path),
    )
    assert num_changed > 100
