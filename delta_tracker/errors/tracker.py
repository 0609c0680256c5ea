"""Errors of trackers and of their saved states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from delta_tracker.errors.base import DeltaTrackerError, listed


class UnsupportedModelError(DeltaTrackerError, ValueError):
    """The model has tables or parts that cannot be tracked, read, published or compiled, or it has no table at all.

    ``parts`` maps their names to their types, optimizers or reasons. To train without them, pass their names as
    ``fqns_to_skip``.
    """

    def __init__(
        self, parts: Mapping[str, str], remedy: str, *, problem: str = "sharded parts that cannot be tracked"
    ) -> None:
        self.parts = dict(parts)
        listed = ", ".join(f"{fqn!r} ({what})" if what else repr(fqn) for fqn, what in self.parts.items())
        super().__init__(f"the model has {problem}: {listed or 'none'}", remedy)

    @classmethod
    def of_table(
        cls,
        table: str,
        reason: str,
        remedy: str = "Change its sharding plan, or name it in fqns_to_skip to train it untracked",
        *,
        problem: str = "cannot be tracked",
    ) -> UnsupportedModelError:
        """Return the error for one table."""
        error = cls({table: reason}, remedy)
        error.problem = f"table {table!r} {problem}: {reason.removesuffix('.')}"
        return error.advising(remedy)


class ReservedConsumerError(DeltaTrackerError, RuntimeError):
    """A consumer is reserved by ``owner``, for example by a publisher.

    If other code committed a read of a publisher's consumer, the publisher would not publish those rows.
    """

    def __init__(
        self,
        consumer: str,
        owner: str,
        remedy: str,
    ) -> None:
        super().__init__(f"consumer {consumer!r} is reserved by {owner}", remedy)
        self.consumer, self.owner = consumer, owner


LOAD_BEFORE = "Close the publisher, load or restore, and build a new Publisher afterwards"
"""Remedy of a :class:`ReservedConsumerError` of a call that replaces the pending rows of all consumers."""


class NeedsSnapshotError(DeltaTrackerError, RuntimeError):
    """A consumer needs a snapshot, because its pending rows exceeded ``max_bytes`` and were dropped.

    If the tracker has no limit, ``max_bytes`` is None. In this case, an earlier run dropped the rows before it
    saved the checkpoint that was loaded.
    """

    def __init__(self, consumer: str, max_bytes: int | None) -> None:
        bound = "max_bytes of an earlier run" if max_bytes is None else f"max_bytes={max_bytes}"
        super().__init__(
            f"consumer {consumer!r} needs a snapshot: its pending rows exceeded {bound} and were dropped",
            "Call clear(consumer), copy every row (read_rows), then read deltas again; or increase max_bytes",
        )
        self.consumer, self.max_bytes = consumer, max_bytes


class StaleDeltaError(DeltaTrackerError, RuntimeError):
    """A delta is no longer the uncommitted read of its consumer.

    The delta was committed or aborted, or the consumer has made a newer read.
    """

    def __init__(self, consumer: str) -> None:
        super().__init__(
            f"this delta is no longer the uncommitted read of consumer {consumer!r}",
            "Call get_delta(commit=False) again and commit the new delta; no row was lost",
        )
        self.consumer = consumer


class DetachedError(DeltaTrackerError, RuntimeError):
    """The tracker was detached from its model and no longer records changes."""

    def __init__(self) -> None:
        super().__init__(
            "the tracker is detached from its model", "Call reattach(), after which every row counts as changed"
        )


class RankMismatchError(DeltaTrackerError, ValueError):
    """The ranks have built different trackers or loaded different states, or a rank failed to.

    ``what`` names the property that differs. ``values`` maps the numbers of some ranks to the value there.
    """

    def __init__(self, what: str, values: Mapping[int, object]) -> None:
        self.what = what
        self.values = dict(values)
        listed = ", ".join(f"rank {rank}: {value}" for rank, value in self.values.items())
        super().__init__(
            f"the {what} differs between ranks: {listed}",
            "Build the same tracker and load the same checkpoint on every rank",
        )


_OR_NOTHING = "A tracker can also load {}, which marks every row as changed"


class CheckpointError(DeltaTrackerError, ValueError):
    """A saved state is malformed or incomplete, or does not fit. What it would replace is unchanged.

    ``reason`` says why. ``part`` is the name of the malformed part, or None if no part is malformed. ``ranks`` are the
    ranks whose parts are missing, as far as they are known.
    """

    def __init__(self, part: str | None, reason: str, ranks: Iterable[int] = ()) -> None:
        self.part, self.reason, self.ranks = part, reason, tuple(ranks)
        if part is None:
            missing = f"; missing parts of ranks: {listed(self.ranks)}" if self.ranks else ""
            problem = f"the saved state is incomplete: {reason}{missing}"
            remedy = "Load the parts of all ranks that saved it"
        else:
            problem = f"part {part!r} of the saved state is malformed: {reason}"
            remedy = "Load an older checkpoint"
        super().__init__(problem, f"{remedy}. {_OR_NOTHING}")


class StateMismatchError(CheckpointError):
    """A saved state does not fit the object that loads it, or the parts saved by different ranks contradict each other.

    ``what`` names the property that differs. ``saved`` is its value in the saved state, ``found`` the expected value.
    """

    def __init__(
        self,
        what: str,
        saved: object,
        found: object,
        remedy: str = f"Load it into an object with the same arguments. {_OR_NOTHING}",
    ) -> None:
        super().__init__(None, f"its {what} is {saved}")
        self.problem = f"the saved state has {what} {saved}, where {found} is expected"
        self.what, self.saved, self.found = what, saved, found
        self.advising(remedy)
