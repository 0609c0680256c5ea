"""Handle that gives one owner, for example a publisher, exclusive access to a consumer."""

import gc
import time
import weakref
from typing import NamedTuple, Self, Unpack

from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, UnfinishedStepError
from delta_tracker.live_objects import Uncopied
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.cursors import Consumer
from delta_tracker.tracker.delta_reader import DeltaReader, ReadOptions
from delta_tracker.tracker.hooks import TrackerHooks
from delta_tracker.tracker.top_k import AllRanks, TopK
from delta_tracker.tracker.tracked_model import TrackedModel
from delta_tracker.types import Delta

_POLL_SECONDS = 0.001


class TrackerParts(NamedTuple):
    """Parts of a tracker that a :class:`ConsumerHandle` uses."""

    log: ChangeLog
    model: TrackedModel
    reader: DeltaReader
    hooks: TrackerHooks
    tracker: object  # exists as long as the handle, so that it continues to record changes


class ConsumerHandle(Uncopied, remedy="Save or copy the tracker's state_dict(), which has the consumer"):
    """Handle with exclusive access to one consumer of a tracker.

    Returned by :meth:`~delta_tracker.tracker.tracker.ModelDeltaTracker.reserve`. Use it from the training thread. Until
    the handle is released, the tracker's methods that read, clear, rewind or remove the consumer raise
    :class:`~delta_tracker.errors.ReservedConsumerError`.

    Call :meth:`release` at the end, or use the handle in a ``with`` statement. After the release, all other methods
    raise :class:`~delta_tracker.errors.InvalidArgumentError`. If the handle is deleted without a release, the next
    operation of the tracker ends the reservation and discards the consumer's uncommitted read and note. If
    :meth:`begin_copy` added the consumer, this operation also removes the consumer.

    Args:
        name: name of the consumer. The caller must have reserved the consumer in the log.
        holder: description of the owner, for error messages.
        parts: parts of the consumer's tracker.
        is_transient: True to remove the consumer from the tracker when the handle is released.

    Attributes:
        name: the consumer's name.
        is_released: True after :meth:`release`.
    """

    def __init__(self, name: str, holder: str, parts: TrackerParts, *, is_transient: bool = False) -> None:
        self.name = name
        self._holder = holder
        self._parts = parts
        self._log, self._model, self._reader, self._hooks, _ = parts
        self._is_transient = is_transient
        self.is_released = False
        # Without the log: the finalizer would keep it, and the model, which may refer to this handle.
        self._deleted = weakref.finalize(self, self._log.consumers.abandoned.append, name)
        self._deleted.atexit = False

    @property
    def position(self) -> int:
        """Log position of the consumer's cursor."""
        return self._record.position

    # Reading

    def read(self, *, ranks: AllRanks | None = None, **options: Unpack[ReadOptions]) -> Delta:
        """Return the rows that changed since the consumer's last committed read.

        ``ranks`` is the group of ranks that share the budget of ``top_k``. If it is None, all ranks share the budget,
        and the first read with ``top_k`` creates a process group for them. For the other arguments, the result and the
        errors, see :meth:`~delta_tracker.tracker.tracker.ModelDeltaTracker.get_delta`.
        """
        held = self._held()
        self._hooks.check_read()
        return self._reader.read(held, lambda delta: delta, ranks=ranks, **options)

    def commit(self, delta: Delta) -> None:
        """Commit the read that returned ``delta``. This moves the consumer's cursor to the end of the read.

        Raises InvalidArgumentError for a delta of another consumer, StaleDeltaError after a commit, abort or new read.
        """
        self._check_own(delta)
        self._log.consumers.commit(self._log.consumers.uncommitted(delta))

    def abort(self, delta: Delta) -> None:
        """Discard the read that returned ``delta``. Its rows stay pending. Raises the same errors as :meth:`commit`."""
        self._check_own(delta)
        self._log.consumers.abort(self._log.consumers.uncommitted(delta))

    def clear(self) -> None:
        """Discard the consumer's pending rows. A dropped consumer then no longer needs a snapshot."""
        self._log.consumers.clear(self._held())

    def make_pending(self, fqn: str, ids: Tensor) -> None:
        """Make rows of the table ``fqn`` pending for the consumer again. Aborts the consumer's uncommitted read.

        Call this method if the consumer lost or changed its copy of these rows. With managed collisions, the copy must
        still contain the raw ids of the last read. The old states of the rows become unknown. ``ids`` are ``[N]``
        integer local ids in any order, and may repeat. Raises InvalidArgumentError if the table or an id is unknown.
        """
        name = self._held()
        self._model.shard(fqn).spec.check_ids(ids)
        self._log.consumers.make_pending(name, fqn, ids.long())

    @property
    def needs_snapshot(self) -> bool:
        """True if the consumer needs all rows because it was dropped when the log exceeded ``max_bytes``."""
        return self._record.was_dropped

    def others(self) -> dict[str, tuple[int, dict[str, Tensor]]]:
        """Return the cursor position and the carried rows of every other consumer, by consumer name.

        Carried rows are pending rows that the log does not contain after the cursor. They are returned as ``[N]`` int64
        local ids, by table FQN. Dropped consumers, and consumers that :meth:`begin_copy` added, are omitted.
        """
        own = self._held()
        with self._log.lock:
            others = [self._log.cursors.consumers[name] for name in self._log.consumers.names if name != own]
        return {
            each.name: (each.position, {fqn: rows.ids for fqn, rows in each.carried.items() if len(rows)})
            for each in others
            if not each.is_transient and not each.was_dropped
        }

    def note_of(self, name: str) -> object:
        """Return the note of the consumer ``name``, or None if no note was set at its cursor's current position."""
        self._held()
        found = self._log.consumers.find(name)
        return found.note if found.noted_at == found.position else None

    def wait_for_updates(self, seconds: float) -> None:
        """Wait up to ``seconds`` until no update of rows or optimizer states is in progress.

        An update begins with the lookup and ends when the backward pass has written the rows. Raises
        UnfinishedStepError if an update is still in progress after ``seconds``.
        """
        self._held()
        end = time.monotonic() + seconds
        while self._log.writes.num_writes() or self._hooks.lookups_in_flight():
            if time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
                continue
            gc.collect()  # an output in a reference cycle keeps its graph
            writes, lookups = self._log.writes.num_writes(), self._hooks.lookups_in_flight()
            if writes or lookups:
                what = "the write of the rows" if writes else "the step before the backward pass"
                raise UnfinishedStepError(
                    f"{what} of {writes or lookups} lookup(s) did not end within {seconds:g} s",
                    "Call publisher.step() as the last line of the training loop, after the optimizer step",
                )

    # Top-k

    def check_top_k(self, top_k: TopK | None) -> None:
        """Raise InvalidArgumentError if reads of the consumer do not support ``top_k``. None is always supported."""
        self._held()
        self._reader.check(top_k, with_optimizer=False)

    # Copies of all rows

    def begin_copy(self) -> "ConsumerHandle":
        """Add a second consumer that tracks changes while all rows are copied. Return its handle.

        Training can continue during the copy. After the copy, read the second consumer, and overwrite the copied rows
        with its delta. The result equals a copy of all rows at the time of this read.

        The second consumer is reserved for the same owner and is not saved in checkpoints. Its name is this consumer's
        name followed by ``" (snapshot)"``. Releasing its handle removes it from the tracker.

        Raises:
            InvalidArgumentError: if a consumer already has the name of the second consumer.
            DetachedError: if the tracker is detached.
            UnsupportedModelError: if a table can no longer be tracked, for example because its module was replaced.
        """
        self._model.check_attached()
        name = f"{self._held()} (snapshot)"
        copy = ConsumerHandle(name, self._holder, self._parts, is_transient=True)
        try:
            self._log.consumers.add(name, holder=self._holder)
        except InvalidArgumentError:
            copy._deleted.detach()  # the consumer belongs to another handle
            raise
        except BaseException:  # remove the consumer, because no handle is returned
            copy._deleted.detach()
            self._log.consumers.remove(name)
            raise
        return copy

    # Checkpoints

    @property
    def note(self) -> object:
        """Note of the consumer: a JSON value that was set by :meth:`annotate` or loaded with a state. None if unset."""
        return self._record.note

    def annotate(self, note: object) -> None:
        """Set the note of the consumer. The note is saved in the tracker's state.

        If the ranks set different notes, loading the state restores the note of the lowest rank. Raises
        InvalidArgumentError if ``note`` is not a JSON value.
        """
        self._log.consumers.annotate(self._held(), note)

    @property
    def is_as_restored(self) -> bool:
        """True if a state was loaded and the consumer's cursor has not moved since then."""
        return self._record.restored_at == self._record.position

    def release(self) -> None:
        """End the reservation. Removes the consumer if :meth:`begin_copy` added it. Further calls do nothing."""
        if self.is_released:
            return
        if self._is_transient:
            self._log.consumers.remove(self.name)
        else:
            self._log.consumers.release(self.name)
        self._deleted.detach()
        self.is_released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _held(self) -> str:
        """Return the consumer's name. Raise InvalidArgumentError if the handle was released."""
        if self.is_released:
            remedy = "Call reserve() of the tracker again: this handle was released"
            raise InvalidArgumentError("consumer", self.name, remedy)
        return self.name

    @property
    def _record(self) -> Consumer:
        return self._log.cursors.consumers[self._held()]

    def _check_own(self, delta: Delta) -> None:
        if delta.consumer != self._held():
            raise InvalidArgumentError("delta", delta, f"Pass a delta of consumer {self.name!r}")
