"""The library's own metrics: names, help, units, labels. The one place to look them up, and to change them.

Each tracker, publisher and predictor records them through a recorder of its own, which adds its name as a label:

    recorder.published_rows.cell(table=fqn).add(len(rows))

A counter is exposed as 0 once its cell exists. What may record a fault creates the cell when it starts, as in
``recorder.resyncs.cell(reason="gap")``, so that an alert sees the first one.

Names follow Prometheus (https://prometheus.io/docs/practices/naming/): a prefix, the unit last; a counter gets
``_total`` where it is exposed. A stat is registered at its first use.
"""

from __future__ import annotations

from collections.abc import Iterable

from delta_tracker.monitor.registry import Registry
from delta_tracker.monitor.stat import Counter, Definition, Gauge, Histogram, Kind, Stat

PREFIX = "delta_tracker_"

# Trackers, tables and consumers: far above what is known, far below what would hurt.
_MAX_CELLS = 4096
_BYTES = (6, 44)  # powers of two: 64 B to 16 TiB


def _counter(name: str, text: str, *labels: str, unit: str = "", is_logical: bool = False) -> Definition:
    return Definition(
        name=PREFIX + name,
        kind=Kind.COUNTER,
        help=text,
        unit=unit,
        labels=labels,
        max_cells=_MAX_CELLS,
        is_logical=is_logical,
    )


def _gauge(name: str, text: str, *labels: str, unit: str = "") -> Definition:
    return Definition(
        name=PREFIX + name, kind=Kind.GAUGE, help=text, unit=unit, labels=labels, max_cells=_MAX_CELLS, bounds=_BYTES
    )


def _seconds(name: str, text: str, *labels: str) -> Definition:
    return Definition(name=PREFIX + name, kind=Kind.HISTOGRAM, help=text, unit="seconds", labels=labels)


# Counters of the training run survive a checkpoint; everything else describes the process.
DEFINITIONS: dict[str, Definition] = {
    # Volume
    "lookups": _counter(
        "lookups",
        "Ids looked up for an update of a fused table, repeats included.",
        "tracker",
        "table",
        is_logical=True,
    ),
    "touched_rows": _counter(
        "touched_rows", "Changed rows that a consumer received.", "tracker", "table", "consumer", is_logical=True
    ),
    "pending_rows": _gauge(
        "pending_rows",
        "Changed rows, of tables on the CPU, that a consumer has not received.",
        "tracker",
        "table",
        "consumer",
    ),
    "pending_ratio": _gauge(
        "pending_ratio", "Pending rows over all rows.", "tracker", "table", "consumer", unit="ratio"
    ),
    "published_rows": _counter("published_rows", "Rows in committed versions.", "publisher", "table", is_logical=True),
    "published_bytes": _counter(
        "published_bytes", "Bytes of committed parts.", "publisher", "kind", unit="bytes", is_logical=True
    ),
    "published_versions": _counter("published_versions", "Committed versions.", "publisher", "kind", is_logical=True),
    "applied_rows": _counter("applied_rows", "Rows written into a predictor's model.", "predictor", "table"),
    "applied_versions": _counter("applied_versions", "Versions that a predictor applied.", "predictor", "kind"),
    # Cost
    "record_seconds": _seconds("record_seconds", "Host time of a hook that records a batch.", "tracker"),
    "read_seconds": _seconds("read_seconds", "Time to read a delta from the tracker.", "publisher", "consumer"),
    "encode_seconds": _seconds("encode_seconds", "Time to encode a rank's part.", "publisher"),
    "write_seconds": _seconds("write_seconds", "Time to write a rank's part to the store.", "publisher"),
    "commit_seconds": _seconds("commit_seconds", "Time from the last part to the committed manifest.", "publisher"),
    "apply_seconds": _seconds("apply_seconds", "Time to apply a version to a predictor's model.", "predictor"),
    "state_bytes": _gauge("state_bytes", "Memory that the tracker holds.", "tracker", "kind", unit="bytes"),
    # Freshness
    "published_version": _gauge("published_version", "The newest version that this publisher committed.", "publisher"),
    "applied_version": _gauge("applied_version", "The newest version that this predictor applied.", "predictor"),
    "consumer_lag_batches": _gauge(
        "consumer_lag_batches", "Batches since a consumer's last committed read.", "tracker", "consumer"
    ),
    "consumer_lag_seconds": _gauge(
        "consumer_lag_seconds", "Seconds since a consumer's last committed read.", "tracker", "consumer", unit="seconds"
    ),
    "predictor_lag_versions": _gauge(
        "predictor_lag_versions", "Versions this predictor is behind the stream's head.", "predictor"
    ),
    "predictor_lag_seconds": _gauge(
        "predictor_lag_seconds",
        "Age of the oldest version that this predictor has not applied.",
        "predictor",
        unit="seconds",
    ),
    "heartbeat_lag_versions": _gauge(
        "heartbeat_lag_versions", "Versions a predictor is behind, by its heartbeat.", "predictor"
    ),
    "heartbeat_lag_seconds": _gauge(
        "heartbeat_lag_seconds", "Age of what a predictor is behind, by its heartbeat.", "predictor", unit="seconds"
    ),
    "heartbeat_age_seconds": _gauge(
        "heartbeat_age_seconds", "Seconds since a predictor's last heartbeat.", "predictor", unit="seconds"
    ),
    "oldest_pending_seconds": _gauge(
        "oldest_pending_seconds", "Age of the oldest pending row.", "tracker", "consumer", unit="seconds"
    ),
    # Health
    "resyncs": _counter("resyncs", "Times that a predictor went around a fault of its stream.", "predictor", "reason"),
    "follow_errors": _counter(
        "follow_errors", "Attempts of a following predictor that failed and are retried.", "predictor", "reason"
    ),
    "fences": _counter("fences", "Times that a newer publisher fenced this one.", "publisher"),
    "refused_parts": _counter("refused_parts", "Parts that were refused.", "predictor", "reason"),
    "publish_failures": _counter("publish_failures", "Versions that could not be published.", "publisher", "reason"),
    "hook_errors": _counter("hook_errors", "Faults inside hooks; each was contained.", "tracker", "table"),
    # The monitor itself
    "dropped_events": _counter("dropped_events", "Events not delivered.", "reason"),
    "outlet_errors": _counter("outlet_errors", "Sinks, handlers and callbacks that raised or blocked.", "outlet"),
    "muted_deliveries": _counter("muted_deliveries", "Deliveries left out while an outlet was muted.", "outlet"),
    "rejected_values": _counter("rejected_values", "Records that were no finite numbers.", "stat"),
    "lost_windows": _counter(
        "lost_windows", "Windows dropped because nobody collected them, or a sink did not take them.", "stat"
    ),
    "label_overflows": _counter("label_overflows", "Label sets that got no cell of their own.", "stat"),
    "collect_seconds": _seconds("collect_seconds", "Time of a collection, sinks included."),
}


