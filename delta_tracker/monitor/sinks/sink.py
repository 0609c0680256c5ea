"""What every sink does."""

from __future__ import annotations

from abc import ABC, abstractmethod

from delta_tracker.monitor.batch import Batch


class Sink(ABC):
    """A destination.

    Protocol: the collector calls :meth:`deliver` with each batch, in order, one call at a time, from threads of the
    library; after the last one, and also if none ever came, :meth:`close`. What raises is counted, logged once, and the
    sink is left alone for a while; the windows and events of that batch come again with the next one, so a sink writes
    all of a batch or nothing where it can. At most 8192 windows, and as many events as the monitor keeps, wait; beyond,
    the oldest are dropped and counted. What takes longer than the collector's deadline counts as raising; the sink is
    not called again before it has returned, its batch counts as delivered if it does so without raising, and a sink
    that never returns is not closed. In a forked child only :meth:`forget` is called.
    """

    @property
    def name(self) -> str:
        """Names it in logs and metrics."""
        return type(self).__name__

    @abstractmethod
    def deliver(self, batch: Batch) -> None:
        """Pass a batch on. It is shared between the sinks: change nothing in it."""

    def close(self) -> None:  # noqa: B027  many have nothing to close
        """Write what is still held and let go of it. Called once."""

    def forget(self) -> None:  # noqa: B027
        """Let go of what the parent process still uses, and write nothing; called in a child after a fork."""
