"""ConsumerHandle: a consumer that one holder has reserved, as a publisher does with its own."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from torch import Tensor

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.checkpoint.tracker_checkpoint import TrackerCheckpoint
from delta_tracker.tracker.delta_reader import DeltaReader
from delta_tracker.tracker.top_k import AllRanks, TopK
from delta_tracker.tracker.tracked_model import TrackedModel
from delta_tracker.types import Delta


class ConsumerHandle:
    """The right to read and move one consumer of a tracker, which the tracker refuses to everyone else.

    Get one from :meth:`~delta_tracker.tracker.tracker.ModelDeltaTracker.reserve`. Use it from the training thread, and
    call :meth:`release` at the end, or use it in a ``with`` statement. After that every other method raises
    :class:`~delta_tracker.errors.InvalidArgumentError`.

    Args:
        name: the consumer, which the log has reserved already.
        holder: who has reserved it, as errors name it.
        log: the tracker's log.
        model: the tracked model.
        reader: reads its deltas.
        checkpoint: saves its note.
        is_transient: :meth:`release` removes the consumer.
    """

    def __init__(
        self,
        name: str,
        holder: str,
        *,
        log: ChangeLog,
        model: TrackedModel,
        reader: DeltaReader,
        checkpoint: TrackerCheckpoint,
        is_transient: bool = False,
    ) -> None:
        self._name = name
        self._holder = holder
        self._log = log
        self._model = model
        self._reader = reader
        self._checkpoint = checkpoint
        self._is_transient = is_transient
        self._is_released = False

    @property
    def name(self) -> str:
        """The consumer's name."""
        return self._name

    # Reading

    def read(
        self,
        *,
        commit: bool = True,
        with_states: bool = True,
        with_values: bool = False,
        with_optimizer: bool = False,
        top_k: TopK | None = None,
        ranks: AllRanks | None = None,
    ) -> Delta:
        """Read the rows that changed since the consumer's last committed read.

        Arguments, result and errors are those of
        :meth:`~delta_tracker.tracker.tracker.ModelDeltaTracker.get_delta`, and ``ranks`` are those that share the
        budget of ``top_k``: None for a group of all ranks, which the first read with ``top_k`` joins.
        """
        return self._reader.read(
            self._held(),
            commit=commit,
            with_states=with_states,
            with_values=with_values,
            with_optimizer=with_optimizer,
            top_k=top_k,
            ranks=ranks,
        )

    def commit(self, delta: Delta) -> None:
        """Move the consumer's cursor past its uncommitted read.

        Raises:
            StaleDeltaError: if ``delta`` is not the consumer's uncommitted read any more.
            InvalidArgumentError: if it is another consumer's.
        """
        self._check_own(delta)
        self._log.commit(delta)

    def abort(self, delta: Delta) -> None:
        """Forget the consumer's uncommitted read; its rows stay pending.

        Raises: as :meth:`commit`.
        """
        self._check_own(delta)
        self._log.abort(delta)

    def clear(self) -> None:
        """Forget what is pending for the consumer, also if it was given up."""
        self._log.clear(self._held())

    def distrust(self, fqn: str, ids: Tensor) -> None:
        """Make rows pending for the consumer, old values unknown, whatever was pending of them. Aborts its open read.

        Call it when the consumer's copy of the rows is not what it last received.

        Args:
            fqn: the table.
            ids: ``[N]`` integer local ids, in any order, duplicates allowed.

        Raises:
            InvalidArgumentError: for a table that is not tracked, or ids outside the shard.
        """
        name = self._held()
        self._model.shard(fqn).spec.check_ids(ids)
        self._log.distrust(name, fqn, ids.long())

    @property
    def needs_snapshot(self) -> bool:
        """Whether the consumer was given up to bound memory, so that only all rows bring it up to date."""
        return self._log.is_behind(self._held())

    # The choice of rows

    def check_top_k(self, top_k: TopK | None) -> None:
        """Refuse a choice of rows that no read could make.

        Raises:
            InvalidArgumentError: for what is no ``TopK``, or one without a score in a mode that has none.
        """
        self._held()
        self._reader.check(top_k, with_optimizer=False)

    # Copies of all rows

    def begin_copy(self) -> ConsumerHandle:
        """Reserve a second consumer, to which only rows that change from now on are pending.

        All rows can then be copied while training goes on: the copy and what the second consumer reads at the end hold
        the same as a copy made in one moment. No checkpoint holds it, and its :meth:`release` removes it.

        Raises:
            InvalidArgumentError: if a consumer has its name, which is this one's and ``" (snapshot)"``.
        """
        name = f"{self._held()} (snapshot)"
        copy = ConsumerHandle(
            name,
            self._holder,
            log=self._log,
            model=self._model,
            reader=self._reader,
            checkpoint=self._checkpoint,
            is_transient=True,
        )
        try:
            self._log.add(name, holder=self._holder)
        except InvalidArgumentError:
            raise
        except BaseException:  # no handle could remove the consumer later
            if name in self._log.consumers:
                self._log.remove(name)
            raise
        return copy

    # Checkpoints

    @property
    def note(self) -> object:
        """What :meth:`annotate` noted, here or in the state that was loaded last; None if nothing was."""
        return self._checkpoint.annotations.get(self._held())

    def annotate(self, note: object) -> None:
        """Save a note with the tracker's state. Of notes that differ between ranks, that of rank 0 is loaded.

        Args:
            note: anything that JSON can hold; it replaces the former note.

        Raises:
            InvalidArgumentError: for what JSON cannot hold.
        """
        self._checkpoint.annotate(self._held(), note)

    @property
    def is_as_restored(self) -> bool:
        """Whether the consumer has not moved since the last load of a state."""
        return self._checkpoint.is_as_restored(self._held())

    def release(self) -> None:
        """Let everyone read the consumer again. Calling it again does nothing."""
        if self._is_released:
            return
        self._is_released = True
        if self._is_transient:
            self._log.remove(self._name)
        else:
            self._log.release(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _held(self) -> str:
        """The consumer's name, while it is reserved for this handle."""
        if self._is_released:
            raise InvalidArgumentError("consumer", self._name, "This handle was released: reserve the consumer again")
        return self._name

    def _check_own(self, delta: Delta) -> None:
        if delta.consumer != self._held():
            raise InvalidArgumentError("delta", delta, f"Pass a delta that this handle of {self._name!r} has read")
