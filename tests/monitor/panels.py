"""Panels of the dashboard and conditions of the alerts, and a writer of their files.

    python -m tests.monitor.panels delta_tracker/monitor

writes ``dashboard.json`` for Grafana and ``alerts.yml`` for Prometheus; a test compares them with the ones that ship.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from delta_tracker.monitor.library import DEFINITIONS
from delta_tracker.monitor.names import exposed
from delta_tracker.monitor.stat import Kind

_GRAFANA_UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit", "": "short"}
_WIDTH, _HEIGHT, _PER_ROW = 8, 7, 3
_STAT_WIDTH, _STAT_HEIGHT = 4, 4
_INFO = '{__name__=~"delta_tracker_(publisher|predictor)_info"'
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_CHOSEN = '{job=~"$job", instance=~"$instance"}'
_FAULTS = ("publish_failures", "follow_errors", "refused_parts", "upkeep_failures", "hook_errors", "fences")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One graph.

    Args:
        row: heading of its row.
        title: title of the graph.
        metric: key in :data:`~delta_tracker.monitor.library.DEFINITIONS`: a counter is shown as its rate per second,
            a gauge as it is, a histogram by its median and its 99th percentile.
        by: labels that make a line each, besides the job and the instance.
        worst: for a gauge, which of several values is shown: ``max`` or ``min``.
    """

    row: str
    title: str
    metric: str
    by: tuple[str, ...] = ()
    worst: str = "max"

    @property
    def kind(self) -> Kind:
        """Kind of the metric."""
        return DEFINITIONS[self.metric].kind

    @property
    def queries(self) -> dict[str, str]:
        """Return the PromQL queries by legend."""
        labels = ("job", "instance", *self.by)
        name, by = f"{exposed_name(self.metric)}{_CHOSEN}", ", ".join(labels)
        legend = " ".join(f"{{{{{label}}}}}" for label in labels[1:])
        if self.kind is Kind.COUNTER:
            return {legend: f"sum by ({by}) (rate({name}[$__rate_interval]))"}
        if self.kind is Kind.GAUGE:
            return {legend: f"{self.worst} by ({by}) ({name})"}
        le = ", ".join(("le", *labels))
        return {
            f"p{percent} {legend}": f"histogram_quantile(0.{percent}, sum by ({le}) (rate({name}[$__rate_interval])))"
            for percent in (50, 99)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule.

    Args:
        name: name of the alert.
        expression: PromQL expression.
        minutes: how long it must hold.
        severity: ``page`` or ``ticket``.
        summary: meaning of the alert.
        action: what to do.
    """

    name: str
    expression: str
    minutes: int
    severity: str
    summary: str
    action: str


def exposed_name(metric: str) -> str:
    """Return the name of a library metric in Prometheus.

    Example:
        >>> exposed_name("published_rows"), exposed_name("apply_seconds")
        ('delta_tracker_published_rows_total', 'delta_tracker_apply_seconds_bucket')
    """
    definition = DEFINITIONS[metric]
    name = exposed(definition.name)
    if definition.unit and not name.endswith(f"_{definition.unit}"):
        name = f"{name}_{definition.unit}"
    return name + {Kind.COUNTER: "_total", Kind.HISTOGRAM: "_bucket"}.get(definition.kind, "")


PANELS = (
    Panel(row="Freshness", title="Age of the served rows", metric="served_age_seconds", by=("predictor",)),
    Panel(row="Freshness", title="Age of the served events", metric="served_event_age_seconds", by=("predictor",)),
    Panel(row="Freshness", title="Predictor lag", metric="predictor_lag_seconds", by=("predictor",)),
    Panel(row="Freshness", title="Versions behind", metric="predictor_lag_versions", by=("predictor",)),
    Panel(row="Freshness", title="Lag by heartbeat", metric="heartbeat_lag_seconds", by=("predictor",)),
    Panel(row="Freshness", title="Versions behind by heartbeat", metric="heartbeat_lag_versions", by=("predictor",)),
    Panel(row="Freshness", title="Newest version of the stream", metric="stream_version", by=("url",)),
    Panel(row="Freshness", title="Age of the newest version", metric="stream_age_seconds", by=("url",)),
    Panel(row="Freshness", title="Rows left for later versions", metric="stream_pending_rows", by=("url",)),
    Panel(
        row="Freshness",
        title="Age of the publisher's heartbeat",
        metric="publisher_heartbeat_age_seconds",
        by=("url",),
    ),
    Panel(row="Freshness", title="Age of heartbeats", metric="heartbeat_age_seconds", by=("predictor",)),
    Panel(row="Freshness", title="Consumer lag", metric="consumer_lag_seconds", by=("tracker", "consumer")),
    Panel(
        row="Freshness", title="Batches a consumer is behind", metric="consumer_lag_batches", by=("tracker", "consumer")
    ),
    Panel(row="Freshness", title="Oldest pending row", metric="oldest_pending_seconds", by=("tracker", "consumer")),
    Panel(row="Freshness", title="Published version", metric="published_version", by=("publisher",), worst="min"),
    Panel(row="Freshness", title="Applied version", metric="applied_version", by=("predictor",), worst="min"),
    Panel(row="Freshness", title="Version of a standby", metric="standby_version", by=("standby",), worst="min"),
    Panel(row="Freshness", title="Versions a standby is behind", metric="standby_lag_versions", by=("standby",)),
    Panel(row="Volume", title="Lookups", metric="lookups", by=("tracker", "table")),
    Panel(row="Volume", title="Touched rows", metric="touched_rows", by=("tracker", "table", "consumer")),
    Panel(row="Volume", title="Pending ratio", metric="pending_ratio", by=("tracker", "table", "consumer")),
    Panel(row="Volume", title="Pending rows", metric="pending_rows", by=("tracker", "table", "consumer")),
    Panel(row="Volume", title="Published rows", metric="published_rows", by=("publisher", "table")),
    Panel(row="Volume", title="Published bytes", metric="published_bytes", by=("publisher", "kind")),
    Panel(row="Volume", title="Published versions", metric="published_versions", by=("publisher", "kind")),
    Panel(row="Volume", title="Applied rows", metric="applied_rows", by=("predictor", "table")),
    Panel(row="Volume", title="Applied versions", metric="applied_versions", by=("predictor", "kind")),
    Panel(row="Volume", title="Admitted raw ids", metric="admitted_ids", by=("predictor", "table")),
    Panel(row="Volume", title="Evicted raw ids", metric="evicted_ids", by=("predictor", "table")),
    Panel(row="Cost", title="Record a batch", metric="record_seconds", by=("tracker",)),
    Panel(row="Cost", title="Read a delta", metric="read_seconds", by=("publisher", "consumer")),
    Panel(row="Cost", title="Encode a part", metric="encode_seconds", by=("publisher",)),
    Panel(row="Cost", title="Write a part", metric="write_seconds", by=("publisher",)),
    Panel(row="Cost", title="Commit a version", metric="commit_seconds", by=("publisher",)),
    Panel(row="Cost", title="Apply a version", metric="apply_seconds", by=("predictor",)),
    Panel(row="Cost", title="State", metric="state_bytes", by=("tracker", "kind")),
    Panel(row="Cost", title="Take over", metric="takeover_seconds", by=("standby",)),
    Panel(row="Cost", title="Collect metrics", metric="collect_seconds"),
    Panel(row="Cost", title="Requests to the store", metric="store_requests", by=("predictor", "operation")),
    Panel(row="Cost", title="Polling interval", metric="poll_seconds", by=("predictor",)),
    Panel(row="Cost", title="Reads past the HTTP cache", metric="past_cache_reads", by=("predictor",)),
    Panel(row="Cost", title="Merged versions to catch up", metric="merged_catch_ups", by=("predictor",)),
    Panel(row="Cost", title="Hits of the host cache", metric="cache_hits", by=("predictor",)),
    Panel(row="Cost", title="Misses of the host cache", metric="cache_misses", by=("predictor",)),
    Panel(row="Health", title="Reads past the host cache", metric="cache_bypasses", by=("predictor",)),
    Panel(row="Health", title="Failovers to another source", metric="failovers", by=("predictor",)),
    Panel(row="Health", title="Resyncs", metric="resyncs", by=("predictor", "reason")),
    Panel(row="Health", title="Failed attempts to follow", metric="follow_errors", by=("predictor", "reason")),
    Panel(row="Health", title="Differences of the model", metric="model_differences", by=("predictor",)),
    Panel(
        row="Health",
        title="Differences of the model by heartbeat",
        metric="heartbeat_model_differences",
        by=("predictor",),
    ),
    Panel(row="Health", title="Pinned version", metric="pinned_version", by=("predictor",)),
    Panel(row="Health", title="Version held by the gate", metric="held_version", by=("predictor",)),
    Panel(row="Health", title="Publish failures", metric="publish_failures", by=("publisher", "reason")),
    Panel(row="Health", title="Fences", metric="fences", by=("publisher",)),
    Panel(row="Health", title="Refused parts", metric="refused_parts", by=("predictor", "reason")),
    Panel(row="Health", title="Upkeep failures", metric="upkeep_failures", by=("publisher", "step")),
    Panel(row="Health", title="Clock skew of publishers", metric="publisher_skew_seconds", by=("publisher",)),
    Panel(row="Health", title="Clock skew of predictors", metric="predictor_skew_seconds", by=("predictor",)),
    Panel(row="Health", title="Hook errors", metric="hook_errors", by=("tracker", "table")),
    Panel(row="Health", title="Takeovers", metric="takeovers", by=("standby",)),
    Panel(row="Health", title="Failed takeovers", metric="takeover_failures", by=("standby",)),
    Panel(row="Health", title="Dropped events", metric="dropped_events", by=("reason",)),
    Panel(row="Health", title="Sinks that fail", metric="outlet_errors", by=("outlet",)),
)


def _grew(metric: str, minutes: int = 15) -> str:
    """Return an expression that holds if a counter grew within some minutes.

    ``increase()`` misses what was counted before the first scrape of a series. Therefore a counter above 0 also holds
    if its series is new, or if its process started within these minutes. The second case covers a process that is
    restarted again and again and counts one fault each time.
    """
    name = exposed_name(metric)
    is_new = f"{name} > 0 unless last_over_time({name}[1h] offset {minutes}m)"
    is_young = f"{name} > 0 and on (job, instance) time() - process_start_time_seconds < {60 * minutes}"
    return f"increase({name}[{minutes}m]) > 0 or ({is_new}) or ({is_young})"


ALERTS = (
    Alert(
        name="DeltaTrackerPredictorStale",
        # By its heartbeat only if its own process is not scraped, so that it does not fire twice.
        expression=(
            f"{exposed_name('predictor_lag_seconds')} > 300 or ({exposed_name('heartbeat_lag_seconds')} > 300 "
            f"unless on (predictor) {exposed_name('predictor_lag_seconds')})"
        ),
        minutes=5,
        severity="page",
        summary="A predictor lags by more than five minutes.",
        action="Run delta-tracker inspect to see if the publisher still commits. Then check resyncs and refused parts.",
    ),
    Alert(
        name="DeltaTrackerServedRowsOld",
        # Needs no answer of the store, so it also covers a store that hangs.
        expression=f"{exposed_name('served_age_seconds')} > 900",
        minutes=5,
        severity="page",
        summary="A predictor serves rows that are more than fifteen minutes old.",
        action="If all predictors of the stream do, see the trainer; if one does, see its error, store and process.",
    ),
    Alert(
        name="DeltaTrackerStreamOld",
        # For an operator who has the exporter only. Where the trainer is scraped, its own alerts say more.
        expression=(
            f"{exposed_name('stream_age_seconds')} > 900 "
            f"unless on (url) last_over_time({exposed_name('publisher_info')}[1h])"
        ),
        minutes=5,
        severity="page",
        summary="A stream whose trainer is not scraped has had no version for fifteen minutes.",
        action="See the trainer and its log. If training ended on purpose, stop the exporter of the stream.",
    ),
    Alert(
        name="DeltaTrackerTrainerGone",
        # By stream, because a trainer that restarts may have another instance.
        expression=(
            f"max by (job, stream, url) (last_over_time({exposed_name('publisher_info')}[1h])) "
            f"unless on (stream) {exposed_name('publisher_info')}"
        ),
        minutes=5,
        severity="page",
        summary="A stream that had a publisher has none any more.",
        action="Restart the trainer, or let a standby take over. If training ended on purpose, this ends in an hour.",
    ),
    Alert(
        name="DeltaTrackerPredictorDown",
        # A target that was removed on purpose, for example by an autoscaler, has no series up.
        expression=f"up == 0 and on (job, instance) last_over_time({exposed_name('predictor_info')}[1h])",
        minutes=2,
        severity="ticket",
        summary="The process of a predictor is down.",
        action="See why it ended, and restart it. It catches up from its newest saved position or a snapshot.",
    ),
    Alert(
        name="DeltaTrackerPredictorEmpty",
        expression=f'{exposed_name("predictor_info")}{{stream=""}}',
        minutes=15,
        severity="ticket",
        summary="A predictor has applied no version for fifteen minutes.",
        action="Check its url, which the label shows, and that the stream has a snapshot.",
    ),
    Alert(
        name="DeltaTrackerStoreUnreadable",
        expression=(
            f"{exposed_name('predictor_info')} "
            f"unless on (job, instance, predictor) {exposed_name('predictor_lag_versions')}"
        ),
        minutes=5,
        severity="page",
        summary="A predictor has not been able to read its store for five minutes.",
        action="Check that the store answers. The predictor serves its last version and retries.",
    ),
    Alert(
        name="DeltaTrackerFollowFails",
        expression=f"increase({exposed_name('follow_errors')}[5m]) > 0",
        minutes=5,
        severity="ticket",
        summary="A predictor fails again and again to apply the next version.",
        action="The label holds the type of the error; status().error and the predictor's log have its text.",
    ),
    Alert(
        name="DeltaTrackerModelDiffers",
        expression=(
            f"{exposed_name('model_differences')} > 0 or ({exposed_name('heartbeat_model_differences')} > 0 "
            f"unless on (predictor) {exposed_name('model_differences')})"
        ),
        minutes=15,
        severity="ticket",
        summary="The model of a predictor differs from its stream, and lacks rows of some tables.",
        action="Deploy the trainer's model to it. status().differences and its log name the tables.",
    ),
    Alert(
        name="DeltaTrackerPredictorSilent",
        expression=f"{exposed_name('heartbeat_age_seconds')} > 60",
        minutes=5,
        severity="ticket",
        summary="A predictor of the stream no longer writes heartbeats.",
        action="Check that it is running. If it was killed on purpose, its series ends after an hour.",
    ),
    Alert(
        name="DeltaTrackerPublisherStalled",
        # Only the rank that counts versions has this series; other ranks and trainers that do not publish lack it. A
        # closed publisher keeps its counters but has no gauge. The lag in batches grows if training runs.
        expression=(
            f"sum by (job, instance, publisher) (rate({exposed_name('published_versions')}[15m])) == 0 "
            f"and on (job, instance, publisher) {exposed_name('published_version')} "
            f"and on (job, instance) max by (job, instance) (delta({exposed_name('consumer_lag_batches')}[15m])) > 0"
        ),
        minutes=15,
        severity="page",
        summary="A publisher has committed no version for 15 minutes although training runs.",
        action="Check publish failures, fences and the store. No update is lost: the rows stay pending.",
    ),
    Alert(
        name="DeltaTrackerPublisherFenced",
        expression=_grew("fences"),
        minutes=0,
        severity="page",
        summary="A newer publisher fenced this one.",
        action="Stop the fenced trainer, or find out what started the newer one.",
    ),
    Alert(
        name="DeltaTrackerPublishFails",
        expression=_grew("publish_failures"),
        minutes=5,
        severity="ticket",
        summary="Versions failed to publish.",
        action="The label holds the reason; the log of the rank that failed holds the error, such as a full disk.",
    ),
    Alert(
        name="DeltaTrackerUpkeepFails",
        expression=_grew("upkeep_failures", 60),
        minutes=0,
        severity="ticket",
        summary="A retention or compaction failed, so that the stream grows.",
        action="See upkeep_error and the trainer's log. The next pass retries.",
    ),
    Alert(
        name="DeltaTrackerClockSkew",
        expression=(
            f"abs({exposed_name('publisher_skew_seconds')}) > 60 or abs({exposed_name('predictor_skew_seconds')}) > 60"
        ),
        minutes=5,
        severity="ticket",
        summary="The clock of a publisher or predictor differs from the store's by more than a minute.",
        action="Set the clock of the host. Ages are by the store's clock, but times in reports and logs are wrong.",
    ),
    Alert(
        name="DeltaTrackerTakeoverFailed",
        expression=_grew("takeover_failures"),
        minutes=0,
        severity="page",
        summary="A takeover failed after the claim: the former trainer is fenced, and no job trains.",
        action="See the log of the standby. Fix the problem and call take_over() again, which completes the takeover.",
    ),
    Alert(
        name="DeltaTrackerTakeover",
        expression=_grew("takeovers"),
        minutes=0,
        severity="ticket",
        summary="A standby has taken over.",
        action="Find out why the former trainer was silent, and restart it as a standby.",
    ),
    Alert(
        name="DeltaTrackerStandbyBehind",
        expression=f"{exposed_name('standby_lag_versions')} > 10",
        minutes=5,
        severity="ticket",
        summary="A standby is more than ten versions behind, so that a takeover would take longer.",
        action="See its log for a version that it cannot read. Publish a snapshot if one is damaged.",
    ),
    Alert(
        name="DeltaTrackerPendingRowsGrow",
        expression=f"{exposed_name('pending_ratio')} > 0.5",
        minutes=30,
        severity="ticket",
        summary="More than half of a table's rows are pending for a consumer.",
        action="Publish more often, raise the top-k budget, or remove the consumer if it is no longer used.",
    ),
    Alert(
        name="DeltaTrackerConsumerStopped",
        # Reported for all devices; the number of pending rows is not reported for GPUs.
        expression=f"{exposed_name('oldest_pending_seconds')} > 3600",
        minutes=5,
        severity="ticket",
        summary="Rows have been pending for a consumer for an hour.",
        action="Check that it still reads, or remove it if it is no longer used. With top-k, set max_age of TopK.",
    ),
    Alert(
        name="DeltaTrackerResyncs",
        expression=f"increase({exposed_name('resyncs')}[1h]) > 3",
        minutes=0,
        severity="ticket",
        summary="A predictor resynced more than three times in an hour.",
        action="Check the reason in the label. Keep versions for longer than a predictor may be down.",
    ),
    Alert(
        name="DeltaTrackerPartsRefused",
        expression=_grew("refused_parts"),
        minutes=0,
        severity="ticket",
        summary="A predictor rejected a corrupt part. Its version was not applied.",
        action="Run delta-tracker verify to find the corrupt objects. Publish a snapshot, and check the store.",
    ),
    Alert(
        name="DeltaTrackerHookErrors",
        expression=_grew("hook_errors"),
        minutes=0,
        severity="ticket",
        summary="Recording a batch failed. Training continues; all rows of the table count as changed.",
        action="See the traceback in the trainer's log, which has it once.",
    ),
    Alert(
        name="DeltaTrackerMonitorLoses",
        expression=f"increase({exposed_name('outlet_errors')}[15m]) > 0 or {_grew('dropped_events')}",
        minutes=15,
        severity="ticket",
        summary="A sink, handler or callback of the monitor fails, or events are dropped.",
        action="The label names the sink or the reason. See the traceback in the program's log, which has it once.",
    ),
)


def stats() -> dict[str, tuple[str, str]]:
    """Return the numbers of the top row: title to PromQL query and unit. Of several values, the worst is shown."""

    def worst(metric: str) -> str:
        return f"max({exposed_name(metric)}{_CHOSEN})"

    faults = (f"(sum(increase({exposed_name(metric)}{_CHOSEN}[1h])) or vector(0))" for metric in _FAULTS)
    return {
        "Oldest served rows": (worst("served_age_seconds"), "s"),
        "Most versions behind": (worst("predictor_lag_versions"), "short"),
        "Oldest heartbeat": (worst("heartbeat_age_seconds"), "s"),
        "Publishers": (f"count({exposed_name('publisher_info')}{_CHOSEN}) or vector(0)", "short"),
        "Predictors": (f"count({exposed_name('predictor_info')}{_CHOSEN}) or vector(0)", "short"),
        "Faults in an hour": (" + ".join(faults), "short"),
    }


def _variables() -> list[dict[str, object]]:
    """Return the variables: the source, and then stream, job and instance, each of which limits the next one."""
    found: list[dict[str, object]] = [
        {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    ]
    limits = ""
    for name in ("stream", "job", "instance"):
        query = f"label_values({_INFO}{limits}}}, {name})"
        limits += f', {name}=~"${name}"'
        found.append(
            {
                "name": name,
                "type": "query",
                "datasource": _SOURCE,
                "query": {"query": query, "refId": name},
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                # also processes without a publisher or predictor, such as a tracker alone
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
            }
        )
    return found


def _stat_panels() -> list[dict[str, object]]:
    """Return the row of numbers at the top."""
    return [
        {
            "id": number + 1,
            "type": "stat",
            "title": title,
            "datasource": _SOURCE,
            "gridPos": {"h": _STAT_HEIGHT, "w": _STAT_WIDTH, "x": _STAT_WIDTH * number, "y": 0},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"},
            "targets": [{"refId": "A", "datasource": _SOURCE, "expr": query}],
        }
        for number, (title, (query, unit)) in enumerate(stats().items())
    ]


def dashboard() -> str:
    """Return ``dashboard.json``, to import in Grafana 10 or newer with a data source."""
    panels = _stat_panels()
    top, place, row = _STAT_HEIGHT, 0, ""
    for panel in PANELS:
        if panel.row != row:
            top += _HEIGHT if place else 0
            row, place = panel.row, 0
            grid = {"h": 1, "w": _WIDTH * _PER_ROW, "x": 0, "y": top}
            panels.append({"id": len(panels) + 1, "type": "row", "title": row, "collapsed": False, "gridPos": grid})
            top += 1
        elif place == _PER_ROW:
            top, place = top + _HEIGHT, 0
        grid = {"h": _HEIGHT, "w": _WIDTH, "x": _WIDTH * place, "y": top}
        panels.append(_grafana_panel(panel, len(panels) + 1, grid))
        place += 1
    board = {
        "title": "delta_tracker",
        "uid": "delta-tracker",
        "tags": ["delta_tracker"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }
    return json.dumps(board, indent=1) + "\n"


def alerts() -> str:
    """Return ``alerts.yml``, to list under ``rule_files`` in Prometheus' configuration."""
    lines = ["groups:", "  - name: delta_tracker", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.minutes}m",
            f"        labels: {{severity: {alert.severity}}}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          description: {json.dumps(alert.action)}",
        ]
    return "\n".join(lines) + "\n"


def _grafana_panel(panel: Panel, number: int, grid: dict[str, int]) -> dict[str, object]:
    definition = DEFINITIONS[panel.metric]
    unit = "s" if panel.kind is Kind.HISTOGRAM else _GRAFANA_UNITS[definition.unit]
    if panel.kind is Kind.COUNTER:
        unit = {"bytes": "Bps"}.get(definition.unit, "cps")
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": definition.help,
        "datasource": _SOURCE,
        "gridPos": grid,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def main(folder: str) -> None:
    """Write both files."""
    Path(folder, "dashboard.json").write_text(dashboard(), encoding="utf-8")
    Path(folder, "alerts.yml").write_text(alerts(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
