"""Names, descriptions, units and labels of the library's built-in metrics.

Each tracker, publisher and predictor records these metrics through a
:class:`~delta_tracker.monitor.recorder.Recorder`, which adds the object's name as a label:

    recorder.published_rows.cell(table=fqn).add(len(rows))

A cell contains the records with the same label values. A cell of a counter is exported as 0 until its first increment.
For counters of faults, the cells are created at start-up, for example with ``recorder.resyncs.cell(reason="gap")``, so
that alerts detect the first increment.

Names follow the conventions of Prometheus (https://prometheus.io/docs/practices/naming/): they start with a prefix and
end with the unit. The Prometheus sinks append ``_total`` to the names of counters.
"""

from functools import partial
from typing import Any, Generic, TypeVar, cast

from delta_tracker.monitor.registry import Registry
from delta_tracker.monitor.stat import Counter, Definition, Gauge, Histogram, Kind, Stat

PREFIX = "delta_tracker_"

# Exceeds the number of label sets of any known program. That many cells still need little memory.
_MAX_CELLS = 4096

_S = TypeVar("_S", bound=Stat)


class _Metric(Generic[_S]):
    """Descriptor that registers a stat at the first access, and stores the stat in the :class:`LibraryMetrics`."""

    def __init__(self, kind: Kind, text: str, *labels: str, **options: Any) -> None:  # noqa: ANN401
        self._options: dict[str, Any] = {"kind": kind, "help": text, "labels": labels, **options}

    def __set_name__(self, owner: type["LibraryMetrics"], name: str) -> None:
        self._attribute = name
        self.definition = Definition(name=PREFIX + name, **self._options)

    def __get__(self, metrics: "LibraryMetrics", owner: type["LibraryMetrics"]) -> _S:
        stat = cast("_S", metrics.registry.define(self.definition))
        setattr(metrics, self._attribute, stat)  # later accesses find this attribute
        return stat


_counter = partial(_Metric[Counter], Kind.COUNTER, max_cells=_MAX_CELLS)
_gauge = partial(_Metric[Gauge], Kind.GAUGE, max_cells=_MAX_CELLS)
_in_seconds = partial(_gauge, unit="seconds")
_seconds = partial(_Metric[Histogram], Kind.HISTOGRAM, unit="seconds")


