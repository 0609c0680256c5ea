"""Typed errors: what went wrong, with the offender as an attribute, and the next step.

Every error of the library derives from :class:`DeltaTrackerError`. An error that is raised has changed nothing:
no cursor moved, no row was applied, no entry was committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def _listed(names: Iterable[object]) -> str:
    """``names`` as readable text, ``none`` when there are none."""
    return ", ".join(repr(name) for name in names) or "none"


class DeltaTrackerError(Exception):
    """Base of all errors of the library.

    Args:
        problem: what went wrong, naming the offender.
        remedy: the next step for the one who reads it.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}. {remedy}.")
        self.problem = problem
        self.remedy = remedy


def is_panic(error: BaseException) -> bool:
    """Return whether Rust code of an extension panicked.

    Each extension has a class of its own, which derives from ``BaseException`` and cannot be imported.
    """
    return type(error).__name__ == "PanicException"


class InvalidArgumentError(DeltaTrackerError, ValueError):
    """An argument has a value that the call cannot serve; ``argument`` and ``value`` hold it."""

    def __init__(self, argument: str, value: object, remedy: str) -> None:
        super().__init__(f"{argument}={value!r} cannot be used", remedy)
        self.argument = argument
        self.value = value


class MissingExtraError(DeltaTrackerError, ImportError):
    """A package that this feature needs is not installed; ``package`` and ``extra`` name it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"the package {package!r} is not installed", f"Install it with: pip install 'delta_tracker[{extra}]'"
        )
        self.package = package
        self.extra = extra


# Tracking


class NoShardedModuleError(DeltaTrackerError, ValueError):
    """The model has no sharded embedding module to track; ``found`` lists the embedding-like modules it has."""

    def __init__(self, found: Iterable[str]) -> None:
        self.found = tuple(found)
        super().__init__(
            f"the model has no sharded EmbeddingCollection to track; embedding modules found: {_listed(self.found)}",
            "Wrap the model in torchrec's DistributedModelParallel (or shard it) before tracking it",
        )


class UnsupportedTableError(DeltaTrackerError, ValueError):
    """A table is sharded or computed in a way that the tracker cannot follow; ``table`` and ``reason`` say which."""

    def __init__(self, table: str, reason: str) -> None:
        super().__init__(
            f"table {table!r} cannot be tracked: {reason}",
            "Change its sharding plan, or name it in fqns_to_skip to train it untracked",
        )
        self.table = table
        self.reason = reason


class UnsupportedModuleError(DeltaTrackerError, ValueError):
    """Sharded modules or tensors of the model cannot be followed; ``modules`` maps their FQNs to what they are."""

    def __init__(self, modules: Mapping[str, str], remedy: str) -> None:
        self.modules = dict(modules)
        listed = ", ".join(f"{fqn!r} ({what})" for fqn, what in self.modules.items())
        super().__init__(f"the model has sharded parts that cannot be tracked: {listed}", remedy)


class UnsupportedOptimizerError(DeltaTrackerError, ValueError):
    """A fused optimizer writes rows that no backward pass names; ``optimizer`` and ``tables`` say which."""

    def __init__(self, optimizer: str, tables: Iterable[str]) -> None:
        self.optimizer = optimizer
        self.tables = tuple(tables)
        super().__init__(
            f"optimizer {optimizer} is not known to write only rows that a backward pass looked up; "
            f"its tables: {_listed(self.tables)}",
            "Train them with another fused optimizer, or name them in fqns_to_skip to train them untracked",
        )


class UnknownConsumerError(DeltaTrackerError, LookupError):
    """A consumer that the tracker does not have; ``known`` lists those it has."""

    def __init__(self, consumer: str | None, known: Iterable[str]) -> None:
        self.consumer = consumer
        self.known = tuple(known)
        problem = (
            "no consumer was named and the tracker has several"
            if consumer is None
            else f"the tracker has no consumer {consumer!r}"
        )
        super().__init__(f"{problem}; known consumers: {_listed(self.known)}", "Pass one of the known names")


class ReservedConsumerError(DeltaTrackerError, RuntimeError):
    """A consumer belongs to a publisher: whoever else reads or moves it would take rows out of its stream."""

    def __init__(self, consumer: str, owner: str) -> None:
        super().__init__(
            f"consumer {consumer!r} is reserved by {owner}",
            "Read as a consumer of your own: pass it in consumers=[...], or add it with tracker.add_consumer(name)",
        )
        self.consumer = consumer
        self.owner = owner


class NeedsSnapshotError(DeltaTrackerError, RuntimeError):
    """A consumer fell so far behind that its changes were given up to bound memory."""

    def __init__(self, consumer: str, max_bytes: int | None) -> None:
        bound = "a former run's bound" if max_bytes is None else f"max_bytes={max_bytes}"
        super().__init__(
            f"consumer {consumer!r} fell behind: its pending rows passed {bound} and were given up",
            "Call clear(consumer), then give it every row (read_rows), then read deltas again; or raise max_bytes",
        )
        self.consumer = consumer
        self.max_bytes = max_bytes


class StaleDeltaError(DeltaTrackerError, RuntimeError):
    """A delta that is no longer its consumer's open read: committed, aborted, or replaced by a newer read."""

    def __init__(self, consumer: str) -> None:
        super().__init__(
            f"this delta is not the open read of consumer {consumer!r} any more",
            "Its rows are not lost: call get_delta(commit=False) again and commit the new delta",
        )
        self.consumer = consumer


