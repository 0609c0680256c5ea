"""Errors of predictors."""

from __future__ import annotations

from collections.abc import Iterable

from delta_tracker.errors.base import StreamError, listed


class ModelMismatchError(StreamError, ValueError):
    """A table or a dense tensor differs between the stream and the predictor's model; nothing was applied.

    ``kind`` is "table" or "dense tensor". ``expected`` describes ``name`` in the stream, and ``found`` in the model. If
    the model lacks it, ``known`` lists the names in the model.
    """

    def __init__(
        self, name: str, expected: object, found: str, known: Iterable[str] = (), *, kind: str = "table"
    ) -> None:
        self.kind, self.name = kind, name
        self.expected = str(expected)
        self.found = found
        self.known = tuple(known)
        names = f"; the model has: {listed(self.known)}" if self.known else ""
        super().__init__(
            f"{kind} {name!r} is {expected} in the stream but {found} in the predictor's model{names}",
            "Build the predictor's model with the trainer's names and sizes, or map differing names with "
            "ModelTarget(model, names={stream: model})"
            + (", or pass dense=False there" if kind == "dense tensor" else ""),
        )


class PartialRowsError(StreamError, ValueError):
    """A version has only part of a column range that the predictor must write as a whole. Nothing was applied.

    ``needed`` is this column range of ``table``. For ``num_rows`` rows, the version has only the columns ``found``.
    """

    def __init__(self, table: str, num_rows: int, found: Iterable[tuple[int, int]], needed: tuple[int, int]) -> None:
        self.table, self.num_rows = table, num_rows
        self.found = tuple(found)
        self.needed = needed
        super().__init__(
            f"{num_rows} rows of table {table!r} have the columns {listed(self.found)} only, "
            f"and the predictor must write the columns {needed!r} together",
            "Wait for the next snapshot, which has whole rows; publish column-wise tables without top-k and with fused "
            "kernels, or do not shard this one by columns",
        )


class HeldVersionError(StreamError, RuntimeError):
    """A predictor's gate rejected version ``version`` for ``reason``; the tables are unchanged."""

    def __init__(self, version: int, reason: str) -> None:
        super().__init__(
            f"version {version} is held back by the gate: {reason}",
            f"Check the trainer; then call accept({version}) or rollback(...), or publish a good snapshot",
        )
        self.version, self.reason = version, reason


class ForkedError(StreamError, RuntimeError):
    """This process was forked while ``Predictor.follow`` ran in its parent.

    Only the parent has the thread that applies versions. Rows that were being written at the time of the fork may be
    incomplete in this process.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"this process was forked while follow() ran in its parent: {problem}", remedy)


class WaitTimeoutError(StreamError, TimeoutError):
    """``Predictor.wait`` ended before the version was applied.

    ``wanted`` is the version, None for any; ``version`` is what the tables hold, None for nothing.
    """

    def __init__(
        self, url: str, wanted: int | None, version: int | None, seconds: float | None, error: Exception | None
    ) -> None:
        what = "any version" if wanted is None else f"version {wanted}"
        held = "no version" if version is None else f"version {version}"
        cause = "" if error is None else f"; the last attempt failed: {type(error).__name__}: {error}"
        super().__init__(
            f"the predictor of {url} has not applied {what} after {seconds} s and holds {held}{cause}",
            "Check the url and that the publisher publishes, or pass a longer timeout",
        )
        self.wanted, self.version = wanted, version


class FollowEndedError(StreamError, RuntimeError):
    """The thread of ``Predictor.follow`` ended because of an exception, which is ``__cause__``.

    A copy has the same cause. A pickled or deeply copied error has a copy of it, or None if pickle cannot copy it, such
    as an exception whose constructor takes other arguments. The message always names the type and text of the cause.
    """

    keeps_cause = True

    def __init__(self, cause: BaseException) -> None:
        problem = f"the thread of follow() ended: {type(cause).__name__}: {cause}"
        super().__init__(problem, "Call follow() again")
        self.__cause__ = cause
