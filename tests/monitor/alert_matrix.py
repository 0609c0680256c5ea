"""Which alert each fault fires, in a real Prometheus that scrapes real trainers and predictors.

    python -m tests.monitor.alert_matrix

needs the programs ``prometheus`` and ``weed``, and root for a small file system that fills up. Each fault has a trainer
and a predictor of its own, all on loopback. Time runs 20 times as fast: cadence, scrapes, and all times of the rules
but the age of a heartbeat and the difference of two clocks, which do not depend on the load. Three minutes without a
fault are therefore an hour; after four minutes with the faults, the matrix is printed. Alerts of the first three
minutes are printed as well; there must be none. The exit status is 1 if an alert is missing or is not expected.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.monitor.panels import ALERTS
from tests.servers import S3, TcpProxy, free_ports, installed, s3_server
from tests.system.full_disk_cases import fill

SPEED = 20
_HEALTHY_SECONDS, _FAULTY_SECONDS = 180, 240
_START_SECONDS = 300
_SCRAPE_SECONDS = 1
_MODULE = "tests.monitor.monitored"
_UNSCALED = ("heartbeat_age", "skew_seconds")


@dataclass
class Pair:
    """A trainer and a predictor, which share a stream.

    Args:
        fault: name of the fault.
        folder: folder of the logs.
        url: url of the stream.
        options: options of the store.

    Attributes:
        ports: port of each role.
        processes: process of each role.
    """

    fault: str
    folder: Path
    url: str
    options: Mapping[str, str] | None = None
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, role: str, *, at: str | None = None) -> None:
        """Start a role; ``at`` is its name if it is a second one."""
        name = at or role
        port = self.ports.setdefault(name, free_ports(1)[0])
        command = [sys.executable, "-W", "ignore", "-m", _MODULE, role, self.url, str(port), json.dumps(self.options)]
        with (self.folder / f"{self.fault.replace(' ', '-')}-{name}.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(command, stdout=output, stderr=output)

    def stop(self) -> None:
        """Kill both."""
        for process in self.processes.values():
            process.kill()
            process.wait(30)

    @property
    def directory(self) -> Path:
        """Directory of the stream."""
        return Path(self.url.removeprefix("file://"))

    def wait(self, name: str, metric: str) -> None:
        """Wait until a process exports a metric above 0."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[name]}/metrics", timeout=5) as answer:
                    text = answer.read().decode()
            except OSError:
                text = ""
            if any(float(value) > 0 for value in re.findall(rf"^{metric}{{[^}}]*}} (\S+)$", text, flags=re.MULTILINE)):
                return
            if self.processes[name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.fault}: {name} did not start, see {self.folder}")
            time.sleep(0.2)


def _corrupts(pair: Pair) -> None:
    """Damage the newest snapshot, and restart the predictor, which finds it before its first scrape."""
    pair.processes["predictor"].kill()
    pair.processes["predictor"].wait(30)
    log = sorted((pair.directory / "log").iterdir())
    entries = [json.loads(each.read_bytes()) for each in log if each.suffix == ".json"]
    newest = [each for each in entries if each["kind"] == "snapshot"][-1]
    part = pair.directory / newest["parts"][0]["name"]
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 0xFF
    part.write_bytes(data)
    pair.start("predictor")


