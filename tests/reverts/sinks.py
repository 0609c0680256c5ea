"""Fixes in the sinks, and in the names, buckets and spans that they export."""

from __future__ import annotations

from tests.reverts.revert import Revert

_SINKS = "tests/monitor/test_sinks.py::"

REVERTS = [
    Revert(
        defect="two stats have one name in Prometheus, which drops one of them",
        generator=_SINKS + "test_every_accepted_stat_reaches_prometheus",
        edits={"delta_tracker/monitor/registry.py": [("                self._check_exposed(definition)\n", "")]},
    ),
    Revert(
        defect="a quantile that Prometheus computes is off by up to 100 %",
        generator=_SINKS + "test_a_quantile_of_prometheus_is_off_by_the_stated_fraction_at_most",
        edits={
            "delta_tracker/monitor/sinks/prometheus.py": [
                ("2.0 ** (exponent / _BOUNDS_PER_OCTAVE) for exponent in exponents", "2.0**n for n in range(low, high)")
            ]
        },
    ),
    Revert(
        defect="a label that UTF-8 cannot encode makes /metrics answer 500",
        generator=_SINKS + "test_text_that_is_not_utf8_reaches_every_sink[prometheus]",
        edits={"delta_tracker/monitor/names.py": [("encodable(str(labels[name]))", "str(labels[name])")]},
    ),
    Revert(
        defect="an event that UTF-8 cannot encode blocks a sink forever",
        generator=_SINKS + "test_text_that_is_not_utf8_reaches_every_sink[tensorboard]",
        edits={"delta_tracker/monitor/event.py": [("encodable(str(self.message))", "self.message")]},
    ),
    Revert(
        defect="the buckets of an OTLP histogram do not add up to its count",
        generator=_SINKS + "test_otlp_histograms_follow_the_specification",
        edits={
            "delta_tracker/monitor/sinks/opentelemetry.py": [
                (
                    "figures.buckets is not None and figures.buckets.count == figures.count",
                    "figures.buckets is not None",
                )
            ]
        },
    ),
    Revert(
        defect="numbers too small for a bucket are exported in the wrong one",
        generator=_SINKS + "test_otlp_histograms_follow_the_specification",
        edits={
            "delta_tracker/monitor/sinks/opentelemetry.py": [
                ("counted.zero + counted.positive[LOWEST] + counted.negative[LOWEST]", "counted.zero"),
                ("counts.keys() - {LOWEST}", "counts.keys()"),
            ]
        },
    ),
    Revert(
        defect="trace ids repeat between runs, and trace=0 is the invalid id",
        generator="tests/monitor/test_span.py::test_a_trace_can_join_the_spans_of_all_ranks",
        edits={"delta_tracker/monitor/monitor.py": [("trace_of(self._run(), trace)", "trace")]},
    ),
    Revert(
        defect="new traces have 64 bits, of which 16 are the rank",
        generator="tests/monitor/test_span.py::test_traces_without_a_number_have_128_random_bits",
        edits={"delta_tracker/monitor/span.py": [("new_trace() if parent is None", "self.id if parent is None")]},
    ),
    Revert(
        defect="a span that is made by hand blocks the OTLP sink",
        generator=_SINKS + "test_otlp_spans_that_are_made_by_hand_do_not_block_the_sink",
        edits={
            "delta_tracker/monitor/sinks/opentelemetry.py": [
                ("not isinstance(seconds, float) or not 0 < seconds < math.inf", "not isinstance(seconds, float)")
            ],
        },
    ),
    Revert(
        defect="the chrome trace has another time base than the profiler's",
        generator=_SINKS + "test_a_chrome_trace_has_the_timestamps_of_the_profiler",
        edits={"delta_tracker/monitor/sinks/chrome_trace.py": [("(time_ns - self._base_ns)", "(time_ns)")]},
    ),
    Revert(
        defect="one parameter that changed makes MLflow lose each batch",
        generator=_SINKS + "test_mlflow_loses_only_what_it_refuses[fake]",
        edits={
            "delta_tracker/monitor/sinks/mlflow.py": [
                ("            if not self._is_active():\n", "            if items:\n")
            ]
        },
    ),
    Revert(
        defect="a metric whose name is too long is lost",
        generator=_SINKS + "test_mlflow_loses_only_what_it_refuses[fake]",
        edits={"delta_tracker/monitor/sinks/mlflow.py": [("if len(key) <= _MAX_KEY_LENGTH:", "if key:")]},
    ),
    Revert(
        defect="MLflow is asked again and again for a metric that it refuses",
        generator=_SINKS + "test_mlflow_tries_again_what_was_not_refused[fake]",
        edits={"delta_tracker/monitor/sinks/mlflow.py": [('if ("metrics", metric.key) not in self._refused', "")]},
    ),
    Revert(
        defect="TensorBoard draws values of a histogram far below where they are",
        generator=_SINKS + "test_tensorboard_draws_each_value_where_it_is",
        edits={
            "delta_tracker/monitor/sinks/tensorboard.py": [
                ("            found.append((lower, 0))\n", "            pass\n")
            ]
        },
    ),
]
