"""``top``: show a live screen of a stream and its predictors."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import click
from rich.live import Live

from delta_tracker.cli.predictors import read_predictors
from delta_tracker.cli.screen import screen
from delta_tracker.cli.stream_command import Number, Stream, stream_command, terminated
from delta_tracker.cli.watch import TopView, Watch
from delta_tracker.errors import MalformedError, StorageError
from delta_tracker.stream.pin import Pin, newest_pin
from delta_tracker.stream.store_clock import StoreClock

_HELP = """Show a live screen of a stream: publish rates, rates of each table, and the lag of each predictor.
Without --once, it waits for a stream that does not exist yet.

Rates are averages over the last minute (--window). Each refresh reads only the versions committed since the last one.
Predictors are listed by their heartbeats, with the states that delta-tracker fleet --help describes, and omitted after
an hour without a heartbeat. The lag of a live predictor is read from its heartbeat.

\b
Examples:
  delta-tracker top file:///streams/ctr
  delta-tracker top s3://bucket/ctr --every 5
  delta-tracker top s3://bucket/ctr --once --json | jq .predictors
"""


@click.command("top", help=_HELP)
@click.option("--every", default=2.0, metavar="SECONDS", type=Number(0.1, 3600), help="Time between refreshes.")
@click.option("--window", default=60.0, metavar="SECONDS", type=Number(1, 86_400), help="Time span of the rates.")
@click.option("--once", is_flag=True, help="Show the screen once and exit.")
@stream_command
def command(stream: Stream, *, every: float, window: float, once: bool) -> int:
    """Show the screen, and refresh it until Ctrl-C. With ``--json``, print one JSON object per refresh instead."""
    if not once:
        with terminated():
            stream.wait_for_head(every)
    views = _views(stream, window)
    console = stream.out.console
    if once or stream.out.is_json or not console.is_terminal:
        for view in views:
            stream.out.json(view.to_dict())
            stream.out.show(screen(view, console.width))
            if once:
                return 0
            time.sleep(every)
    with _notes() as notes, terminated(), Live(console=console, screen=True, auto_refresh=False) as live:
        for view in views:
            view.problem = view.problem or notes.last
            live.update(screen(view, console.width, console.height), refresh=True)
            time.sleep(every)
    return 0


def _views(stream: Stream, window: float) -> Iterator[TopView]:
    """Yield one view per refresh, indefinitely.

    If the first read fails, the error is raised. Errors of later reads are stored in the view, and the read is retried.
    """
    watch, clock = Watch(stream.log, window), StoreClock()
    order: Pin | None = None
    view: TopView | None = None
    while True:
        began = clock.reader_time()
        try:
            watch.refresh(clock.now())
            head = watch.head or stream.head()
            if watch.is_complete:
                clock.observe("log", [head.committed], began=began)
            order = newest_pin(stream.storage, after=0 if order is None else order.counter) or order
            predictors, num_gone = read_predictors(stream.storage, head, clock, order=order)
            skews, now = watch.skews.problems(predictors, clock), clock.now()
            view = TopView(stream.storage.url, now, watch, predictors, num_gone, skews, watch.fault, read=now)
        except (StorageError, MalformedError) as error:
            if view is None:
                raise
            view = replace(view, now=clock.now(), problem=f"{error.problem}. {error.remedy}.")
        yield view


class _Notes(logging.Handler):
    """Log handler that stores the last message for the screen, because messages on stderr would corrupt the screen."""

    last: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


@contextmanager
def _notes() -> Iterator[_Notes]:
    logger, notes = logging.getLogger("delta_tracker"), _Notes()
    before, logger.handlers = logger.handlers, [notes]
    try:
        yield notes
    finally:
        logger.handlers = before
