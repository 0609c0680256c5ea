"""Series of a healthy fleet and of one with a fault, as unit tests of the alert rules for ``promtool test rules``.

The fleet is a trainer, whose process also exports the heartbeats, and two predictors. One predictor is restarted
meanwhile. ``delta-tracker exporter`` reads a second stream, no process of which is scraped. Each fault changes some
series from :data:`FAULT_MINUTE` on; each case states which alerts fire half an hour later, with their labels. No other
alert may fire.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from delta_tracker.monitor.library import DEFINITIONS
from tests.monitor.panels import ALERTS, exposed_name

INTERVAL_SECONDS = 15
FAULT_MINUTE = 20
_LATER_MINUTES = 31
_CADENCE_SECONDS = 30
_STREAM = "0123456789abcdef0123456789abcdef"
_TRAINER = {"job": "trainer", "instance": "t:9464"}
_FIRST, _SECOND = ({"job": "predictor", "instance": f"p{number}:9464"} for number in (1, 2))
_URL = {"stream": _STREAM, "url": "s3://bucket/stream"}
_EXPORTER = {"job": "exporter", "instance": "e:9464"}
_READ = {"url": "s3://bucket/read"}

Values = list[float | None]
Fleet = dict[tuple[str, tuple[tuple[str, str], ...]], Values]


def num_samples(minutes: float) -> int:
    """Return the number of scrapes in some minutes."""
    return round(minutes * 60 / INTERVAL_SECONDS)


def key(name: str, *labels: Mapping[str, str]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the key of a series; ``name`` is that of a built-in metric, or of any other one."""
    merged = {label: value for each in labels for label, value in each.items()}
    name = exposed_name(name) if name in DEFINITIONS else name
    return name, tuple(sorted(merged.items()))


def healthy(minutes: float, seed: int) -> Fleet:
    """Return the series of a healthy fleet: a version every 30 seconds, each applied within a second."""
    drawn, count = random.Random(seed), num_samples(minutes)
    times = [INTERVAL_SECONDS * number for number in range(count)]
    commits = [0.0]
    while commits[-1] < times[-1]:
        commits.append(commits[-1] + _CADENCE_SECONDS * drawn.uniform(0.7, 1.4))
    newest = [max(place for place, commit in enumerate(commits) if commit <= now) for now in times]
    fleet: Fleet = {}

    def add(name: str, labels: Sequence[Mapping[str, str]], values: Sequence[float]) -> None:
        fleet[key(name, *labels)] = list(values)

    publisher, predictor = {"publisher": "publisher"}, {"predictor": "predictor"}
    tracker = {"tracker": "tracker", "consumer": "default"}
    for target in (_TRAINER, _FIRST, _SECOND):
        add("up", [target], [1] * count)
        add("process_start_time_seconds", [target], [-86_400] * count)
        for name, labels in (("outlet_errors", {"outlet": "PrometheusSink"}), ("dropped_events", {"reason": "full"})):
            add(name, [target, labels], [0] * count)
    add("publisher_info", [_TRAINER, publisher, _URL], [1] * count)
    add("published_version", [_TRAINER, publisher], newest)
    add("published_versions", [_TRAINER, publisher, {"kind": "delta"}], newest)
    add("publisher_skew_seconds", [_TRAINER, publisher], [drawn.uniform(-1, 0.1) for _ in times])
    add("fences", [_TRAINER, publisher], [0] * count)
    for reason in ("StorageError", "FencedError"):
        add("publish_failures", [_TRAINER, publisher, {"reason": reason}], [0] * count)
    for step in ("start", "compaction", "retention"):
        add("upkeep_failures", [_TRAINER, publisher, {"step": step}], [0] * count)
    since = [now - commits[place] for now, place in zip(times, newest, strict=True)]
    add("consumer_lag_batches", [_TRAINER, tracker], [round(10 * each) for each in since])
    add("oldest_pending_seconds", [_TRAINER, tracker], since)
    add("pending_ratio", [_TRAINER, tracker, {"table": "user"}], [drawn.uniform(0, 0.2) for _ in times])
    add("hook_errors", [_TRAINER, {"tracker": "tracker", "table": "user"}], [0] * count)
    add("takeovers", [_TRAINER, {"standby": "standby"}], [0] * count)
    add("takeover_failures", [_TRAINER, {"standby": "standby"}], [0] * count)
    add("standby_lag_versions", [_TRAINER, {"standby": "standby"}], [drawn.choice([0, 0, 1]) for _ in times])
    for target, name in ((_FIRST, "host-1"), (_SECOND, "host-2")):
        add("heartbeat_age_seconds", [_TRAINER, {"predictor": name}], [drawn.uniform(0, 15) for _ in times])
        add("predictor_info", [target, predictor, _URL], [1] * count)
        add("served_age_seconds", [target, predictor], [each + drawn.uniform(0, 1) for each in since])
        lags = [drawn.choice([0, 0, 0, 1]) for _ in times]
        add("predictor_lag_versions", [target, predictor], lags)
        add("predictor_lag_seconds", [target, predictor], [lag * drawn.uniform(0, 1) for lag in lags])
        add("predictor_skew_seconds", [target, predictor], [0] * count)
        add("follow_errors", [target, predictor, {"reason": "StorageError"}], [0] * count)
        add("refused_parts", [target, predictor, {"reason": "corrupt"}], [0] * count)
        for reason in ("CorruptPartError", "MissingVersionError"):
            add("resyncs", [target, predictor, {"reason": reason}], [0] * count)
    add("stream_age_seconds", [_EXPORTER, _READ], since)
    for name in ("host-3", "host-4"):
        add("heartbeat_age_seconds", [_EXPORTER, {"predictor": name}], [drawn.uniform(0, 15) for _ in times])
        add("heartbeat_lag_seconds", [_EXPORTER, {"predictor": name}], [drawn.uniform(0, 1) for _ in times])
    _restart(fleet, _SECOND, num_samples(min(30, minutes / 2)))
    # One poll failed in the first minute, as polls do, and was repeated.
    failures = fleet[key("follow_errors", _FIRST, predictor, {"reason": "StorageError"})]
    failures[3:] = [1] * (count - 3)
    return fleet


