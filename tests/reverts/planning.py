"""Promises of the forecast of memory, bytes and requests."""

from __future__ import annotations

from tests.reverts.revert import Revert

_SIZES = "tests/planning/test_version_size.py::"
_FORECAST = "tests/planning/test_forecast.py::"
_S3 = "tests/system/test_planning.py::"
_CLI = "tests/cli/test_plan.py::"
_SIZE = "delta_tracker/planning/version_size.py"
_FORMULAS = "delta_tracker/planning/forecast.py"
_WORKLOAD = "delta_tracker/planning/workload.py"
_OBSERVED = "delta_tracker/planning/observed.py"

REVERTS: list[Revert] = [
    Revert(
        defect="a plan counts 8 bytes for the id of a quantized row",
        generator=_SIZES + "test_a_published_version_has_the_planned_sizes",
        edits={
            _SIZE: [
                ('elif block.ids == "gaps":', 'elif block.ids == "gaps" and False:'),
                ('if block.ids == "list":', 'if block.ids != "all":'),
            ]
        },
    ),
    Revert(
        defect="a plan leaves the dense tensors out of a version",
        generator=_SIZES + "test_dense_tensors_are_counted",
        edits={_SIZE: [("dense_bytes = workload.dense_bytes if rank == 0 else 0", "dense_bytes = 0")]},
    ),
    Revert(
        defect="a plan counts a large part as read once",
        generator=_SIZES + "test_parts_are_read_with_the_planned_requests",
        edits={_SIZE: [("num_bytes + 2 * each", "num_bytes + each"), ("num_gets += 2 * math", "num_gets += math")]},
    ),
    Revert(
        defect="a plan has a part for a rank without rows",
        generator=_SIZES + "test_each_rank_writes_its_share_of_the_rows",
        edits={_SIZE: [("        if blocks or dense_bytes:\n", "        if True:\n")]},
    ),
    Revert(
        defect="a plan leaves the ids out of a publisher's memory",
        generator=_FORECAST + "test_the_memory_of_a_publish_is_the_planned_one",
        edits={_FORMULAS: [("table.dtype.itemsize + _ID_BYTES) for", "table.dtype.itemsize - _ID_BYTES) // 2 for")]},
    ),
    Revert(
        defect="a plan leaves the buffers out of a predictor's memory",
        generator=_FORECAST + "test_the_memory_of_a_predictor_is_the_planned_one",
        edits={_FORMULAS: [("workload.dense_bytes + held", "workload.dense_bytes")]},
    ),
    Revert(
        defect="a plan counts old states of one consumer only",
        generator=_FORECAST + "test_the_memory_of_a_tracker_is_at_most_the_planned_one",
        edits={_FORMULAS: [("    num_sets = 2 + workload.consumers\n", "    num_sets = 1\n")]},
    ),
    Revert(
        defect="a plan forgets that retention reads every entry, and keeps the versions after a snapshot",
        generator=_FORECAST + "test_retention_keeps_and_requests_what_is_planned",
        edits={_FORMULAS: [("gets=passes * (entries + 1)", "gets=passes"), (" + _RETAIN_EVERY\n", "\n")]},
    ),
    Revert(
        defect="a plan states a disk size although nothing is deleted",
        generator=_FORECAST + "test_without_retention_or_snapshots_nothing_is_bounded",
        edits={
            _FORMULAS: [
                ("if workload.retained_versions is None or workload.snapshot_every is None:", "if False:"),
                ("needed = workload.snapshot_every", "needed = (workload.snapshot_every or 1)"),
                ("max(workload.retained_versions, needed)", "max(workload.retained_versions or 1, needed)"),
                (
                    "if entries is None or workload.snapshot_every is None:\n        return None",
                    "if entries is None:\n        return None",
                ),
                ("math.ceil(entries / workload.snapshot_every)", "math.ceil(entries / (workload.snapshot_every or 1))"),
            ]
        },
    ),
    Revert(
        defect="a plan leaves the deltas out of the start of a predictor",
        generator=_FORECAST + "test_a_new_predictor_reads_the_planned_bytes",
        edits={_FORMULAS: [("first + (workload.snapshot_every - 1) * each", "first")]},
    ),
    Revert(
        defect="a plan leaves out the reads that check an entry",
        generator=_S3 + "test_a_stream_on_s3_takes_the_planned_requests",
        timeout_seconds=120.0,
        edits={_FORMULAS: [("_ENTRY_CHECKS = 3", "_ENTRY_CHECKS = 1")]},
    ),
    Revert(
        defect="a plan leaves out the polls that find nothing",
        generator=_S3 + "test_a_stream_on_s3_takes_the_planned_requests",
        timeout_seconds=120.0,
        edits={_FORMULAS: [("of_snapshot.num_gets) + polls", "of_snapshot.num_gets)")]},
    ),
    Revert(
        defect="a plan counts a multipart upload as one request",
        generator=_S3 + "test_a_large_part_takes_the_planned_requests",
        timeout_seconds=120.0,
        edits={_SIZE: [("1 if each <= PIECE_BYTES else 2 + math.ceil(each / PIECE_BYTES)", "1")]},
    ),
    Revert(
        defect="plan has a price that nobody passed",
        generator=_CLI + "test_json_has_the_same_numbers",
        edits={
            "delta_tracker/cli/plan.py": [
                (
                    'type=Number(0), help="Price of a million requests of class B."',
                    'type=Number(0), default=0.4, help="Price of a million requests of class B."',
                )
            ]
        },
    ),
    Revert(
        defect="plan takes a stream with states as one without",
        generator=_CLI + "test_streams_that_show_no_workload_are_refused",
        edits={_OBSERVED: [("if versions[-1].format != FORMAT:", "if False:")]},
    ),
    Revert(
        defect="plan takes a number that is not finite",
        generator="tests/planning/test_workload.py::test_an_invalid_workload_is_refused_by_name",
        edits={"delta_tracker/arguments.py": [("return math.isfinite(value)", "return True")]},
    ),
]
