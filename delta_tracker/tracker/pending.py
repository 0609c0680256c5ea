"""How much is pending and how much memory that takes: for whoever decides when to read, and for the monitor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from functools import partial
from types import MappingProxyType

from torch import nn

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.default import MONITOR, metrics
from delta_tracker.monitor.source import Owned
from delta_tracker.sharding.discover import LocalShard
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.delta_reader import DeltaReader
from delta_tracker.tracker.gauges import forget_consumer
from delta_tracker.tracker.top_k import TopK
from delta_tracker.types import Memory

# Below the time after which the monitor takes a source for one that hangs.
_PATIENCE_SECONDS = 1
_KINDS = ("log", "copy", "carried")


class PendingRows:
    """Base of the tracker: counts of changed rows. A table whose optimizer is not fused is compared at reads only.

    Until a read compares it, such a table counts nothing here.
    """

    _log: ChangeLog
    _model: nn.Module
    _shards: dict[str, LocalShard]
    _reader: DeltaReader

    def __init__(self) -> None:
        told: dict[str, tuple[str, ...]] = {}
        MONITOR.add_source(
            Owned("delta_tracker", self, partial(record_figures, told=told), partial(forget_figures, told))
        )

    def memory(self) -> Memory:
        """What the tracker holds now."""
        copies = sum(store.copy_bytes for store in self._log.stores.values())
        return Memory(self._log.log_bytes, copies, self._log.carried_bytes)

    @property
    def model(self) -> nn.Module:
        """The tracked model."""
        return self._model

    def check_top_k(self, top_k: TopK | None) -> None:
        """Refuse a choice that no read of this tracker could make.

        Raises:
            InvalidArgumentError: for what is no ``TopK``, or one without a score in a mode that has none.
        """
        if top_k is not None and not isinstance(top_k, TopK):
            raise InvalidArgumentError("top_k", top_k, "Pass a TopK")
        self._reader.check(top_k, with_optimizer=False)

    def join_top_k(self, call: str, timeout: timedelta) -> None:
        """Join the ranks that share top-k's budget, which the first read with it does otherwise. A collective.

        Args:
            call: what every rank has to call, as errors name it.
            timeout: how long ranks wait for each other, here and in each read with top-k.

        Raises:
            RankLostError: if a rank dies or does not come in time.
        """
        self._reader.join(call, timeout)

    @property
    def fused_tables(self) -> frozenset[str]:
        """FQNs of the tables whose optimizer is fused, the same on every rank: each write of theirs is seen."""
        return frozenset(fqn for fqn, shard in self._shards.items() if shard.is_fused)

    @property
    def num_recorded(self) -> Mapping[str, int]:
        """Table FQN to how many rows were recorded as changed on this rank since the start, repeats included.

        Between two calls of :meth:`num_pending` that number cannot grow by more than this one does. It costs nothing.
        """
        return MappingProxyType(self._log.num_recorded)

    def num_pending(self, consumer: str | None = None) -> dict[str, int]:
        """Table FQN to how many rows of this rank a read would give the consumer now. Waits for the device.

        It takes nothing, so anybody may ask, also for a publisher's consumer.

        Args:
            consumer: who would read; may be left out when there is only one.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
        """
        return self._log.num_pending(consumer)


def record_figures(tracker: PendingRows, told: dict[str, tuple[str, ...]]) -> None:
    """Tell the monitor how a tracker stands; called in the monitor's thread, once per collection.

    Rows on a device are not counted here, because whoever holds the log's lock while it waits for the device makes the
    next hook wait; for how long rows are pending is told of them too. While a read has the lock for long, as one with
    top-k may that waits for other ranks, the figures stay what they were.

    Args:
        tracker: which.
        told: is put to the consumers and tables of which figures were told.
    """
    log = tracker._log  # noqa: SLF001
    if not log.lock.acquire(timeout=_PATIENCE_SECONDS):
        return
    try:
        memory = tracker.memory()
        for kind in _KINDS:
            metrics.state_bytes.set(getattr(memory, f"{kind}_bytes"), kind=kind)
        log.tell(counts=all(shard.device.type == "cpu" for shard in tracker._shards.values()))  # noqa: SLF001
        told.clear()
        told.update(dict.fromkeys(log.consumers, tuple(log.stores)))
    finally:
        log.lock.release()


def forget_figures(told: Mapping[str, Collection[str]]) -> None:
    """A tracker is gone, of which the figures of these consumers and tables were told."""
    for kind in _KINDS:
        metrics.state_bytes.remove(kind=kind)
    for consumer, fqns in told.items():
        forget_consumer(consumer, fqns)
