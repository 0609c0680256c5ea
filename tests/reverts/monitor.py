"""Fixes in the monitor."""

from __future__ import annotations

from tests.reverts.revert import Revert

_IN_TRAINING = "tests/monitor/test_device.py::test_a_metric_starts_no_collective_in_the_collector"
_SCHEDULES = "tests/system/test_monitor_schedules.py::test_random_schedules"
_METRIC = "delta_tracker/monitor/device/torchmetric.py"
_STATE = "delta_tracker/monitor/device/state.py"
_ANY_STREAM = "tests/monitor/test_device.py::test_a_metric_is_read_after_the_updates_of_any_stream"
_SUMS = "tests/monitor/test_device.py::test_sums_are_read_after_the_updates_of_any_stream"
_ALERTS = "delta_tracker/monitor/alerts.yml"
_FAULTS = "tests/system/test_promtool.py::test_each_fault_fires_its_alerts_and_no_others"
_HEALTHY = "tests/system/test_promtool.py::test_no_alert_fires_in_an_hour_of_healthy_load"
_FORKS = "tests/system/test_monitor_forks.py::test_no_child_hangs_or_writes_its_parents_data"

REVERTS = [
    Revert(
        defect="a torchmetrics metric synchronizes in the collector's thread",
        generator=_IN_TRAINING,
        edits={
            _METRIC: [
                (
                    "host.sync_on_compute = host.dist_sync_on_step = host._to_sync = False",
                    "host.sync_on_compute = False",
                ),
                ("    host.distributed_available_fn = _is_not_distributed\n", ""),
                ("metric.dist_sync_fn, metric.distributed_available_fn)", "metric.dist_sync_fn)"),
            ]
        },
    ),
    Revert(
        defect="a source that raises in a forked child leaves it with the locks of the parent",
        generator=_FORKS,
        edits={
            "delta_tracker/monitor/registry.py": [
                (
                    "            except Exception:  # noqa: BLE001  it is the user's code; the caller counts it\n",
                    "            except ImportError:\n",
                ),
            ]
        },
    ),
    Revert(
        defect="integers of a torchmetrics metric are rounded to floats",
        generator=_IN_TRAINING,
        edits={_METRIC: [("number.item() if isinstance(number, Tensor) else number", "float(number)")]},
    ),
    Revert(
        defect="a forked child closes a file whose lock a thread of its parent held",
        generator=_FORKS,
        edits={
            "delta_tracker/monitor/sinks/appended_file.py": [
                (
                    'self._path.open("wb" if replace else "ab", buffering=0)',
                    'self._path.open("wb" if replace else "ab")',
                ),
                (
                    "            while data:\n                data = data[self._file.write(data) :]\n",
                    "            self._file.write(data)\n            self._file.flush()\n",
                ),
            ]
        },
    ),
    Revert(
        defect="a busy handler keeps the collector from collecting",
        generator=_SCHEDULES,
        edits={
            "delta_tracker/monitor/collector.py": [
                ("if wake is _Wake.EVENTS and left > 0:", "if wake is _Wake.EVENTS:"),
                ("time.sleep(min(_BURST_SECONDS, left))", "time.sleep(_BURST_SECONDS)"),
            ]
        },
    ),
    Revert(
        defect="a delivery that fails drops its windows and events",
        generator=_SCHEDULES,
        edits={
            "delta_tracker/monitor/delivery_queues.py": [
                (
                    "num_windows = num_events = 0\n        try",
                    "num_windows, num_events = len(windows), len(events)\n        try",
                ),
            ]
        },
    ),
    Revert(
        defect="a sink is called while it delivers",
        generator=_SCHEDULES,
        edits={"delta_tracker/monitor/guarded_calls.py": [("if guard.is_busy or (now", "if (now")]},
    ),
    Revert(
        defect="the last batch does not wait for a sink that returns late",
        generator="tests/monitor/test_delivery_queues.py::test_a_sink_is_called_once_at_a_time_and_closed_after_its_call",
        edits={
            "delta_tracker/monitor/guarded_calls.py": [
                ("if even_if_muted and guard.call is not None:", "if not guard:")
            ]
        },
    ),
    Revert(
        defect="nothing is delivered where no thread can be started",
        generator=_SCHEDULES,
        edits={
            "delta_tracker/monitor/guarded_calls.py": [
                ("            if here_if_refused:\n", "            if not guard:\n")
            ]
        },
    ),
    Revert(
        defect="a record changes with the tensor that was added",
        generator="tests/monitor/test_series.py::test_a_record_does_not_change_with_its_value",
        edits={
            "delta_tracker/monitor/series.py": [
                ("                value = plain_number(value)\n", "                pass\n")
            ]
        },
    ),
    Revert(
        defect="a merge over ranks takes the next reading from the collector",
        generator="tests/monitor/test_device.py::test_a_merge_over_ranks_takes_no_reading_from_the_collector",
        edits={
            "delta_tracker/monitor/device/torchmetric.py": [
                (
                    "            copies = self._start_copies()\n",
                    "            self._num_read, copies = self._num_updates, self._start_copies()\n",
                ),
            ],
        },
    ),
    Revert(
        defect="a metric keeps the tensors that are passed to it",
        generator="tests/monitor/test_device.py::test_a_metric_keeps_neither_the_values_nor_their_graph",
        edits={
            "delta_tracker/monitor/device/torchmetric.py": [
                ("            self._copy_kept(passed, lengths)\n", ""),
            ],
        },
    ),
    Revert(
        defect="a metric that keeps values outside of its states is read as it was at the start",
        generator="tests/monitor/test_device.py::test_metrics_with_values_outside_of_their_states_are_refused",
        edits={
            "delta_tracker/monitor/device/torchmetric.py": [
                ("            _check_unchanged(self.name, outside, _outside(self.metric))\n", ""),
            ],
        },
    ),
    Revert(
        defect="the last values of a device stat that was deleted are lost",
        generator="tests/monitor/test_device.py::test_a_stat_that_is_deleted_is_read_once_more_and_freed",
        edits={
            "delta_tracker/monitor/device/state.py": [
                ("            self._reader.deleted.append(self)\n", "            pass\n")
            ]
        },
    ),
    Revert(
        defect="the last values of a torchmetrics metric that was deleted are lost",
        generator="tests/monitor/test_device.py::test_a_metric_that_is_deleted_is_read_once_more_and_freed",
        edits={
            "delta_tracker/monitor/device/torchmetric.py": [
                ("            reader.deleted.append(self)\n", "            pass\n")
            ]
        },
    ),
    Revert(
        defect="a merge over ranks that failed loses the values of its rank",
        generator="tests/monitor/test_device.py::test_a_merge_over_ranks_that_failed_loses_no_value",
        edits={
            "delta_tracker/monitor/device/across_ranks.py": [
                (
                    "    dist.all_reduce(vector",
                    "    [a.set_merged(b) for a, b in zip(stats, now)]\n    dist.all_reduce(vector",
                )
            ]
        },
    ),
    Revert(
        defect="the last values of a deleted device stat are lost if their copy cannot be started",
        generator="tests/monitor/test_device.py::test_a_stat_that_is_deleted_is_read_after_a_copy_that_failed",
        edits={
            "delta_tracker/monitor/device/state.py": [
                ("deleted = [self.deleted[place] for place", "deleted = [self.deleted.popleft() for _"),
                ("            for _ in deleted:\n                self.deleted.popleft()\n", ""),
            ]
        },
    ),
    Revert(
        defect="a number that is the weight of values on a device is rounded to float32",
        generator="tests/monitor/test_device.py::test_a_number_as_weight_is_not_rounded_to_float32",
        edits={
            "delta_tracker/monitor/device/metrics.py": [
                ("weight = torch.full((), weight, dtype=dtype, device=value.device)", "weight = float(weight)")
            ]
        },
    ),
    Revert(
        defect="the last values of a torchmetrics metric are lost if a new one of the same name replaces it",
        generator="tests/monitor/test_device.py::test_a_metric_that_replaces_a_deleted_one_loses_none_of_its_updates",
        edits={"delta_tracker/monitor/registry.py": [("source.take_over(earlier)", "pass")]},
    ),
    Revert(
        defect="a weight on the host is copied to the device of the values, which waits",
        generator="tests/monitor/test_device.py::test_nothing_waits",
        edits={
            "delta_tracker/monitor/device/metrics.py": [
                ("        if isinstance(weight, Tensor) and weight.device != value.device:", "        if False:")
            ]
        },
    ),
    Revert(
        defect="a copy of a number from the host in an operation is not detected",
        generator="tests/monitor/test_device.py::test_numbers_from_the_host_that_torch_copies_are_detected",
        edits={
            "delta_tracker/monitor/device/syncs.py": [('frozenset({"where", "index_put",', 'frozenset({"index_put",')]
        },
    ),
    Revert(
        defect="a metric whose first update moves it to a device is read before this update",
        generator=_ANY_STREAM,
        edits={
            _METRIC: [("            self._enter()  # the first update", "            pass  # the first update")],
        },
    ),
    Revert(
        defect="a metric on a device is updated on several streams at once",
        generator=_ANY_STREAM,
        edits={
            _METRIC: [
                ("            self._enter()\n            self.metric.update", "            self.metric.update"),
            ]
        },
    ),
    Revert(
        defect="a metric is copied on the current stream of the collector",
        generator=_ANY_STREAM,
        edits={_METRIC: [("torch.cuda.stream(self._fence.last_stream(state.device))", "torch.cuda.stream(None)")]},
    ),
    Revert(
        defect="sums are copied on the current stream of the collector",
        generator=_SUMS,
        edits={_STATE: [("with torch.cuda.stream(stream):", "with torch.cuda.stream(None):")]},
    ),
    Revert(
        defect="sums are updated on several streams at once",
        generator=_SUMS,
        edits={_STATE: [("            self._fence.enter()\n", "            pass\n")]},
    ),
    Revert(
        defect="sums are recorded before they are on the host",
        generator=_SUMS,
        edits={"delta_tracker/host_copy.py": [("            self.copied.synchronize()\n", "            pass\n")]},
    ),
    Revert(
        defect="a hung store leaves the age of the served rows as it was",
        generator="tests/predictor/test_served_age.py::test_the_age_is_read_at_the_scrape_while_the_store_hangs",
        edits={
            "delta_tracker/monitor/sinks/prometheus.py": [
                ("figures.last if report.function is None else report.function()", "figures.last")
            ],
        },
    ),
    Revert(
        defect="a hung store leaves the lag of a predictor at 0",
        generator="tests/predictor/test_served_age.py::test_the_age_is_read_at_the_scrape_while_the_store_hangs",
        edits={
            "delta_tracker/predictor/gauges.py": [
                ("        self._asked = time.monotonic()\n", ""),
            ],
        },
    ),
    Revert(
        defect="the age of the served rows follows this host's clock although entries contradict it",
        generator="tests/predictor/test_served_age.py::test_the_age_is_that_of_the_stores_clock_whatever_the_readers",
        edits={
            "delta_tracker/predictor/served_age.py": [
                (
                    "        if rested is not None and rested[0] == manifest.version - 1:\n",
                    "        if rested == ():\n",
                ),
            ],
        },
    ),
    Revert(
        defect="a predictor that loaded its position has no age until the next version",
        generator="tests/predictor/test_served_age.py::test_a_loaded_position_has_an_age",
        edits={
            "delta_tracker/predictor/predictor.py": [
                ("            self._gauges.restored = entry\n", ""),
            ],
        },
    ),
    Revert(
        defect="a failed retention is counted nowhere",
        generator="tests/publisher/test_gauges.py::test_a_failed_retention_and_a_skewed_clock_are_shown",
        edits={
            "delta_tracker/publisher/publisher.py": [
                ("                    on_failure=self._gauges.upkeep_failed,\n", ""),
            ],
        },
    ),
    Revert(
        defect="no alert fires if a trainer is killed",
        generator=_FAULTS,
        edits={
            _ALERTS: [
                (
                    "unless on (stream) delta_tracker_publisher_info",
                    "unless on () up",
                ),
            ],
        },
    ),
    Revert(
        defect="an alert misses what was counted before the first scrape",
        generator=_FAULTS,
        edits={
            _ALERTS: [
                ("delta_tracker_refused_parts_total > 0 unless", "delta_tracker_refused_parts_total < 0 unless"),
                ("delta_tracker_refused_parts_total > 0 and on", "delta_tracker_refused_parts_total < 0 and on"),
            ],
        },
    ),
    Revert(
        defect="an alert misses one fault at each start of a process",
        generator=_FAULTS,
        edits={
            _ALERTS: [
                ("delta_tracker_refused_parts_total > 0 and on", "delta_tracker_refused_parts_total < 0 and on"),
            ],
        },
    ),
    Revert(
        defect="a stalled publisher of plain tables fires no alert",
        generator=_FAULTS,
        edits={
            _ALERTS: [
                (
                    "max by (job, instance) (delta(delta_tracker_consumer_lag_batches[15m])) > 0",
                    "sum by (instance) (rate(delta_tracker_lookups_total[15m])) > 0",
                ),
            ],
        },
    ),
    Revert(
        defect="a trainer that moves to another host fires an alert",
        generator=_FAULTS,
        edits={
            _ALERTS: [
                (
                    "(job, stream, url) (last_over_time(delta_tracker_publisher_info[1h])) unless on (stream)",
                    "(instance, stream, url) (last_over_time(delta_tracker_publisher_info[1h])) unless on (instance)",
                ),
            ],
        },
    ),
    Revert(
        defect="one failed poll fires an alert",
        generator=_HEALTHY,
        edits={
            _ALERTS: [
                (
                    "increase(delta_tracker_follow_errors_total[5m]) > 0",
                    "delta_tracker_follow_errors_total > 0",
                ),
            ],
        },
    ),
    Revert(
        defect="a quantile of Prometheus is off by more than 9 %",
        generator="tests/system/test_promtool.py::test_a_quantile_of_prometheus_is_right",
        edits={"delta_tracker/monitor/sinks/prometheus.py": [("_BOUNDS_PER_OCTAVE = 8", "_BOUNDS_PER_OCTAVE = 4")]},
    ),
]
