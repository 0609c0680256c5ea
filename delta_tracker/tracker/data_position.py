"""Position in the training data of the last batch that was trained on: :class:`DataPosition`."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from delta_tracker.arguments import check_count
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.live_objects import Uncopied
from delta_tracker.stream.format.state_tree import pack, unpack

T = TypeVar("T")
_Batch_co = TypeVar("_Batch_co", covariant=True)
_MAX_TIME = 2**53
_FIELDS = {"batches", "event_time", "loader"}


class StatefulLoader(Protocol[_Batch_co]):
    """Data loader whose position can be saved and restored, such as torchdata's ``StatefulDataLoader``."""

    def __iter__(self) -> Iterator[_Batch_co]:
        """Return an iterator that starts at the restored position, or at the first batch if none was restored."""

    def state_dict(self) -> object:
        """Return the position after the last batch that the iterator returned."""

    def load_state_dict(self, state: object) -> object:
        """Restore a position. The next iterator starts at this position."""


class DataPosition(Uncopied, Generic[T], remedy="Save or copy its state_dict()"):
    """Data loader wrapper whose ``state_dict()`` is the position after the last batch that was trained on.

    A pipeline fetches batches before it trains on them, so the state of the loader is ahead of training. This class
    saves the state of the loader with each batch. :meth:`ModelDeltaTracker.step` moves the position to the next batch.

    Iterate over this object instead of the loader, pass it to :meth:`ModelDeltaTracker.attach_data`, and call
    ``tracker.step()`` exactly once for each batch, in the order of the batches::

        data = DataPosition(loader)
        tracker.attach_data(data)
        for batch in data:
            train(batch)
            tracker.step()

    :mod:`delta_tracker.stream.format.state_tree` encodes the state of the loader for each batch. If the loader has
    workers, its state must include the states of the workers, as in ``StatefulDataLoader``. Tested on the CPU with
    torch's ``DataLoader`` with 2 workers, and with TorchRec's ``TrainPipelineBase``, ``TrainPipelineSparseDistLite``
    and ``TrainPipelineSparseDist``.

    To detect every missing ``tracker.step()``, set ``max_ahead`` to the number of batches the pipeline fetches ahead.

    To train several epochs, iterate again. At the end of an epoch, the position is after the last batch. If this
    position is restored, the loader must not return more batches of that epoch.

    Args:
        loader: data loader. If it has a method ``load_rank_states(states)``, its position can be restored with a
            different number of ranks, see :meth:`load_rank_states`.
        event_time: function that returns the time of a batch in seconds, at least 0 and less than 2**53. The function
            runs in the thread that fetches the batch. If None, no times are recorded.
        max_ahead: maximum number of batches that may be fetched but not yet trained on. See :meth:`check`.

    Raises:
        InvalidArgumentError: if an argument is invalid, or if the state of the loader cannot be encoded.

    Example:
        >>> class Batches:
        ...     position = 0
        ...
        ...     def __iter__(self):
        ...         while self.position < 3:
        ...             self.position += 1
        ...             yield self.position
        ...
        ...     def state_dict(self):
        ...         return {"position": self.position}
        ...
        ...     def load_state_dict(self, state):
        ...         self.position = state["position"]
        >>> position = DataPosition(Batches())  # call tracker.attach_data(position), and iterate over it
        >>> list(position)
        [1, 2, 3]
    """

    def __init__(
        self, loader: StatefulLoader[T], *, event_time: Callable[[T], float] | None = None, max_ahead: int = 8
    ) -> None:
        if not all(callable(getattr(loader, name, None)) for name in ("__iter__", "state_dict", "load_state_dict")):
            remedy = "Pass an iterable with state_dict and load_state_dict, such as torchdata's StatefulDataLoader"
            raise InvalidArgumentError("loader", type(loader), remedy)
        check_count("max_ahead", max_ahead, least=0)
        self._loader = loader
        self._time_of = event_time
        self._max_ahead = max_ahead
        self._lock = threading.Lock()  # some pipelines fetch batches in another thread
        self._generation = 0  # number of iterators and loads
        self._drawn: deque[tuple[bytes, float | None]] = deque()  # state and time of each batch that is not trained
        self._num_missing = 0
        self._num_batches = 0
        self._is_attached = False
        self._event_time: float | None = None
        self._state = self._packed()

    @property
    def num_batches(self) -> int:
        """Number of batches that were trained on, including batches before a restored position."""
        return self._num_batches

    @property
    def num_ahead(self) -> int:
        """Number of batches that were fetched but not yet trained on."""
        return len(self._drawn)

    @property
    def event_time(self) -> float | None:
        """Time in seconds of the last batch trained on. None before the first batch, or if times are not recorded."""
        return self._event_time

    @property
    def has_rank_states(self) -> bool:
        """True if :meth:`load_rank_states` can be used: the loader has a method of this name."""
        return callable(getattr(self._loader, "load_rank_states", None))

    def __iter__(self) -> Iterator[T]:
        """Yield the batches of the loader.

        Raises:
            InvalidArgumentError: raised during the iteration if a newer iterator exists, if the position was restored
                after the first batch, or if the time of a batch is invalid. It is also raised at the first batch if
                earlier batches were fetched but not trained on.
        """
        with self._lock:
            if self._drawn:
                remedy = (
                    "Train all fetched batches before the first batch of a new iterator, with one tracker.step() for "
                    "each. To drop them, call load_state_dict(state_dict())"
                )
                if not self._is_attached:
                    remedy = (
                        "Call tracker.attach_data(data) before the first batch: no tracker moves this position. If you "
                        "fetched batches only to look at them, then call data.load_state_dict(data.state_dict())"
                    )
                raise InvalidArgumentError("batches ahead", len(self._drawn), remedy)
            self._generation += 1
            mine = self._generation
        batches = iter(self._loader)
        while True:
            self._check_current(mine)  # before the loader moves
            try:
                batch = next(batches)
            except StopIteration:
                return
            state, time = self._packed(), self._time(batch)
            with self._lock:
                self._check_current(mine)
                self._drawn.append((state, time))
            yield batch

    def attached(self) -> None:
        """Record that a tracker advances this position. :meth:`ModelDeltaTracker.attach_data` calls this method."""
        self._is_attached = True

    def advance(self) -> None:
        """Advance the position by one batch. If no fetched batch is left, the next :meth:`check` raises an error."""
        try:
            self._state, self._event_time = self._drawn.popleft()
        except IndexError:
            self._num_missing += 1
        else:
            self._num_batches += 1

    def check(self) -> None:
        """Check that training called ``tracker.step()`` once for each batch. A publisher calls this method.

        Raises InvalidArgumentError if more than ``max_ahead`` batches were fetched but not trained on, or if there were
        more calls of ``tracker.step()`` than fetched batches.
        """
        if self._num_missing:
            remedy = (
                "Iterate over the DataPosition instead of its loader, and call tracker.step() once for each batch. The "
                "position is unknown until load_state_dict() is called"
            )
            raise InvalidArgumentError("steps without a batch", self._num_missing, remedy)
        if self.num_ahead > self._max_ahead:
            remedy = (
                f"Call tracker.step() once for each batch, also for each batch of an accumulated gradient, or pass a "
                f"DataPosition a larger max_ahead than {self._max_ahead} if the pipeline fetches so many batches"
            )
            raise InvalidArgumentError("batches ahead", self.num_ahead, remedy)

    def state_dict(self) -> dict[str, object]:
        """Return the position as a dict with ``batches``, ``event_time`` and ``loader`` (the loader's state)."""
        return {"batches": self._num_batches, "event_time": self._event_time, "loader": unpack(self._state)}

    def load_state_dict(self, state: object) -> None:
        """Restore a position that :meth:`state_dict` returned.

        After the call, create new iterators and pipelines: an iterator that has returned a batch raises an error at its
        next batch. Raises InvalidArgumentError if ``state`` is not a position. Errors of the loader are propagated. If
        the call raises an error, the position does not change.
        """
        num_batches, time, loader = _fields(state)
        packed = pack(loader, "data['loader']")
        self._loader.load_state_dict(unpack(packed))
        self._restored(packed, num_batches, time)

    def load_rank_states(self, states: Sequence[object]) -> None:
        """Restore this rank's position from the positions of a job with a different number of ranks.

        Passes the loader states of all ranks to the loader's ``load_rank_states``. The loader must continue with this
        rank's share of the data. The number of batches is the maximum over the ranks, and the event time the minimum.
        Raises the same errors as :meth:`load_state_dict`, and InvalidArgumentError if the loader has no
        ``load_rank_states``.

        Args:
            states: results of :meth:`state_dict` on all ranks of the saved job, in rank order.
        """
        load = getattr(self._loader, "load_rank_states", None)
        if not callable(load):
            raise InvalidArgumentError("loader", type(self._loader), "Give it a method load_rank_states(states)")
        found = [_fields(state) for state in states]
        if not found:
            raise InvalidArgumentError("states", states, "Pass the states of all ranks")
        load([unpack(pack(loader, "data['loader']")) for _, _, loader in found])  # copies: a loader may keep them
        times = [time for _, time, _ in found if time is not None]
        self._restored(self._packed(), max(each for each, _, _ in found), min(times, default=None))

    def _restored(self, packed: bytes, num_batches: int, time: float | None) -> None:
        with self._lock:
            self._generation += 1
            self._drawn.clear()
            self._num_missing = 0
            self._state, self._num_batches, self._event_time = packed, num_batches, time

    def _check_current(self, generation: int) -> None:
        if generation != self._generation:
            remedy = "Call iter() again, and create a new pipeline, after load_state_dict() or a newer iter()"
            raise InvalidArgumentError("iterator of a DataPosition", "replaced", remedy)

    def _packed(self) -> bytes:
        return pack(self._loader.state_dict(), "loader.state_dict()")  # encoded at once: it may be a live object

    def _time(self, batch: T) -> float | None:
        return None if self._time_of is None else _checked_time("event_time", self._time_of(batch))


def _fields(state: object) -> tuple[int, float | None, object]:
    if not isinstance(state, dict) or state.keys() != _FIELDS:
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state)
        raise InvalidArgumentError("data", found, f"Pass what state_dict() returned, with {sorted(_FIELDS)}")
    num_batches, time = state["batches"], state["event_time"]
    if type(num_batches) is not int or num_batches < 0:
        raise InvalidArgumentError("data['batches']", num_batches, "Pass what state_dict() returned")
    return num_batches, None if time is None else _checked_time("data['event_time']", time), state["loader"]


def _checked_time(name: str, value: object) -> float:
    try:
        time = float(value)  # type: ignore[arg-type]  # also scalars of numpy and torch
    except (TypeError, ValueError):
        time = math.nan
    if not 0 <= time < _MAX_TIME:
        raise InvalidArgumentError(name, value, "Return seconds, at least 0 and less than 2**53")
    return time
