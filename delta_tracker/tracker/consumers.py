"""The readers of a tracker: who they are, who may move them, and how far back they may stand."""

from __future__ import annotations

from torch import Tensor

from delta_tracker.errors import DetachedError, InvalidArgumentError
from delta_tracker.sharding.discover import LocalShard
from delta_tracker.tracker.change_log import ChangeLog


class Consumers:
    """Base of the tracker: its consumers and the log that they share."""

    _log: ChangeLog
    _shards: dict[str, LocalShard]
    _is_attached: bool

    @property
    def consumers(self) -> tuple[str, ...]:
        """Names of the consumers."""
        return self._log.consumers

    def reserve(self, consumer: str | None, owner: object) -> str:
        """Let nobody but ``owner`` read or move a consumer until :meth:`release`; a publisher does so with its own.

        Returns:
            The consumer's name.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
            ReservedConsumerError: if somebody else has it.
            DetachedError: after :meth:`detach`.
        """
        if not self._is_attached:
            raise DetachedError
        name = self._log.resolve(consumer, owner)
        self._log.reserve(name, owner)
        return name

    def release(self, consumer: str, owner: object) -> None:
        """End a reservation of ``owner``; anybody else's stays."""
        self._log.reserve(self._log.resolve(consumer, owner), None)

    def needs_snapshot(self, consumer: str) -> bool:
        """Whether a consumer was given up to bound memory, so that only all rows can bring it up to date."""
        return self._log.is_behind(consumer)

    def add_consumer(self, consumer: str, *, owner: object = None) -> None:
        """Add a reader, which from now on is told what changes from now on.

        Args:
            consumer: its name.
            owner: reserve it for this object, as a part of whose life it is not saved in checkpoints; None for a
                reader like those that the tracker was built with.

        Raises:
            InvalidArgumentError: if it exists.
        """
        self._log.add(consumer, owner)

    def remove_consumer(self, consumer: str) -> None:
        """Remove a reader and what only it needed.

        Raises:
            UnknownConsumerError: if there is no such consumer.
        """
        self._log.remove(self._log.resolve(consumer))

    def distrust(self, consumer: str, fqn: str, ids: Tensor, *, owner: object = None) -> None:
        """Say that a consumer's copy of rows is not what the tracker takes it to be.

        They become pending for it, old values unknown, also where they were pending with a known one. Its open read is
        aborted.

        Args:
            consumer: whose copy.
            fqn: the table.
            ids: ``[N]`` integer local ids, in any order.
            owner: who reserved the consumer.

        Raises:
            UnknownConsumerError: if there is no such consumer.
            ReservedConsumerError: if it is reserved by somebody else than ``owner``.
            InvalidArgumentError: for a table that is not tracked, or ids outside the shard.
        """
        name = self._log.resolve(consumer, owner)
        if fqn not in self._shards:
            raise InvalidArgumentError("fqn", fqn, f"Pass one of the tracked tables {sorted(self._shards)}")
        self._shards[fqn].spec.check_ids(ids)
        self._log.distrust(name, fqn, ids.long())

    def clear(self, consumer: str | None = None, *, owner: object = None) -> None:
        """Forget what is pending for a consumer, or for all of them if none is named.

        It is also the way back for a consumer that was given up: clear it, then give it all rows (:meth:`read_rows`).

        Raises:
            UnknownConsumerError: if there is no such consumer.
        """
        for name in self._log.consumers if consumer is None else [consumer]:
            self._log.clear(self._log.resolve(name, owner))

    def rewind(self, consumer: str | None = None) -> None:
        """Let a consumer read again everything that changed since the tracker was built; aborts its open read.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
            InvalidArgumentError: if the tracker forgets what was read (``delete_on_read=True``).
        """
        self._log.rewind(self._log.resolve(consumer))

    def compact(self) -> None:
        """Drop what every consumer has committed and merge what no cursor tells apart."""
        self._log.compact()

    trigger_compaction = compact  # the seed interface's name