class DetachedError(DeltaTrackerError, RuntimeError):
    """The tracker was detached from its model and records nothing any more."""

    def __init__(self) -> None:
        super().__init__("the tracker is detached from its model", "Build a new ModelDeltaTracker")


# Checkpoints


class CheckpointError(DeltaTrackerError, ValueError):
    """Base of what keeps a saved tracker state from being loaded; nothing was changed."""


class UnknownFormatError(CheckpointError):
    """A saved state has a format version that this release does not read; ``found`` and ``known`` hold both."""

    def __init__(self, found: object, known: int) -> None:
        super().__init__(
            f"the saved tracker state has format version {found!r}, this release reads {known}",
            "Load it with the release of delta_tracker that wrote it",
        )
        self.found = found
        self.known = known


class StateMismatchError(CheckpointError):
    """A saved state is of something else than what it is loaded into; ``what`` differs, ``saved`` and ``found`` how."""

    def __init__(self, what: str, saved: object, found: object) -> None:
        super().__init__(
            f"the saved tracker state has {what} {saved}, where {found} is expected",
            "Load it into a tracker built as the one that saved it, or load {} to count everything as changed",
        )
        self.what = what
        self.saved = saved
        self.found = found


class PartialStateError(CheckpointError):
    """Parts of a saved state are missing; ``ranks`` lists whose."""

    def __init__(self, reason: str, ranks: Iterable[int]) -> None:
        self.reason = reason
        self.ranks = tuple(ranks)
        super().__init__(
            f"the saved tracker state is not whole: {reason}; parts missing of ranks: {_listed(self.ranks)}",
            "Load the parts of all ranks that saved it, or load {} to count everything as changed",
        )


class MalformedStateError(CheckpointError):
    """A saved state does not follow the format; ``part`` and ``reason`` say where."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(
            f"part {part!r} of the saved tracker state is malformed: {reason}",
            "Load an older checkpoint, or load {} to count everything as changed",
        )
        self.part = part
        self.reason = reason


# Stream


class StreamError(DeltaTrackerError):
    """Base of the errors of a stream: storage, log, parts, publisher and predictor."""


class StorageError(StreamError, OSError):
    """The store at ``url`` cannot be reached, read or written."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"the store {url} cannot be used: {reason}",
            "Check the url, its permissions and free space, then try again; nothing was lost",
        )
        self.url = url
        self.reason = reason


class NameConflictError(StorageError):
    """The store at ``url`` refuses to create ``name`` because it exists, and does not show it; nothing was created."""

    def __init__(self, url: str, name: str, attempts: int) -> None:
        super().__init__(url, f"it refused {attempts} times to create {name} as if it existed, and does not show it")
        self.name = name
        self.attempts = attempts


class UnsafeStoreError(StreamError, RuntimeError):
    """The store at ``url`` lets a second writer replace an object that it was to create: nothing would fence it."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"the store {url} does not create an object only if it is absent",
            "Use a store that honours If-None-Match: S3, GCS, Azure, a local directory, SeaweedFS, MinIO",
        )
        self.url = url


class FencedError(StreamError, RuntimeError):
    """A newer generation owns the stream; this publisher published nothing and never can again."""

    def __init__(self, generation: int, owner: int, version: int) -> None:
        super().__init__(
            f"publisher of generation {generation} is fenced: generation {owner} holds version {version}",
            "Stop this trainer, or build a new Publisher to take the stream over",
        )
        self.generation = generation
        self.owner = owner
        self.version = version


class PublishError(StreamError, RuntimeError):
    """A version was not published because a rank failed; all rows stay pending. ``rank`` and ``reason`` say which."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(
            f"the version was not published: rank {rank} failed with {reason}",
            "Mend the cause there and publish again; no row was lost",
        )
        self.rank = rank
        self.reason = reason


class RankLostError(StreamError, RuntimeError):
    """Another rank died or did not answer in time, so that nobody knows what it did; all rows stay pending."""

    def __init__(self, reason: str, remedy: str = "Restart the job: a new Publisher takes the stream over") -> None:
        super().__init__(f"a rank was lost: {reason}", remedy)
        self.reason = reason


