"""Names, descriptions, units and labels of the library's built-in metrics.

Each tracker, publisher and predictor records these metrics through its own
:class:`~delta_tracker.monitor.recorder.Recorder`, which adds the object's name as a label:

    recorder.published_rows.cell(table=fqn).add(len(rows))

A cell holds the records with one combination of label values. A counter is exported as 0 once its cell exists.
The cells of fault counters are created at start-up, as in ``recorder.resyncs.cell(reason="gap")``, so that alerts see
the first increment.

Names follow the rules of Prometheus (https://prometheus.io/docs/practices/naming/): they start with a prefix and end
with the unit. The Prometheus sinks append ``_total`` to the names of counters. A metric is registered at its first use.
"""

from __future__ import annotations

from collections.abc import Iterable

from delta_tracker.monitor.registry import Registry
from delta_tracker.monitor.stat import Counter, Definition, Gauge, Histogram, Kind, Stat

PREFIX = "delta_tracker_"

# Exceeds the number of label sets of any known program. That many cells still need little memory.
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


# Logical counters describe the training run and are saved in checkpoints; all other counters describe the process.
DEFINITIONS: dict[str, Definition] = {
    # Volume
    "lookups": _counter(
        "lookups",
        "Ids looked up for updates of fused tables, duplicates included; all looked-up ids with record='lookups'.",
        "tracker",
        "table",
        is_logical=True,
    ),
    "touched_rows": _counter(
        "touched_rows", "Rows in a consumer's committed reads.", "tracker", "table", "consumer", is_logical=True
    ),
    "pending_rows": _gauge(
        "pending_rows",
        "Pending rows of a consumer; reported only if all tables are on the CPU.",
        "tracker",
        "table",
        "consumer",
    ),
    "pending_ratio": _gauge(
        "pending_ratio", "Pending rows divided by the table's rows.", "tracker", "table", "consumer", unit="ratio"
    ),
    "published_rows": _counter("published_rows", "Rows in committed versions.", "publisher", "table", is_logical=True),
    "published_bytes": _counter(
        "published_bytes",
        "Bytes of committed versions, with their states.",
        "publisher",
        "kind",
        unit="bytes",
        is_logical=True,
    ),
    "published_versions": _counter("published_versions", "Committed versions.", "publisher", "kind", is_logical=True),
    "applied_rows": _counter("applied_rows", "Rows written to a predictor's model.", "predictor", "table"),
    "applied_versions": _counter("applied_versions", "Versions applied by a predictor.", "predictor", "kind"),
    "admitted_ids": _counter("admitted_ids", "Raw ids that a predictor mapped to rows.", "predictor", "table"),
    "evicted_ids": _counter("evicted_ids", "Raw ids that a predictor removed from rows.", "predictor", "table"),
    # Cost
    "record_seconds": _seconds("record_seconds", "Host time of a hook to record a batch's rows.", "tracker"),
    "read_seconds": _seconds("read_seconds", "Time to read a delta from the tracker.", "publisher", "consumer"),
    "encode_seconds": _seconds(
        "encode_seconds", "Time to copy a rank's rows before they are encoded and written.", "publisher"
    ),
    "write_seconds": _seconds("write_seconds", "Time to write a rank's part to the store.", "publisher"),
    "commit_seconds": _seconds("commit_seconds", "Time to commit the manifest once all parts exist.", "publisher"),
    "apply_seconds": _seconds("apply_seconds", "Time to apply a version to a predictor's model.", "predictor"),
    "state_bytes": _gauge("state_bytes", "Memory used by the tracker.", "tracker", "kind", unit="bytes"),
    # Freshness
    "published_version": _gauge("published_version", "Newest version committed by this publisher.", "publisher"),
    "applied_version": _gauge("applied_version", "Newest version applied by this predictor.", "predictor"),
    "consumer_lag_batches": _gauge(
        "consumer_lag_batches", "Batches since a consumer's last committed read.", "tracker", "consumer"
    ),
    "consumer_lag_seconds": _gauge(
        "consumer_lag_seconds", "Seconds since a consumer's last committed read.", "tracker", "consumer", unit="seconds"
    ),
    "predictor_lag_versions": _gauge(
        "predictor_lag_versions", "Versions of the stream that this predictor has not applied.", "predictor"
    ),
    "predictor_lag_seconds": _gauge(
        "predictor_lag_seconds",
        "Age of the oldest version that this predictor has not applied; 0 if it is up to date.",
        "predictor",
        unit="seconds",
    ),
    "served_age_seconds": _gauge(
        "served_age_seconds",
        "Time since the commit of the version that this predictor serves, by the store's clock.",
        "predictor",
        unit="seconds",
    ),
    "served_event_age_seconds": _gauge(
        "served_event_age_seconds",
        "Time since the event time of the version that this predictor serves; only for streams with event times.",
        "predictor",
        unit="seconds",
    ),
    "heartbeat_lag_versions": _gauge(
        "heartbeat_lag_versions", "Versions that a predictor has not applied, from its heartbeat.", "predictor"
    ),
    "heartbeat_lag_seconds": _gauge(
        "heartbeat_lag_seconds",
        "Age of the oldest version that a predictor has not applied, from its heartbeat.",
        "predictor",
        unit="seconds",
    ),
    "heartbeat_age_seconds": _gauge(
        "heartbeat_age_seconds", "Seconds since a predictor's last heartbeat.", "predictor", unit="seconds"
    ),
    "oldest_pending_seconds": _gauge(
        "oldest_pending_seconds", "Age of a consumer's oldest pending row.", "tracker", "consumer", unit="seconds"
    ),
    # Requests of a predictor
    "store_requests": _counter("store_requests", "Requests of a predictor to its store.", "predictor", "operation"),
    "poll_seconds": _gauge(
        "poll_seconds", "Current interval between a predictor's polls.", "predictor", unit="seconds"
    ),
    "past_cache_reads": _counter(
        "past_cache_reads", "Reads past the HTTP cache, after a fault in a cached object.", "predictor"
    ),
    "merged_catch_ups": _counter(
        "merged_catch_ups", "Merged versions and snapshots that a predictor applied to catch up.", "predictor"
    ),
    "failovers": _counter("failovers", "Times that a predictor continued from another source.", "predictor"),
    "cache_hits": _counter("cache_hits", "Parts that a predictor read from the host cache.", "predictor"),
    "cache_misses": _counter("cache_misses", "Parts that a predictor fetched into the host cache.", "predictor"),
    "cache_bypasses": _counter("cache_bypasses", "Parts that a predictor read past the host cache.", "predictor"),
    # Which stream
    "publisher_info": _gauge(
        "publisher_info", "1, with the id and the url of the publisher's stream.", "publisher", "stream", "url"
    ),
    "predictor_info": _gauge(
        "predictor_info",
        "1, with the id and the url of the predictor's stream; the id is empty before the first version.",
        "predictor",
        "stream",
        "url",
    ),
    # Health
    "resyncs": _counter("resyncs", "Recoveries of a predictor from a fault in its stream.", "predictor", "reason"),
    "follow_errors": _counter("follow_errors", "Failed attempts of follow(), which retries.", "predictor", "reason"),
    "fences": _counter("fences", "Times that a newer publisher fenced this one.", "publisher"),
    "refused_parts": _counter("refused_parts", "Parts that a predictor rejected.", "predictor", "reason"),
    "publish_failures": _counter("publish_failures", "Versions that failed to publish.", "publisher", "reason"),
    "upkeep_failures": _counter(
        "upkeep_failures", "Compactions and retentions of a publisher that failed.", "publisher", "step"
    ),
    "publisher_skew_seconds": _gauge(
        "publisher_skew_seconds",
        "Clock of the publisher minus the store's, at the last version.",
        "publisher",
        unit="seconds",
    ),
    "predictor_skew_seconds": _gauge(
        "predictor_skew_seconds",
        "Clock of the predictor minus the store's; 0 unless modification times contradict the predictor's clock.",
        "predictor",
        unit="seconds",
    ),
    "hook_errors": _counter("hook_errors", "Exceptions caught in the tracker's hooks.", "tracker", "table"),
    # Standby
    "standby_version": _gauge("standby_version", "Newest version applied by this standby.", "standby"),
    "standby_lag_versions": _gauge(
        "standby_lag_versions", "Versions of the stream that this standby has not applied.", "standby"
    ),
    "takeovers": _counter("takeovers", "Completed takeovers.", "standby"),
    "takeover_failures": _counter(
        "takeover_failures", "Takeovers that failed after the claim, so that no job trains.", "standby", "reason"
    ),
    "takeover_seconds": _seconds("takeover_seconds", "Time from the decision to take over to its end.", "standby"),
    # The monitor itself
    "dropped_events": _counter("dropped_events", "Events dropped before delivery.", "reason"),
    "outlet_errors": _counter("outlet_errors", "Exceptions and timeouts of sinks, handlers and callbacks.", "outlet"),
    "muted_deliveries": _counter(
        "muted_deliveries", "Calls of sinks, handlers and callbacks skipped while muted.", "outlet"
    ),
    "rejected_values": _counter(
        "rejected_values", "Recorded values that are not finite numbers, or are negative in a counter.", "stat"
    ),
    "lost_windows": _counter("lost_windows", "Windows dropped before they were collected or delivered.", "stat"),
    "label_overflows": _counter("label_overflows", "Requests for a cell beyond the stat's max_cells.", "stat"),
    "collect_seconds": _seconds("collect_seconds", "Time of a collection, sinks included."),
}