class LibraryMetrics:
    """Container whose attributes are the built-in metrics. The first access to an attribute registers the metric.

    Example:
        >>> metrics = LibraryMetrics(Registry())
        >>> metrics.published_rows.cell(publisher="publisher", table="user").add(3)
        >>> metrics.published_rows.name
        'delta_tracker_published_rows'
    """

    # Logical counters describe the training run and are saved in checkpoints; all other counters describe the process.
    # Volume
    lookups = _counter(
        "Ids looked up for updates of fused tables, duplicates included; all looked-up ids with record='lookups'.",
        "tracker",
        "table",
        is_logical=True,
    )
    touched_rows = _counter("Rows in a consumer's committed reads.", "tracker", "table", "consumer", is_logical=True)
    pending_rows = _gauge("Pending rows of a consumer, if all tables are on the CPU.", "tracker", "table", "consumer")
    pending_ratio = _gauge("Pending rows divided by the table's rows.", "tracker", "table", "consumer", unit="ratio")
    published_rows = _counter("Rows in committed versions.", "publisher", "table", is_logical=True)
    published_bytes = _counter(
        "Bytes of committed versions, with their states.", "publisher", "kind", unit="bytes", is_logical=True
    )
    published_versions = _counter("Committed versions.", "publisher", "kind", is_logical=True)
    applied_rows = _counter("Rows written to a predictor's model.", "predictor", "table")
    applied_versions = _counter("Versions applied by a predictor.", "predictor", "kind")
    admitted_ids = _counter("Raw ids that a predictor mapped to rows.", "predictor", "table")
    evicted_ids = _counter("Raw ids that a predictor removed from rows.", "predictor", "table")
    # Cost
    record_seconds = _seconds("Host time of a hook to record a batch's rows.", "tracker")
    read_seconds = _seconds("Time to read a delta from the tracker.", "publisher", "consumer")
    encode_seconds = _seconds("Time to copy a rank's rows before they are encoded and written.", "publisher")
    write_seconds = _seconds("Time to write a rank's part to the store.", "publisher")
    commit_seconds = _seconds("Time to commit the manifest once all parts exist.", "publisher")
    apply_seconds = _seconds("Time to apply a version to a predictor's model.", "predictor")
    state_bytes = _gauge("Memory used by the tracker.", "tracker", "kind", unit="bytes")
    # Freshness
    published_version = _gauge("Newest version committed by this publisher.", "publisher")
    applied_version = _gauge("Newest version applied by this predictor.", "predictor")
    consumer_lag_batches = _gauge("Batches since a consumer's last committed read.", "tracker", "consumer")
    consumer_lag_seconds = _in_seconds("Seconds since a consumer's last committed read.", "tracker", "consumer")
    predictor_lag_versions = _gauge("Versions of the stream that this predictor has not applied.", "predictor")
    predictor_lag_seconds = _in_seconds("Age of the oldest version that a predictor lacks; 0 if none.", "predictor")
    served_age_seconds = _in_seconds("Time since the served version's commit, by the store's clock.", "predictor")
    served_event_age_seconds = _in_seconds("Time since the served version's event time, if it has one.", "predictor")
    heartbeat_lag_versions = _gauge("Versions that a predictor has not applied, from its heartbeat.", "predictor")
    heartbeat_lag_seconds = _in_seconds("Age of the oldest version that a predictor lacks, by heartbeat.", "predictor")
    heartbeat_age_seconds = _gauge("Seconds since a predictor's last heartbeat.", "predictor", unit="seconds")
    stream_version = _gauge("Newest version of a stream.", "url")
    stream_age_seconds = _gauge("Time since the commit of the newest version.", "url", unit="seconds")
    stream_pending_rows = _gauge("Changed rows that the newest version has left for later ones.", "url")
    publisher_heartbeat_age_seconds = _in_seconds("Seconds since the publisher's heartbeat; only with states.", "url")
    oldest_pending_seconds = _gauge("Age of a consumer's oldest pending row.", "tracker", "consumer", unit="seconds")
    # Requests of a predictor
    store_requests = _counter("Requests of a predictor to its store.", "predictor", "operation")
    poll_seconds = _gauge("Current interval between a predictor's polls.", "predictor", unit="seconds")
    past_cache_reads = _counter("Reads past the HTTP cache, after a fault in a cached object.", "predictor")
    merged_catch_ups = _counter("Merged versions and snapshots that a predictor applied to catch up.", "predictor")
    failovers = _counter("Times that a predictor continued from another source.", "predictor")
    cache_hits = _counter("Parts that a predictor read from the host cache.", "predictor")
    cache_misses = _counter("Parts that a predictor fetched into the host cache.", "predictor")
    cache_bypasses = _counter("Parts that a predictor read past the host cache.", "predictor")
    # Which stream
    publisher_info = _gauge("1, with the id and the url of the publisher's stream.", "publisher", "stream", "url")
    predictor_info = _gauge("1, with the id (empty at first) and url of the stream.", "predictor", "stream", "url")
    # Health
    resyncs = _counter("Recoveries of a predictor from a fault in its stream.", "predictor", "reason")
    follow_errors = _counter("Failed attempts of follow(), which retries.", "predictor", "reason")
    fences = _counter("Times that a newer publisher fenced this one.", "publisher")
    refused_parts = _counter("Parts that a predictor rejected.", "predictor", "reason")
    publish_failures = _counter("Versions that failed to publish.", "publisher", "reason")
    upkeep_failures = _counter("Compactions and retentions of a publisher that failed.", "publisher", "step")
    publisher_skew_seconds = _in_seconds("Publisher's clock minus the store's, at the last version.", "publisher")
    predictor_skew_seconds = _in_seconds("Predictor's clock minus the store's; 0 unless entries show it.", "predictor")
    hook_errors = _counter("Exceptions caught in the tracker's hooks.", "tracker", "table")
    model_differences = _gauge("Tables and dense tensors of a model that differ from the stream's.", "predictor")
    heartbeat_model_differences = _gauge("Differences of a predictor's model, from its heartbeat.", "predictor")
    pinned_version = _gauge("Version of the pin or rollback that a predictor follows, if any.", "predictor")
    held_version = _gauge("Version that a predictor's gate holds; missing if it holds none.", "predictor")
    # Standby
    standby_version = _gauge("Newest version applied by this standby.", "standby")
    standby_lag_versions = _gauge("Versions of the stream that this standby has not applied.", "standby")
    takeovers = _counter("Completed takeovers.", "standby")
    takeover_failures = _counter("Takeovers that failed after the claim, so that no job trains.", "standby")
    takeover_seconds = _seconds("Time from the decision to take over to its end.", "standby")
    # The monitor itself
    dropped_events = _counter("Events dropped before delivery.", "reason")
    outlet_errors = _counter("Exceptions and timeouts of sinks, handlers and callbacks.", "outlet")
    muted_deliveries = _counter("Calls of sinks, handlers and callbacks skipped while muted.", "outlet")
    rejected_values = _counter("Recorded values that are not finite numbers, or are negative in a counter.", "stat")
    lost_windows = _counter("Windows dropped before they were collected or delivered.", "stat")
    label_overflows = _counter("Requests for a cell beyond the stat's max_cells.", "stat")
    collect_seconds = _seconds("Time of a collection, sinks included.")

    def __init__(self, registry: Registry) -> None:
        self.registry = registry


DEFINITIONS: dict[str, Definition] = {
    name: each.definition for name, each in vars(LibraryMetrics).items() if isinstance(each, _Metric)
}
"""Definitions of the built-in metrics, keyed by attribute name of :class:`LibraryMetrics`."""
