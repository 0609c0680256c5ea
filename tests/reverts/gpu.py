"""Fixes in the tests and the benchmark for GPUs."""

from __future__ import annotations

from tests.reverts.revert import Revert

_TESTS = "tests/system/test_benchmarks.py"

REVERTS = [
    Revert(
        defect="a part of the benchmark for GPUs that fails loses the times of the others",
        generator=f"{_TESTS}::test_a_part_of_the_benchmark_for_gpus_that_fails_loses_no_times",
        edits={"benchmarks/bench_gpu.py": [("                traceback.print_exc()\n", "                raise\n")]},
    ),
    Revert(
        defect="the tests for GPUs do not find packages that only PYTHONPATH has",
        generator=f"{_TESTS}::test_the_tests_for_gpus_run_in_parts",
        edits={"tests/gpu/__main__.py": [('[str(_ROOT), os.environ.get("PYTHONPATH")]', "[str(_ROOT)]")]},
    ),
]