class MalformedError(StreamError, ValueError):
    """A manifest or part does not follow the format; ``path`` and ``reason`` say where."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"{path} is malformed: {reason}",
            "Find out who else writes to this stream; if it is an entry of the log, start a new stream at another url",
        )
        self.path = path
        self.reason = reason


class CorruptPartError(StreamError, ValueError):
    """A part is missing, truncated or differs from what its manifest says; nothing of its version was applied."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"part {path} is corrupt: {reason}", "Publish a new snapshot: predictors go on from there by themselves"
        )
        self.path = path
        self.reason = reason


class MissingVersionError(StreamError, LookupError):
    """A version in the middle of the log is gone; nothing beyond it was applied. ``head`` is the newest version."""

    def __init__(self, version: int, head: int) -> None:
        super().__init__(
            f"version {version} is missing while the stream goes on to version {head}",
            "Publish a new snapshot: predictors go on from there by themselves",
        )
        self.version = version
        self.head = head


class StreamReplacedError(StreamError, RuntimeError):
    """What stands at ``url`` is not the stream of which version ``version`` was applied."""

    def __init__(self, url: str, version: int) -> None:
        super().__init__(
            f"the stream {url} is not the one of which version {version} was applied",
            "Publish a snapshot to the stream that is there now: predictors go on from it by themselves",
        )
        self.url = url
        self.version = version


class NoSnapshotError(StreamError, LookupError):
    """The stream at ``url`` has no snapshot to start from, or none at or below ``version``."""

    def __init__(self, url: str, version: int | None = None) -> None:
        if version is None:
            problem = f"the stream {url} has no snapshot yet"
            remedy = "Call Publisher.snapshot() on the trainer, then sync() again; or check the url"
        else:
            problem = f"version {version} of {url} lies before the first snapshot: it has no rows"
            remedy = "Name the first snapshot's version, most often 1, or a later one"
        super().__init__(problem, remedy)
        self.url = url
        self.version = version


class ForkedError(StreamError, RuntimeError):
    """This process was forked while `Predictor.follow` ran in its parent: nothing applies versions here."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"this process was forked while follow() ran in its parent: {problem}", remedy)


class FollowEndedError(StreamError, RuntimeError):
    """The thread of `Predictor.follow` ended without `stop()`; the exception that ended it is the cause."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"the thread of follow() ended: {type(cause).__name__}: {cause}", "Call follow() again")
        self.__cause__ = cause


class PanicError(StreamError, RuntimeError):
    """Rust code that a predictor called, such as a ``RowTarget``'s, panicked; the panic is the cause."""

    def __init__(self, panic: BaseException) -> None:
        super().__init__(
            f"Rust code panicked: {type(panic).__name__}: {panic}",
            "Report it to the authors of that package; follow() keeps trying",
        )
        self.__cause__ = panic


class TableMismatchError(StreamError, ValueError):
    """A table of the predictor's model differs from the stream's; nothing was applied."""

    def __init__(self, table: str, expected: str, found: str, known: Iterable[str] = ()) -> None:
        self.table = table
        self.expected = expected
        self.found = found
        self.known = tuple(known)
        names = f"; the model has: {_listed(self.known)}" if self.known else ""
        super().__init__(
            f"table {table!r} is {expected} in the stream but {found} in the predictor's model{names}",
            "Build the predictor's model with the trainer's tables, or map differing names: names={stream: model}",
        )


class PartialRowsError(StreamError, ValueError):
    """Rows came with a part of their columns for a table that takes whole rows only; nothing was applied.

    ``table``, ``num_rows``, the column ranges ``found`` and the one that was ``needed`` say which.
    """

    def __init__(self, table: str, num_rows: int, found: Iterable[tuple[int, int]], needed: tuple[int, int]) -> None:
        self.table = table
        self.num_rows = num_rows
        self.found = tuple(found)
        self.needed = needed
        super().__init__(
            f"{num_rows} rows of table {table!r} came with the columns {_listed(self.found)} only, "
            f"and the predictor's model quantises the columns {needed!r} together",
            "Wait for the next snapshot, which has whole rows; publish column-wise tables without top-k and with fused "
            "kernels, or do not shard this one by columns",
        )


class DenseMismatchError(StreamError, ValueError):
    """A dense tensor of the stream does not fit the predictor's model; nothing was applied."""

    def __init__(self, name: str, expected: object, found: str, known: Iterable[str] = ()) -> None:
        self.name = name
        self.expected = str(expected)
        self.found = found
        self.known = tuple(known)
        names = f"; the model has: {_listed(self.known)}" if self.known else ""
        super().__init__(
            f"dense tensor {name!r} is {expected} in the stream but {found} in the predictor's model{names}",
            "Build the model with the trainer's names and shapes, map names={stream: model}, or pass dense=False",
        )


class HeldVersionError(StreamError, RuntimeError):
    """A predictor's gate holds a version back; its tables stay as they were. ``version`` and ``reason`` say why."""

    def __init__(self, version: int, reason: str) -> None:
        super().__init__(
            f"version {version} is held back: {reason}",
            f"Look at the trainer; then call accept({version}), or rollback(...), or let it publish a good snapshot",
        )
        self.version = version
        self.reason = reason