def _restart(fleet: Fleet, target: Mapping[str, str], begin: int) -> None:
    """Restart a process; it is down for three scrapes."""
    for (name, labels), values in fleet.items():
        if target.items() <= dict(labels).items():
            for place in range(begin, min(begin + 3, len(values))):
                values[place] = 0 if name == "up" else None
            if name == "process_start_time_seconds":
                values[begin + 3 :] = [float(INTERVAL_SECONDS * (begin + 2))] * len(values[begin + 3 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault, and the alerts that fire half an hour later.

    Args:
        fault: name of the fault.
        happen: changes the series of a healthy fleet from a sample on.
        fires: name of each alert that fires, without ``DeltaTracker``, to the labels of each of its series.
    """

    fault: str
    happen: Callable[[Fleet, int], None]
    fires: Mapping[str, Sequence[Mapping[str, str]]]


def _from(
    fleet: Fleet, begin: int, name: str, *labels: Mapping[str, str], value: Callable[[int], float | None]
) -> None:
    """Set the values of a series from a sample on; ``value`` gets the number of samples since."""
    values = fleet.setdefault(key(name, *labels), [None] * len(next(iter(fleet.values()))))
    values[begin:] = [value(place) for place in range(len(values) - begin)]


_PUBLISHER, _PREDICTOR = {"publisher": "publisher"}, {"predictor": "predictor"}
_CONSUMER = {"tracker": "tracker", "consumer": "default"}


def _down(fleet: Fleet, begin: int, target: Mapping[str, str]) -> None:
    for (name, labels), values in fleet.items():
        if target.items() <= dict(labels).items():
            values[begin:] = [0 if name == "up" else None] * (len(values) - begin)


def _no_versions(fleet: Fleet, begin: int, *targets: Mapping[str, str]) -> None:
    """Let the age of the served rows of predictors grow."""
    for target in targets:
        _from(
            fleet, begin, "served_age_seconds", target, _PREDICTOR, value=lambda place: 15.0 + place * INTERVAL_SECONDS
        )


def _stalled(fleet: Fleet, begin: int) -> None:
    """Let training run without versions."""
    for name, labels in (("published_version", []), ("published_versions", [{"kind": "delta"}])):
        held = fleet[key(name, _TRAINER, _PUBLISHER, *labels)][begin - 1]
        _from(fleet, begin, name, _TRAINER, _PUBLISHER, *labels, value=lambda _, held=held: held)  # type: ignore[misc]
    _from(fleet, begin, "consumer_lag_batches", _TRAINER, _CONSUMER, value=lambda place: 150.0 * place)
    _no_versions(fleet, begin, _FIRST, _SECOND)


def _trainer_killed(fleet: Fleet, begin: int) -> None:
    _down(fleet, begin, _TRAINER)
    _no_versions(fleet, begin, _FIRST, _SECOND)


def _trainer_moved(fleet: Fleet, begin: int) -> None:
    """The trainer restarts on another host within two minutes, and its former target is gone."""
    moved = {**_TRAINER, "instance": "t2:9464"}
    for (name, labels), values in list(fleet.items()):
        if _TRAINER.items() <= dict(labels).items() and "heartbeat" not in name:
            rest = {label: value for label, value in labels if label not in moved}
            later = [None] * (begin + 8)
            fleet[key(name, moved, rest)] = [*later, *values[begin + 8 :]]
            values[begin:] = [None] * (len(values) - begin)
        elif "heartbeat" in name:
            values[begin:] = [None] * (len(values) - begin)


def _predictor_killed(fleet: Fleet, begin: int) -> None:
    _down(fleet, begin, _FIRST)
    _from(
        fleet,
        begin,
        "heartbeat_age_seconds",
        _TRAINER,
        {"predictor": "host-1"},
        value=lambda place: 10.0 + INTERVAL_SECONDS * place,
    )


def _corrupt_part(fleet: Fleet, begin: int) -> None:
    """The process is new, and has met the part before its first scrape."""
    late = begin + num_samples(30) - 3
    for (name, labels), values in fleet.items():
        if _FIRST.items() <= dict(labels).items():
            values[:late] = [None] * late
            if name == "process_start_time_seconds":
                values[late:] = [INTERVAL_SECONDS * late - 10.0] * (len(values) - late)
    for name, reason in (("refused_parts", "corrupt"), ("resyncs", "CorruptPartError")):
        _from(fleet, late, name, _FIRST, _PREDICTOR, {"reason": reason}, value=lambda _: 1)


def _corrupt_at_each_start(fleet: Fleet, begin: int) -> None:
    """A process that is restarted every five minutes counts the same part each time, before its first scrape."""
    for place in range(begin + num_samples(2), len(fleet[key("up", _FIRST)]) - 3, num_samples(5)):
        _restart(fleet, _FIRST, place)
    for (name, labels), values in fleet.items():
        if name == exposed_name("refused_parts") and _FIRST.items() <= dict(labels).items():
            values[:] = [None if each is None else 1 for each in values]


def _store_hung(fleet: Fleet, begin: int) -> None:
    _stalled(fleet, begin)
    for target in (_FIRST, _SECOND):
        for name in ("predictor_lag_versions", "predictor_lag_seconds"):
            _from(fleet, begin, name, target, _PREDICTOR, value=lambda _: None)


def _fenced(fleet: Fleet, begin: int) -> None:
    """A second publisher takes over; the fenced one counts it after 25 minutes, and goes on training."""
    other = {**_TRAINER, "instance": "t2:9464"}
    for (name, labels), values in list(fleet.items()):
        if _TRAINER.items() <= dict(labels).items() and name.startswith("delta_tracker_publish"):
            rest = {label: value for label, value in labels if label not in other}
            fleet[key(name, other, rest)] = [*([None] * begin), *values[begin:]]
    late = begin + num_samples(25)
    _from(fleet, late, "fences", _TRAINER, _PUBLISHER, value=lambda _: 1)
    _from(fleet, late, "publish_failures", _TRAINER, _PUBLISHER, {"reason": "FencedError"}, value=lambda _: 1)
    for name, labels in (("published_version", []), ("published_versions", [{"kind": "delta"}])):
        held = fleet[key(name, _TRAINER, _PUBLISHER, *labels)][late - 1]
        _from(fleet, late, name, _TRAINER, _PUBLISHER, *labels, value=lambda _, held=held: held)  # type: ignore[misc]


def _disk_full(fleet: Fleet, begin: int) -> None:
    _stalled(fleet, begin)
    labels = {"reason": "StorageError"}
    _from(fleet, begin, "publish_failures", _TRAINER, _PUBLISHER, labels, value=lambda place: place + 1)


def _retention_fails(fleet: Fleet, begin: int) -> None:
    labels = {"step": "retention"}
    _from(fleet, begin, "upkeep_failures", _TRAINER, _PUBLISHER, labels, value=lambda place: 1 + place // 32)


def _skewed(fleet: Fleet, begin: int) -> None:
    _from(fleet, begin, "publisher_skew_seconds", _TRAINER, _PUBLISHER, value=lambda _: -3600)
    _from(fleet, begin, "predictor_skew_seconds", _FIRST, _PREDICTOR, value=lambda _: 75)


def _empty(fleet: Fleet, begin: int) -> None:
    """A predictor is restarted without a saved position, with the wrong url."""
    for (name, labels), values in fleet.items():
        if name == exposed_name("served_age_seconds") and _FIRST.items() <= dict(labels).items():
            values[begin:] = [None] * (len(values) - begin)
    _from(fleet, begin, "predictor_info", _FIRST, _PREDICTOR, _URL, value=lambda _: None)
    nowhere = {"stream": "", "url": "s3://bucket/other"}
    _from(fleet, begin, "predictor_info", _FIRST, _PREDICTOR, nowhere, value=lambda _: 1)


def _follow_fails(fleet: Fleet, begin: int) -> None:
    labels = {"reason": "ModelMismatchError"}
    _from(fleet, begin, "follow_errors", _FIRST, _PREDICTOR, labels, value=lambda place: 3.0 * place)
    _no_versions(fleet, begin, _FIRST)
    for name, factor in (("predictor_lag_versions", 0.5), ("predictor_lag_seconds", INTERVAL_SECONDS)):
        _from(fleet, begin, name, _FIRST, _PREDICTOR, value=lambda place, factor=factor: factor * place)  # type: ignore[misc]


def _differs(fleet: Fleet, begin: int) -> None:
    _from(fleet, begin, "model_differences", _FIRST, _PREDICTOR, value=lambda _: 2)


def _read_only(fleet: Fleet, begin: int) -> None:
    """Seen by the exporter only: no version comes, one predictor lags, the other is killed."""
    for name, labels in (
        ("stream_age_seconds", _READ),
        ("heartbeat_lag_seconds", {"predictor": "host-3"}),
        ("heartbeat_age_seconds", {"predictor": "host-4"}),
    ):
        _from(fleet, begin, name, _EXPORTER, labels, value=lambda place: 10.0 + INTERVAL_SECONDS * place)
    _from(fleet, begin, "heartbeat_model_differences", _EXPORTER, {"predictor": "host-5"}, value=lambda _: 1)


_OLD = {"ServedRowsOld": [{**target, **_PREDICTOR} for target in (_FIRST, _SECOND)]}
_STALLED = {"PublisherStalled": [{**_TRAINER, **_PUBLISHER}]}
_GONE = {"TrainerGone": [{"job": "trainer", **_URL}]}
_REFUSED = {"PartsRefused": [{**_FIRST, **_PREDICTOR, "reason": "corrupt"}]}

CASES = (
    Case(fault="trainer killed", happen=_trainer_killed, fires=_GONE | _OLD),
    Case(fault="trainer moved", happen=_trainer_moved, fires={}),
    Case(
        fault="predictor killed",
        happen=_predictor_killed,
        fires={"PredictorDown": [_FIRST], "PredictorSilent": [{**_TRAINER, "predictor": "host-1"}]},
    ),
    Case(fault="corrupt part", happen=_corrupt_part, fires=_REFUSED),
    Case(fault="corrupt part at each start", happen=_corrupt_at_each_start, fires=_REFUSED),
    Case(
        fault="store hung",
        happen=_store_hung,
        fires={
            "StoreUnreadable": [{**target, **_PREDICTOR, **_URL} for target in (_FIRST, _SECOND)],
            **_STALLED,
            **_OLD,
        },
    ),
    Case(
        fault="publisher fenced",
        happen=_fenced,
        fires={
            "PublisherFenced": [{**_TRAINER, **_PUBLISHER}],
            "PublishFails": [{**_TRAINER, **_PUBLISHER, "reason": "FencedError"}],
        },
    ),
    Case(
        fault="disk full",
        happen=_disk_full,
        fires={"PublishFails": [{**_TRAINER, **_PUBLISHER, "reason": "StorageError"}], **_STALLED, **_OLD},
    ),
    Case(
        fault="retention fails",
        happen=_retention_fails,
        fires={"UpkeepFails": [{**_TRAINER, **_PUBLISHER, "step": "retention"}]},
    ),
    Case(
        fault="clocks skewed",
        happen=_skewed,
        fires={"ClockSkew": [{**_TRAINER, **_PUBLISHER}, {**_FIRST, **_PREDICTOR}]},
    ),
    Case(
        fault="predictor without a version",
        happen=_empty,
        fires={"PredictorEmpty": [{**_FIRST, **_PREDICTOR, "url": "s3://bucket/other"}]},
    ),
    Case(
        fault="version does not fit",
        happen=_follow_fails,
        fires={
            "FollowFails": [{**_FIRST, **_PREDICTOR, "reason": "ModelMismatchError"}],
            "ServedRowsOld": [{**_FIRST, **_PREDICTOR}],
            "PredictorStale": [{**_FIRST, **_PREDICTOR}],
        },
    ),
    Case(
        fault="model differs",
        happen=_differs,
        fires={"ModelDiffers": [{**_FIRST, **_PREDICTOR}]},
    ),
    Case(
        fault="seen by the exporter only",
        happen=_read_only,
        fires={
            "StreamOld": [{**_EXPORTER, **_READ}],
            "PredictorStale": [{**_EXPORTER, "predictor": "host-3"}],
            "PredictorSilent": [{**_EXPORTER, "predictor": "host-4"}],
            "ModelDiffers": [{**_EXPORTER, "predictor": "host-5"}],
        },
    ),
)


def unit_test_of(case: Case) -> dict[str, object]:
    """Return the unit test of a case: at half an hour after the fault, exactly these alerts fire."""
    fleet = healthy(FAULT_MINUTE + _LATER_MINUTES, seed=1)
    case.happen(fleet, num_samples(FAULT_MINUTE))
    return _unit_test(case.fault, fleet, {FAULT_MINUTE + 30: case.fires})


def healthy_hour(seed: int) -> dict[str, object]:
    """Return the unit test of an hour of healthy load: no alert fires at any minute."""
    return _unit_test(f"healthy {seed}", healthy(61, seed), {minute: {} for minute in range(1, 61)})


def _unit_test(
    name: str, fleet: Fleet, fires: Mapping[int, Mapping[str, Sequence[Mapping[str, str]]]]
) -> dict[str, object]:
    series = [
        {
            "series": f"{metric}{{{', '.join(f'{label}={json.dumps(value)}' for label, value in labels)}}}",
            "values": _written(values),
        }
        for (metric, labels), values in fleet.items()
    ]
    return {
        "name": name,
        "interval": f"{INTERVAL_SECONDS}s",
        "input_series": series,
        "alert_rule_test": [
            {
                "eval_time": f"{minute}m",
                "alertname": alert.name,
                "exp_alerts": [
                    {
                        "exp_labels": {"severity": alert.severity, **labels},
                        "exp_annotations": {"summary": alert.summary, "description": alert.action},
                    }
                    for labels in expected.get(alert.name.removeprefix("DeltaTracker"), ())
                ],
            }
            for minute, expected in fires.items()
            for alert in ALERTS
        ],
    }


def _written(values: Values) -> str:
    """Return values in promtool's notation. A target that is down gets a stale marker, as from a real Prometheus."""
    words, before = [], None
    for value in values:
        words.append(("_" if before is None else "stale") if value is None else f"{value:g}")
        before = value
    return " ".join(words)


def unit_tests(rules: Path, tests: Sequence[Mapping[str, object]]) -> str:
    """Return the text of a file for ``promtool test rules``. JSON is YAML."""
    return json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests})
