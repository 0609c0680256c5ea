"""Faults of the monitor, by the generator that finds them."""

from __future__ import annotations

from tests.reverts.mutation import DoesNothing, Loses, Replaces
from tests.reverts.revert import Revert

REVERTS = {
    "tests/monitor/test_device.py::test_sums_are_read_after_the_updates_of_any_stream": [
        Revert(
            "sums are copied on the current stream of the collector",
            Replaces("_start_copy", "on_stream(_)", "nullcontext()"),
        ),
        Revert("sums are updated on several streams at once", Loses("DeviceState._vector", "enter(...)")),
        Revert("sums are recorded before they are on the host", Loses("HostCopy.result", "synchronize(...)")),
    ],
    "tests/monitor/test_sinks.py::test_every_accepted_stat_reaches_prometheus": [
        Revert(
            "two stats have one name in Prometheus, which drops one of them", DoesNothing("Registry._check_exposed")
        ),
    ],
    "tests/monitor/test_sinks.py::test_a_quantile_of_prometheus_is_off_by_the_stated_fraction_at_most": [
        Revert(
            "a quantile that Prometheus computes is off by up to 100 %",
            Replaces("prometheus._buckets", "2.0 ** _", "2.0 ** round(_)"),
        ),
    ],
    "tests/monitor/test_sinks.py::test_otlp_histograms_follow_the_specification": [
        Revert(
            "the buckets of an OTLP histogram do not add up to its count",
            Replaces("opentelemetry._metric", "_.buckets.count == _.count", "True"),
        ),
        Revert(
            "numbers too small for a bucket are exported in the wrong one",
            Replaces("_exponential", "_ + _ + _", "_"),
            Replaces("opentelemetry._dense", "_ - {LOWEST}", "_"),
        ),
    ],
}
