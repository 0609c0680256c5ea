"""Base class of sinks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from delta_tracker.monitor.batch import Batch


class Sink(ABC):
    """Base class of destinations of metrics and events.

    The collector calls :meth:`deliver` with each batch, in order, one call at a time, in threads of the library.
    It calls :meth:`close` after the last batch, even if no batch was delivered. In a forked child it calls only
    :meth:`forget`.

    If a call raises, the error is counted, and the sink is not called for a while. Only the first error of a sink is
    logged. The windows and events of the batch are delivered again with the next batch, so a sink should write a batch
    completely or not at all. For each sink, at most 8192 windows and the monitor's ``capacity`` of events are queued.
    If there are more, the oldest ones are dropped and counted.

    A call that exceeds the collector's deadline counts as an error, and the sink is not called again before that call
    has returned. If the late call does not raise, the batch counts as delivered. If the call never returns, the sink is
    not closed.
    """

    @property
    def name(self) -> str:
        """Name of the sink in log messages and metrics."""
        return type(self).__name__

    @abstractmethod
    def deliver(self, batch: Batch) -> None:
        """Export a batch. The sink must not change the batch, because all sinks share its contents."""

    def close(self) -> None:  # noqa: B027  many sinks have nothing to close
        """Flush and release resources. Called once."""

    def forget(self) -> None:  # noqa: B027
        """Release the resources shared with the parent process, but write nothing. Called in a forked child."""
