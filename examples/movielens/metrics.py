"""Prometheus endpoints of the demo's processes."""

from __future__ import annotations

from datetime import timedelta

from delta_tracker import monitor
from delta_tracker.monitor.sinks.prometheus import PrometheusSink
from examples.movielens.forks import Send


def serve(send: Send, process: str) -> None:
    """Serve this process's metrics on a free port, and send the url to the parent."""
    sink = PrometheusSink(port=0)
    monitor.start([sink], interval=timedelta(seconds=1), attributes={"process": process})
    send({"event": "metrics", "process": process, "url": f"http://127.0.0.1:{sink.port}/metrics"})
