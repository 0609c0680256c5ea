"""How much is pending, for whoever decides when to read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from delta_tracker.changes import ChangeLog
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.reader import DeltaReader
from delta_tracker.selection import TopK
from delta_tracker.sharding.discover import LocalShard


class PendingRows:
    """Base of the tracker: counts of changed rows. A table whose optimizer is not fused is compared at reads only.

    Until a read compares it, such a table counts nothing here.
    """

    _log: ChangeLog
    _model: nn.Module
    _shards: dict[str, LocalShard]
    _reader: DeltaReader

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
