"""Export of windows and events to TensorBoard event files."""

from pathlib import Path
from typing import Any

from delta_tracker.errors import import_optional
from delta_tracker.monitor.buckets import LogBuckets
from delta_tracker.monitor.clock import NS
from delta_tracker.monitor.collection_report import CollectionReport, WindowReport
from delta_tracker.monitor.names import Labels, label_pairs
from delta_tracker.monitor.sinks.base_sink import Sink


class TensorBoardSink(Sink):
    """Sink that writes to TensorBoard event files: windows as scalars and histograms, and events as text.

    The x-axis is the training step at which a window closed. If no step was set, it is the number of the window,
    counted from 1 for each series.

    Args:
        folder: folder in which event files are created.

    Raises:
        MissingExtraError: if the package ``tensorboard`` is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        tensorboard = import_optional("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self._writer: Any = tensorboard.SummaryWriter(str(folder))

    def deliver(self, collection: CollectionReport) -> None:
        """Write the windows and events of the collection, and flush the files."""
        for report in collection.windows:
            series = tag(report.definition.name, report.labels)
            time = report.window.time_ns * NS
            for name, value in report.values.items():
                self._writer.add_scalar(f"{series}/{name}", value, report.window.axis_position, walltime=time)
            if report.buckets is not None and report.buckets.count:
                self._write_histogram(series, report, report.buckets)
        for event in collection.events:
            data = ", ".join(f"{key}={value}" for key, value in event.data.items())
            text = f"{event.severity.name} {event.phase}: {event.message} {data}"
            self._writer.add_text(event.name, text, walltime=event.time_ns * NS)
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()

    def _write_histogram(self, series: str, report: WindowReport, buckets: LogBuckets) -> None:
        figures = report.window.aggregate
        counts = limits(buckets)
        self._writer.add_histogram_raw(
            f"{series}/histogram",
            min=figures.min,
            max=figures.max,
            num=buckets.count,
            sum=figures.total,
            sum_squares=0.0,
            bucket_limits=[limit for limit, _ in counts],
            bucket_counts=[count for _, count in counts],
            global_step=report.window.axis_position,
            walltime=report.window.time_ns * NS,
        )


def limits(buckets: LogBuckets) -> list[tuple[float, int]]:
    """Convert buckets to TensorBoard's format: ascending upper limits and counts of contiguous buckets."""
    found: list[tuple[float, int]] = []
    for lower, upper, count in buckets.ranges():
        if found and found[-1][0] < lower:
            found.append((lower, 0))
        found.append((upper, count))
    return found


def tag(name: str, labels: Labels) -> str:
    """Return the TensorBoard tag of a series: ``name`` with slashes instead of dots, followed by ``labels``.

    TensorBoard groups tags by the part before the first slash.

    Example:
        >>> tag("training.loss", (("task", "click"),))
        'training/loss/task=click'
    """
    return "/".join([name.replace(".", "/"), *label_pairs(labels)])