class LibraryMetrics:
    """The stats of :data:`DEFINITIONS` as attributes, each registered when it is first asked for.

    Args:
        registry: where.

    Example:
        >>> metrics = LibraryMetrics(Registry())
        >>> metrics.published_rows.cell(publisher="publisher", table="user").add(3)
        >>> metrics.published_rows.name
        'delta_tracker_published_rows'
    """

    lookups: Counter
    touched_rows: Counter
    pending_rows: Gauge
    pending_ratio: Gauge
    published_rows: Counter
    published_bytes: Counter
    published_versions: Counter
    applied_rows: Counter
    applied_versions: Counter
    record_seconds: Histogram
    read_seconds: Histogram
    encode_seconds: Histogram
    write_seconds: Histogram
    commit_seconds: Histogram
    apply_seconds: Histogram
    state_bytes: Gauge
    published_version: Gauge
    applied_version: Gauge
    consumer_lag_batches: Gauge
    consumer_lag_seconds: Gauge
    predictor_lag_versions: Gauge
    predictor_lag_seconds: Gauge
    heartbeat_lag_versions: Gauge
    heartbeat_lag_seconds: Gauge
    heartbeat_age_seconds: Gauge
    oldest_pending_seconds: Gauge
    resyncs: Counter
    follow_errors: Counter
    fences: Counter
    refused_parts: Counter
    publish_failures: Counter
    hook_errors: Counter
    dropped_events: Counter
    outlet_errors: Counter
    muted_deliveries: Counter
    rejected_values: Counter
    lost_windows: Counter
    label_overflows: Counter
    collect_seconds: Histogram

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __getattr__(self, name: str) -> Stat:
        """Register the stat; from then on it is an ordinary attribute."""
        definition = DEFINITIONS.get(name)
        if definition is None:
            raise AttributeError(f"no metric {name!r}; known: {', '.join(DEFINITIONS)}")
        stat = self._registry.define(definition)
        setattr(self, name, stat)
        return stat

    def define(self, names: Iterable[str]) -> None:
        """Register those that have one of these full names, as whoever restores them wants it; others are left out."""
        for name in names:
            if name.removeprefix(PREFIX) in DEFINITIONS and name.startswith(PREFIX):
                getattr(self, name.removeprefix(PREFIX))
