"""``exporter``: serve metrics of a stream and the lags of its predictors to Prometheus."""

import threading
from datetime import timedelta

import click

from delta_tracker.cli.stream_command import Number, Stream, os_errors_of, stream_command, terminated
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.sinks.prometheus import PrometheusSink
from delta_tracker.stream.heartbeat_metrics import show_heartbeats, show_stream

_HELP = """Serve the state of a stream at /metrics for Prometheus, until Ctrl-C or SIGTERM.

The process reads only the stream, so it needs no change of the trainer. It exports the newest version and its age, the
age of the publisher's heartbeat (versions with states only), and the lags, model differences and heartbeats of the
predictors that have a name. It waits for a stream that does not exist yet. If the stream cannot be read, the ages are
missing and delta_tracker_outlet_errors_total increases. Needs the extra "prometheus".

\b
Examples:
  delta-tracker exporter s3://bucket/ctr --port 9464
  delta-tracker exporter s3://bucket/ctr --host 0.0.0.0 --every 30
"""


@click.command("exporter", help=_HELP)
@stream_command
@click.option("--port", default=9464, type=click.IntRange(0, 65_535), help="Port to listen on; 0 for any free one.")
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all.")
@click.option("--every", default=15.0, metavar="SECONDS", type=Number(1, 3600), help="Time between two reads.")
def command(stream: Stream, port: int, host: str, every: float) -> int:
    """Read the stream periodically and serve the metrics, until Ctrl-C or SIGTERM."""
    monitor = Monitor()
    with os_errors_of("--port", port, "Choose another port or host"):
        sink = PrometheusSink(port, host=host)
    show_stream(stream.storage, monitor)
    show_heartbeats(stream.storage, monitor)
    monitor.start([sink], interval=timedelta(seconds=every), system=False)
    try:
        with terminated():
            url = f"http://{host}:{sink.port}/metrics"
            stream.out.result({"url": url}, f"metrics of {stream.storage.url}: {url}")
            monitor.flush()  # otherwise the first numbers come after an interval
            threading.Event().wait()
    finally:
        monitor.stop()
    return 0