class LibraryMetrics:
    """The built-in metrics as attributes. Each key of :data:`DEFINITIONS` is the name of an attribute.

    A metric is registered at the first access to its attribute.

    Args:
        registry: registry in which the metrics are registered.

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
    admitted_ids: Counter
    evicted_ids: Counter
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
    served_age_seconds: Gauge
    served_event_age_seconds: Gauge
    heartbeat_lag_versions: Gauge
    heartbeat_lag_seconds: Gauge
    heartbeat_age_seconds: Gauge
    oldest_pending_seconds: Gauge
    store_requests: Counter
    poll_seconds: Gauge
    past_cache_reads: Counter
    merged_catch_ups: Counter
    failovers: Counter
    cache_hits: Counter
    cache_misses: Counter
    cache_bypasses: Counter
    publisher_info: Gauge
    predictor_info: Gauge
    resyncs: Counter
    follow_errors: Counter
    fences: Counter
    refused_parts: Counter
    publish_failures: Counter
    upkeep_failures: Counter
    publisher_skew_seconds: Gauge
    predictor_skew_seconds: Gauge
    hook_errors: Counter
    standby_version: Gauge
    standby_lag_versions: Gauge
    takeovers: Counter
    takeover_failures: Counter
    takeover_seconds: Histogram
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
        """Register the metric ``name``, store it as an ordinary attribute and return it.

        Raises:
            AttributeError: if no built-in metric has this name.
        """
        definition = DEFINITIONS.get(name)
        if definition is None:
            raise AttributeError(f"no metric {name!r}; known: {', '.join(DEFINITIONS)}")
        stat = self._registry.define(definition)
        setattr(self, name, stat)
        return stat

    def define(self, names: Iterable[str]) -> None:
        """Register the built-in metrics among ``names``, so that their values can be restored.

        Args:
            names: full names, with the prefix. Names of other metrics are ignored.
        """
        for name in names:
            if name.removeprefix(PREFIX) in DEFINITIONS and name.startswith(PREFIX):
                getattr(self, name.removeprefix(PREFIX))