def _fails_retention(pair: Pair) -> None:
    (pair.directory / "publishers").symlink_to("publishers")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: how it is injected, and the alerts that it must and may fire, without ``DeltaTracker``."""

    inject: Callable[[Pair], object]
    must: frozenset[str]
    may: frozenset[str] = frozenset()


_OLD = {"ServedRowsOld"}
FAULTS: Mapping[str, Fault] = {
    "none": Fault(lambda _: None, frozenset()),
    "trainer killed": Fault(
        lambda pair: pair.processes["trainer"].kill(), frozenset({"TrainerGone", *_OLD}), frozenset({"PredictorSilent"})
    ),
    "predictor killed": Fault(
        lambda pair: pair.processes["predictor"].kill(), frozenset({"PredictorDown", "PredictorSilent"})
    ),
    "corrupt part": Fault(_corrupts, frozenset({"PartsRefused"}), frozenset({"PredictorDown", "FollowFails"})),
    "store hung": Fault(
        lambda _: None,  # by its proxy
        frozenset({"StoreUnreadable", "PublisherStalled", *_OLD}),
        frozenset(
            {
                "PublishFails",
                "FollowFails",
                "MonitorLoses",
                "PredictorSilent",
                "ConsumerStopped",
                "UpkeepFails",
                "PendingRowsGrow",
            }
        ),
    ),
    "publisher fenced": Fault(
        lambda pair: pair.start("trainer", at="second trainer"),
        frozenset({"PublisherFenced", "PublishFails"}),
        frozenset({"PublisherStalled", "ConsumerStopped", "PendingRowsGrow"}),
    ),
    "disk full": Fault(
        lambda pair: fill(pair.directory.parent / "filler", but_pages=0),
        frozenset({"PublishFails", "PublisherStalled", *_OLD}),
        frozenset({"ConsumerStopped", "PendingRowsGrow", "PredictorSilent", "UpkeepFails"}),
    ),
    "retention fails": Fault(_fails_retention, frozenset({"UpkeepFails"})),
    "clock skewed": Fault(lambda pair: pair.processes["trainer"].send_signal(signal.SIGUSR1), frozenset({"ClockSkew"})),
}


def faster(rules: str) -> str:
    """Return alert rules whose times are divided by :data:`SPEED`.

    Example:
        >>> faster('expr: "increase(x_total[15m]) > 0"')
        'expr: "increase(x_total[45s]) > 0"'
        >>> faster('expr: "x_age_seconds > 900"')
        'expr: "x_age_seconds > 45"'
        >>> faster("for: 5m")
        'for: 15s'
    """
    seconds = {"m": 60, "h": 3600}

    def shorter(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) * seconds[found[3]] // SPEED}s"

    lines = []
    for line in rules.splitlines():
        text = re.sub(r"(\[|offset |for: )(\d+)([mh])", shorter, line)
        if not any(each in text for each in _UNSCALED):
            text = re.sub(r"(_seconds [<>] )(\d+)", lambda found: f"{found[1]}{int(found[2]) / SPEED:g}", text)
        lines.append(text)
    return "\n".join(lines)


@contextmanager
def _prometheus(folder: Path, pairs: Sequence[Pair]) -> Iterator[str]:
    """Run a Prometheus that scrapes all processes; yield its url."""
    rules = folder / "rules.yml"
    rules.write_text(faster(Path("delta_tracker/monitor/alerts.yml").read_text()))
    jobs = [
        {
            "job_name": f"{pair.fault}/{role}",
            "static_configs": [
                {"targets": [f"127.0.0.1:{port}" for name, port in pair.ports.items() if name.endswith(role)]}
            ],
        }
        for pair in pairs
        for role in ("trainer", "predictor")
    ]
    every = {"scrape_interval": f"{_SCRAPE_SECONDS}s", "evaluation_interval": f"{_SCRAPE_SECONDS}s"}
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({"global": every, "rule_files": [str(rules)], "scrape_configs": jobs}))
    (port,) = free_ports(1)
    command = [
        installed("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(30)


def _firing(url: str, seconds: float) -> dict[str, dict[str, float]]:
    """Return the alerts that fire within some seconds: fault to name to the seconds until it fired."""
    found: dict[str, dict[str, float]] = {}
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        time.sleep(1)
        try:
            with urllib.request.urlopen(f"{url}/api/v1/alerts", timeout=10) as answer:
                alerts = json.load(answer)["data"]["alerts"]
        except OSError:
            continue
        for alert in alerts:
            if alert["state"] == "firing":
                fault = alert["labels"]["job"].partition("/")[0]
                name = alert["labels"]["alertname"].removeprefix("DeltaTracker")
                found.setdefault(fault, {}).setdefault(name, time.monotonic() - began)
    return found


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def matrix(fired: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table in Markdown: a row for each fault, with the minutes after which each alert fired."""
    names = [alert.name.removeprefix("DeltaTracker") for alert in ALERTS]
    used = [name for name in names if any(name in each for each in fired.values())]
    rows = [f"| fault | {' | '.join(used)} |", f"|---|{'---|' * len(used)}"]
    for fault in FAULTS:
        cells = [
            f"{fired.get(fault, {})[name] * SPEED / 60:.0f}" if name in fired.get(fault, {}) else "" for name in used
        ]
        rows.append(f"| {fault} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _pairs(folder: Path, s3: S3, proxy: TcpProxy, disk: Path | None) -> list[Pair]:
    """Return a trainer and a predictor for each fault, which do not run yet."""
    pairs = []
    for fault in FAULTS:
        url, options = f"file://{folder / fault.replace(' ', '-')}", None
        if fault == "disk full":
            if disk is None:
                sys.stderr.write("not root: no disk is filled\n")
                continue
            url = f"file://{disk}/stream"
        if fault == "store hung":
            url, options = f"{s3.url}/stream", s3.through(proxy.port)
        pairs.append(Pair(fault, folder, url, options))
    return pairs


def _differences(pairs: Sequence[Pair], fired: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for each fault whose alerts are not the expected ones."""
    lines = []
    for pair in pairs:
        fault, names = FAULTS[pair.fault], set(fired.get(pair.fault, {}))
        for text, which in (("missing", fault.must - names), ("not expected", names - fault.must - fault.may)):
            if which:
                lines.append(f"{pair.fault}: {text}: {', '.join(sorted(which))}")
    return lines


def main(folder: Path) -> int:
    """Run everything; return the exit status."""
    with ExitStack() as stack:
        s3 = stack.enter_context(s3_server())
        proxy = TcpProxy(s3.port)
        stack.callback(proxy.close)
        disk = stack.enter_context(_small_disk(folder)) if os.geteuid() == 0 else None
        pairs = _pairs(folder, s3, proxy, disk)
        for pair in pairs:
            stack.callback(pair.stop)
            pair.start("trainer")
        for pair in pairs:
            pair.wait("trainer", "delta_tracker_published_version")
            pair.start("predictor")
        for pair in pairs:
            pair.wait("predictor", "delta_tracker_applied_version")
            if pair.fault == "publisher fenced":
                pair.ports["second trainer"] = free_ports(1)[0]
        url = stack.enter_context(_prometheus(folder, pairs))
        before = _firing(url, _HEALTHY_SECONDS)
        sys.stdout.write(f"without a fault: {before or 'none'}\n")
        for pair in pairs:
            FAULTS[pair.fault].inject(pair)
        proxy.delay_seconds = 3600
        fired = _firing(url, _FAULTY_SECONDS)
    sys.stdout.write(matrix(fired) + "\n")
    wrong = _differences(pairs, fired)
    sys.stdout.writelines(f"{line}\n" for line in wrong)
    return int(bool(before or wrong))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        status = main(Path(sys.argv[1] if len(sys.argv) > 1 else name))
    sys.exit(status)
