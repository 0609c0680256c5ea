"""Exceptions of the library.

Every error derives from :class:`DeltaTrackerError`. Each message names the object that caused the error, and a remedy.
This object is also an attribute of the exception. Unless the docstring of the error states otherwise, a call that
raises an error changes no state: no cursor moves, no row is applied, and no version is committed.
"""

import copy
import math
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from itertools import islice
from types import ModuleType
from typing import Any, Literal, Self, TypeVar

_MAX_HELD = 10_000
_MAX_ITEMS = 10  # of a tensor that is shown
_MAX_DEPTH = 3  # of dicts and lists in which tensors are shown by their shape
_MAX_REPR = 500  # characters of a value in a message
_Error = TypeVar("_Error", bound=BaseException)
_Own = TypeVar("_Own", bound="DeltaTrackerError")

CONTINUE = "Publish a snapshot to the present stream: predictors continue from it"
LOAD_BEFORE = "Close the publisher, load or restore, and build a new Publisher afterwards"
"""Remedy of a :class:`ReservedConsumerError` if the call would replace the pending rows of all consumers."""
SINK_CLOSED = "the sink is closed", "Call open() first"
SINK_FORKED = "this process was forked", "Build a sink in this process"
NO_VERSION = "no version is complete yet", "Wait until the predictor of the row store has applied a version"
"""Reasons and remedies of a :class:`SinkError`."""
OR_NOTHING = "A tracker can also load {}, which marks every row as changed"


class DeltaTrackerError(Exception):
    """Base class of all errors. ``problem`` describes the error, and ``remedy`` describes how to resolve it."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem, self.remedy = problem.removesuffix("."), remedy  # the text of another error may be its end
        super().__init__(str(self))

    def with_remedy(self, remedy: str) -> Self:
        """Replace the default remedy with ``remedy``, for a cause that requires a specific one. Return the error."""
        self.remedy = remedy
        self.args = (str(self),)
        return self

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}."

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a function that rebuilds the error, and the function's arguments, for pickle and copy."""
        return _rebuilt, (type(self), self.args, vars(self))


class StreamError(DeltaTrackerError):
    """Base class of the errors raised by streams, storage, publishers and predictors."""


# Calls and the installation


class InvalidArgumentError(DeltaTrackerError, ValueError):
    """An argument is invalid, or a method cannot be called in the current state.

    ``argument`` is the name of the argument or method. ``value`` is the value of the argument, or the reason why the
    method cannot be called.
    """

    def __init__(self, argument: str, value: object, remedy: str) -> None:
        is_state = argument.endswith("()") and isinstance(value, str)
        text = " ".join(line.strip() for line in _shown(value).splitlines())
        shown = text if len(text) <= _MAX_REPR else f"{text[:_MAX_REPR]}..."
        problem = f"{argument} cannot be called: {value}" if is_state else f"{argument}={shown} cannot be used"
        super().__init__(problem, remedy)
        self.argument, self.value = argument, value


class UncopyableError(DeltaTrackerError, TypeError):
    """An object with hooks, locks or threads cannot be pickled or copied. ``kind`` is the class name of the object."""

    def __init__(self, kind: str, remedy: str) -> None:
        super().__init__(f"a {kind} cannot be pickled or copied, because it has hooks, locks or threads", remedy)
        self.kind = kind


class MissingExtraError(DeltaTrackerError, ImportError):
    """The required package ``package`` is not installed, or is incompatible with another installed package.

    ``extra`` is the extra of this library that installs ``package``; None if no extra is needed. ``other`` is the name
    and release of the other package; None if ``package`` is not installed. ``command`` is the shell command that
    installs a compatible release of ``package``.
    """

    def __init__(self, package: str, extra: str | None, *, other: str | None = None, command: str = "") -> None:
        self.package, self.extra, self.other = package, extra, other
        where = ""
        if extra is not None and not command:
            name = _distribution()
            where = "" if name else " in a checkout of delta_tracker"
            command = f"pip install '{name or '.'}[{extra}]'"
        self.command = command or f"pip install {package}"
        if other is None:
            super().__init__(f"the package {package!r} is not installed", f"Install it{where} with: {self.command}")
        else:
            problem = f"{package} was not built for {other} and cannot be loaded"
            super().__init__(problem, f"Install its match: {self.command}")


def import_optional(module: str, package: str, extra: str | None) -> ModuleType:
    """Import and return ``module``. If it does not exist, raise MissingExtraError for ``package`` and ``extra``."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(package, extra) from error


# Trackers and their saved states


class UnsupportedModelError(DeltaTrackerError, ValueError):
    """The model has no tables, or has parts that cannot be tracked, read, published or compiled.

    ``parts`` maps the name of each of these parts to its type, its optimizer or the reason. To leave the parts
    untracked, pass their names as ``fqns_to_skip``.
    """

    def __init__(
        self,
        parts: Mapping[str, str],
        remedy: str = "Change the sharding plan, or name them in fqns_to_skip to train them untracked",
        *,
        problem: str = "parts that cannot be tracked",
    ) -> None:
        self.parts = dict(parts)
        listed = ", ".join(f"{fqn!r} ({what})" if what else repr(fqn) for fqn, what in self.parts.items())
        super().__init__(f"the model has {problem}: {listed or 'none'}", remedy)


class UntrackedTrainingWarning(UserWarning):
    """Tracked tables are not updated, probably because a copy of the model is trained instead.

    ``tables`` are the FQNs of these tables. ``num_updates`` is the number of updates of other tensors of the same size.
    It is 0 if neither a table nor a tensor of this size was updated in 100 batches. Ignore the warning if the program
    updates the tracked model in another way, for example by copying an average of the trained weights to it.
    """

    def __init__(self, tables: Iterable[str], num_updates: int) -> None:
        self.tables, self.num_updates = tuple(tables), num_updates
        seen = f"other tensors of their size were updated, such as those of a copy of the model ({num_updates} so far)"
        super().__init__(
            f"tables {_listed(self.tables)} are tracked, but not trained: "
            f"{seen if num_updates else 'no batch has updated them'}. Build the tracker with the model that is trained "
            "and the optimizer with the parameters that this model has now"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the class and its arguments, for pickle and deepcopy."""
        return type(self), (self.tables, self.num_updates)


class ReservedConsumerError(DeltaTrackerError, RuntimeError):
    """The consumer is reserved for ``owner``, for example a publisher. Only the owner may read its changes."""

    def __init__(self, consumer: str, owner: str, remedy: str) -> None:
        super().__init__(f"consumer {consumer!r} is reserved by {owner}", remedy)
        self.consumer, self.owner = consumer, owner


class NeedsSnapshotError(DeltaTrackerError, RuntimeError):
    """The consumer needs a snapshot: its pending rows were dropped, because the log exceeded ``max_bytes``.

    ``max_bytes`` is None if an earlier run dropped the rows, and this run loaded the checkpoint of that run.
    """

    def __init__(self, consumer: str, max_bytes: int | None) -> None:
        bound = "max_bytes of an earlier run" if max_bytes is None else f"max_bytes={max_bytes}"
        super().__init__(
            f"consumer {consumer!r} needs a snapshot: its pending rows exceeded {bound} and were dropped",
            "Call clear(consumer), copy every row (read_rows), then read deltas again; or increase max_bytes",
        )
        self.consumer, self.max_bytes = consumer, max_bytes


class StaleDeltaError(DeltaTrackerError, RuntimeError):
    """The delta to commit or abort has already been committed, aborted or replaced by a newer read."""

    def __init__(self, consumer: str) -> None:
        remedy = "Call get_delta(commit=False) again and commit the new delta; no row was lost"
        super().__init__(f"this delta is no longer the uncommitted read of consumer {consumer!r}", remedy)
        self.consumer = consumer


class DetachedError(DeltaTrackerError, RuntimeError):
    """The tracker was detached from its model and no longer records changes."""

    def __init__(self) -> None:
        remedy = "Call reattach(), after which every row counts as changed"
        super().__init__("the tracker is detached from its model", remedy)


class CheckpointError(DeltaTrackerError, ValueError):
    """A saved state is malformed or incomplete, or does not fit the object that loads it. The object is unchanged.

    ``reason`` describes the problem. ``part`` is the name of the malformed part, or None if no part is malformed.
    ``ranks`` are the ranks whose parts are missing; empty if no part is missing or the ranks are unknown.
    """

    _remedy = "Load the parts of all ranks that saved it"

    def __init__(self, part: str | None, reason: str, ranks: Iterable[int] = ()) -> None:
        self.part, self.reason, self.ranks = part, reason, tuple(ranks)
        missing = f"; missing parts of ranks: {_listed(self.ranks)}" if self.ranks else ""
        what, remedy = "the saved state cannot be loaded", self._remedy
        if part is not None:
            what, remedy = f"part {part!r} of the saved state is malformed", "Load an older checkpoint"
        super().__init__(f"{what}: {reason}{missing}", f"{remedy}. {OR_NOTHING}")


class StateMismatchError(CheckpointError):
    """A saved state does not fit the object that loads it, or the parts saved by different ranks contradict each other.

    ``what`` is the property that differs. ``saved`` is its value in the state, and ``found`` is the expected value.
    """

    _remedy = "Load it into an object with the same arguments"

    def __init__(self, what: str, saved: object, found: object) -> None:
        super().__init__(None, f"it has {what} {saved}, where {found} is expected")
        self.what, self.saved, self.found = what, saved, found


# Calls of all ranks: versions, restores and takeovers

Action = Literal["publish", "restore", "agree"]


class RankFailedError(StreamError, RuntimeError):
    """A collective failed, because rank ``rank`` raised an error or made a different call; see ``reason``.

    After a failed publish, all rows stay pending. If ``is_unknown`` is True, the version may exist nevertheless, or may
    appear later. If it exists, the next version follows it. If a failed restore leaves the model partly written, the
    model's forward pass raises :class:`IncompleteModelError`. ``rank`` may be this rank.
    """

    def __init__(self, rank: int, reason: str, action: Action = "publish", *, is_unknown: bool = False) -> None:
        outcome, remedy = {
            "publish": ("the version was not published", "publish again; no row was lost"),
            "restore": ("the restore failed", "restore again on all ranks"),
            "agree": ("the ranks do not agree", "repeat the call on every rank"),
        }[action]
        if is_unknown:
            outcome = "whether the version was published is unknown"
        super().__init__(f"{outcome}: rank {rank} failed with {reason}", f"Fix the problem on that rank and {remedy}")
        self.rank, self.reason, self.action, self.is_unknown = rank, reason, action, is_unknown


class RankLostError(StreamError, RuntimeError):
    """A rank died, exceeded a timeout or was interrupted; see ``reason``. All rows stay pending."""

    _remedy = (
        "Check that every rank makes the same calls of the Publisher, and restart the job on all ranks; a new "
        "Publisher then claims the stream"
    )

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        super().__init__(f"a rank was lost: {reason}", remedy or self._remedy)
        self.reason = reason


class FencedError(StreamError, RuntimeError):
    """A newer publisher has claimed the stream. This publisher is fenced and can publish no more versions.

    ``generation`` is the generation of the fenced publisher, and ``owner`` is the generation of the newer publisher.
    ``version`` is the number of an entry that the newer publisher wrote.
    """

    def __init__(self, generation: int, owner: int, version: int) -> None:
        problem = f"publisher of generation {generation} is fenced: generation {owner} holds version {version}"
        super().__init__(problem, "Stop this trainer, or build a new Publisher to claim the stream again")
        self.generation, self.owner, self.version = generation, owner, version


class LivePublisherError(StreamError, RuntimeError):
    """The stream at ``url`` was not claimed, because its publisher may be alive.

    ``generation`` is the generation of that publisher, and ``version`` is its newest version. ``seconds`` is the time
    since its last version or heartbeat, or None if it committed ``version`` during the failed call.
    """

    def __init__(self, url: str, generation: int, version: int, seconds: float | None = None) -> None:
        sign = "committed during the call" if seconds is None else f"last sign {seconds:.1f} s ago"
        problem = f"{url} has a live publisher of generation {generation}: version {version}, {sign}"
        super().__init__(problem, "Stop that trainer, wait, or fence it with force=True or --force")
        self.url, self.generation, self.version, self.seconds = url, generation, version, seconds


class UnfinishedStepError(StreamError, RuntimeError):
    """No version was published, because a training step was incomplete. The rows stay pending.

    ``reason`` describes an update of rows that is in progress, or that was made after the last ``tracker.step()``. If a
    version contained this update, training resumed from the version would apply the update twice.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"the rows cannot be read consistently: {reason}", remedy)
        self.reason = reason


class RestoreMismatchError(StreamError, ValueError):
    """The saved training state does not fit this job, so nothing was restored.

    ``what`` is the property that differs. ``saved`` is its value in the version, and ``found`` its value in this job.
    """

    default = "Build the job like that of the version, or pass on_model_change='continue' to restore what both have"

    def __init__(self, what: str, saved: object, found: object, remedy: str = default) -> None:
        super().__init__(f"{what} is {saved} in the version but {found} in this job; nothing was restored", remedy)
        self.what, self.saved, self.found = what, str(saved), str(found)


class NotRecoverableError(StreamError, LookupError):
    """Version ``version`` of the stream at ``url`` lacks a complete training state, so nothing was restored.

    ``reason`` describes the missing state. If no version has been published to the stream, ``version`` is None on every
    rank. In this case, start the job without a restore.
    """

    def __init__(self, url: str, version: int | None, reason: str) -> None:
        if version is None:
            problem = f"{url} has nothing to restore: {reason}"
            remedy = "Check the URL, or start without restore: no version was published yet"
        else:
            problem = f"version {version} of {url} cannot be restored: {reason}"
            remedy = "Choose another version; a Publisher(..., recovery=Recovery(...)) writes such versions"
        super().__init__(problem, remedy)
        self.url, self.version, self.reason = url, version, reason


class IncompleteModelError(StreamError, RuntimeError):
    """The model cannot be used, because a restore was interrupted or the model belongs to a standby.

    If ``is_following`` is False, a restore of ``version`` was not completed, and the model may contain rows of several
    versions. Otherwise, the model belongs to a :class:`~delta_tracker.recovery.standby.Standby` at ``version``.
    """

    def __init__(self, version: int, *, is_following: bool = False) -> None:
        if is_following:
            problem = f"the model follows a stream at version {version}"
            remedy = "Call Standby.take_over() first, on all ranks"
        else:
            problem = f"the model is incomplete: a restore of version {version} was interrupted"
            remedy = "Call restore() again on all ranks"
        super().__init__(problem, remedy)
        self.version, self.is_following = version, is_following


class TakeoverFailedError(StreamError, RuntimeError):
    """The takeover of the stream at ``url`` failed; see ``reason``.

    If ``is_claimed`` is True, the stream was claimed with the entry ``version``. Call ``take_over()`` again to
    complete the takeover. Until then, the forward pass raises :class:`IncompleteModelError`. Otherwise, nothing was
    claimed, because ``version`` cannot be applied. ``applied`` is the last version applied by all ranks, or None.
    """

    def __init__(
        self, url: str, version: int, reason: str, *, is_claimed: bool = True, applied: int | None = None
    ) -> None:
        if is_claimed:
            problem = f"the takeover of {url} failed after the claim of version {version}: {reason}"
            remedy = (
                "The former trainer is fenced and no job trains: fix the problem and call take_over() again; the claim "
                "is kept. If a version is damaged, call restore(...) with an older version instead"
            )
        else:
            at = "before its first version" if applied is None else f"at version {applied}"
            problem = f"the standby of {url} is {at} and cannot apply version {version}: {reason}"
            remedy = (
                "If the trainer is alive, publish a snapshot; otherwise, restore(...) an older version or repair the "
                "store; force=True claims the stream nevertheless"
            )
        super().__init__(problem, remedy)
        self.url, self.version, self.reason, self.is_claimed, self.applied = url, version, reason, is_claimed, applied


# Stores and caches


class StorageError(StreamError, OSError):
    """The store at ``url`` could not be reached, read or written; see ``reason``."""

    _remedy = "Check the url, its permissions and free space, then try again; nothing was lost"

    def __init__(self, url: str, reason: str, remedy: str | None = None) -> None:
        super().__init__(f"the store {url} cannot be used: {reason}", self._remedy if remedy is None else remedy)
        self.url, self.reason = url, reason


class WriteRefusedError(StorageError):
    """The store at ``url`` refused a write, or its directory is invalid; see ``reason``. Nothing was written.

    If ``name`` is not None, the store refused to create the object ``name``, although no such object exists. If
    ``name`` is None, the directory of a local store was unmounted, deleted or replaced after it was opened, or contains
    a link or a file in place of a folder. Writes succeed again once the directory is restored.
    """

    def __init__(self, url: str, reason: str, remedy: str, name: str | None = None) -> None:
        super().__init__(url, reason, remedy)
        self.name = name

    @classmethod
    def taken(cls, url: str, name: str, attempts: int) -> Self:
        """Return the error for an object whose creation the store refused ``attempts`` times."""
        remedy = "Remove what has this name in the store, such as a dangling link, then try again; nothing was lost"
        return cls(url, f"it refused {attempts} times to create {name} as existing, but does not list it", remedy, name)


class AlteredEntryError(StorageError):
    """The entry ``name`` in the store at ``url`` differs from the bytes that the publisher sent.

    The bytes were altered in transit. The version was not committed. ``xxh3`` is the hash of the stored bytes.
    """

    _remedy = "Find out what alters objects on the way to the store, then try again; no row was lost"

    def __init__(self, url: str, name: str, xxh3: str) -> None:
        super().__init__(url, f"{name} has other bytes than were sent; the next version must be a snapshot")
        self.name, self.xxh3 = name, xxh3


class UnknownOutcomeError(StorageError):
    """It is unknown whether the object ``name`` exists in the store at ``url`` or will appear later; see ``reason``.

    If ``directory`` is None, the response to the request that creates the object was lost. Otherwise, the object of a
    local store was written or deleted, but its directory ``directory`` could not be flushed to disk. A power loss may
    undo the change. If the object is the entry of a version, readers may apply the version now or later. The rows of
    the version stay pending. If the version exists, the next version follows it.
    """

    def __init__(self, url: str, name: str, reason: str, directory: str | None = None) -> None:
        if directory is None:
            problem = f"whether {name} was created is unknown: {reason}"
            remedy = "Try again: the next attempt finds what was created, and no row was lost"
        else:
            problem = f"{name} is not on disk, because {directory}/ cannot be synced: {reason}"
            remedy = "Check the disk, then try again; no row was lost"
        super().__init__(url, problem, remedy)
        self.name, self.directory = name, directory


class LostEntryError(StorageError):
    """Another program deleted or replaced ``name``, the newest entry in the store at ``url``.

    Nothing was published, because new readers could not apply a delta that follows the lost entry. The publisher
    claimed the stream again, and its next version is a snapshot. ``claim`` is the JSON text of the new claim.
    """

    _remedy = "Publish again: the next version is a snapshot, from which predictors continue"

    def __init__(self, url: str, name: str, claim: str) -> None:
        super().__init__(url, f"{name}, the newest entry, was deleted or replaced by another program")
        self.name, self.claim = name, claim


class UnsupportedStoreError(StorageError):
    """The store at ``url`` does not support ``operation``. Over http, a store only supports reads of single objects.

    If ``operation`` is None, the store has no atomic operation that creates an object only if it does not exist. In
    such a store, a second publisher could overwrite an entry of the stream.
    """

    def __init__(self, url: str, operation: str | None = None) -> None:
        if operation is None:
            reason = "it has no atomic create-if-absent"
            remedy = "Use a store that honours If-None-Match: S3, GCS, Azure, a local directory, SeaweedFS, MinIO"
        else:
            reason = f"{operation} is not possible over http"
            remedy = "Use the url of the bucket or directory for everything but reading versions"
        super().__init__(url, reason, remedy)
        self.operation = operation


class StaleCacheError(StorageError):
    """The object ``name`` is missing, truncated or altered in the cache at ``url``, but may be intact at the origin.

    A predictor retries the read for ``seconds`` seconds after the first failure, and then resyncs.
    """

    _remedy = "The read is retried. If it lasts, check the lifetimes of the cache at the url"

    def __init__(self, url: str, name: str, seconds: float) -> None:
        super().__init__(url, f"{name} is missing, short or altered in the cache, for less than {seconds:g} s")
        self.name, self.seconds = name, seconds


class UnreadablePointerError(StorageError):
    """The server at ``url`` returned invalid content for the pointer object ``name``.

    ``received`` describes the content, and ``why`` is the reason why it is invalid. The read is retried.
    """

    def __init__(self, url: str, name: str, received: str, why: str) -> None:
        remedy = (
            f"Make {url.rstrip('/')}/{name} the JSON object that the publisher wrote, unchanged: check the url, and "
            "for a log-in or compression in between. The read is repeated"
        )
        super().__init__(url, f"{name} is no pointer, because {why}; received {received}", remedy)
        self.name, self.received, self.why = name, received, why


# Objects and versions of a stream


class MalformedError(StreamError, ValueError):
    """A manifest, a part or another object of a stream is malformed; see ``path`` and ``reason``."""

    _remedy = (
        "Check for other writers to this stream, and copy the object back from a mirror. If it is an entry of the log, "
        "call Publisher.snapshot(): predictors continue from it. If no publisher can claim the stream, start a new "
        "stream at another url"
    )

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} is malformed: {reason}", self._remedy)
        self.path, self.reason = path, reason


class NewerFormatError(MalformedError):
    """The object ``path`` of a stream has the format ``found``, which only newer releases of the library can read.

    ``known`` describes the formats that this release can read.
    """

    _remedy = "Upgrade delta_tracker on this host"

    def __init__(self, path: str, found: str, known: str) -> None:
        super().__init__(path, f"its format is {found}; this release reads {known}")
        self.found, self.known = found, known


class CorruptPartError(StreamError, ValueError):
    """A part is missing or truncated, or does not match its manifest; see ``path`` and ``reason``.

    Usually, no row of the version was applied. A part that is too large for memory is read twice, first to verify it
    and then to apply it. If the part changes between these reads, some of its rows may have been applied.
    """

    def __init__(self, path: str, reason: str) -> None:
        remedy = f"{CONTINUE}. To restore, pin or roll back, pass an older version"
        super().__init__(f"part {path} is corrupt: {reason}", remedy)
        self.path, self.reason = path, reason


class LeftOutPartError(StreamError, LookupError):
    """The part ``path`` was not mirrored, because it contains none of the mirror's ``tables`` (names or patterns)."""

    def __init__(self, url: str, path: str, tables: Iterable[str]) -> None:
        self.path, self.tables = path, tuple(tables)
        super().__init__(
            f"part {path} was left out: {url} is a mirror of the tables {list(self.tables)} only",
            f"Use the url of the mirror's source, or begin again with tables={list(self.tables)} (--table)",
        )


class MissingVersionError(StreamError, LookupError):
    """Version ``version`` of a stream is missing. No later version was applied. ``head`` is the newest version."""

    def __init__(self, version: int, head: int) -> None:
        remedy = f"{CONTINUE}. If you asked for this version, ask for another one"
        super().__init__(f"version {version} is missing, and the newest version is {head}", remedy)
        self.version, self.head = version, head


class NoSnapshotError(StreamError, LookupError):
    """The stream at ``url`` has no snapshot up to ``version``, or no snapshot at all if ``version`` is None."""

    def __init__(self, url: str, version: int | None = None) -> None:
        if version is None:
            problem = f"the stream {url} has no snapshot yet"
            remedy = "Call Publisher.snapshot() on the trainer, then sync() again; or check the url"
            if url.startswith("memory:"):
                remedy += ". Each url memory:// is a new store: pass one Storage('memory://') to both"
        else:
            problem = f"version {version} of {url} precedes the first snapshot and has no rows"
            remedy = "Pass the version of the first snapshot, usually 1, or a later one"
        super().__init__(problem, remedy)
        self.url, self.version = url, version


class StreamReplacedError(StreamError, RuntimeError):
    """The stream at ``url`` was replaced by another stream after ``version`` had been applied, at least partly."""

    def __init__(self, url: str, version: int) -> None:
        super().__init__(f"the stream {url} is not the one of which version {version} was applied", CONTINUE)
        self.url, self.version = url, version


class OlderCopyError(StreamError, RuntimeError):
    """The log at ``url`` is an older copy: it ends at version ``newest``, but the later ``version`` was applied."""

    def __init__(self, url: str, newest: int, version: int) -> None:
        super().__init__(
            f"{url} shows an older copy of the stream, up to version {newest}, and version {version} is applied",
            "It continues when the log has a newer version; if the store was restored, restart the trainer, which "
            "publishes a snapshot",
        )
        self.url, self.newest, self.version = url, newest, version


class PinError(StreamError, RuntimeError):
    """The stream at ``url`` could not be pinned, or its pin could not be released; see ``reason``."""

    def __init__(self, url: str, what: str, reason: str, remedy: str) -> None:
        super().__init__(f"{url} cannot be {what}: {reason}", remedy)
        self.url, self.reason = url, reason


class MirrorDivergedError(StreamError, RuntimeError):
    """The logs at ``destination`` and ``source`` differ at ``version``; see ``reason``. Nothing was overwritten."""

    def __init__(self, source: str, destination: str, version: int, reason: str) -> None:
        remedy = "Mirror to an empty destination, or stop the program that writes to this one"
        super().__init__(f"{destination} differs from {source} at version {version}: {reason}", remedy)
        self.source, self.destination, self.version, self.reason = source, destination, version, reason


# Predictors and row stores


class ModelMismatchError(StreamError, ValueError):
    """A table or a dense tensor differs between the stream and the predictor's model. Nothing was applied.

    ``kind`` is "table" or "dense tensor". ``name`` is the name of the table or dense tensor. ``expected`` describes it
    in the stream, and ``found`` describes it in the model. If the model has no table or dense tensor ``name``,
    ``known`` lists the names in the model. ``version`` is the version that does not fit, or None if it is unknown.
    """

    version: int | None = None

    def __init__(
        self, name: str, expected: object, found: str, known: Iterable[str] = (), *, kind: str = "table"
    ) -> None:
        self.kind, self.name, self.expected, self.found, self.known = kind, name, str(expected), found, tuple(known)
        names = f"; the model has: {_listed(self.known)}" if self.known else ""
        super().__init__(
            f"{kind} {name!r} is {expected} in the stream but {found} in the predictor's model{names}",
            "Build the predictor's model with the trainer's names and sizes, map differing names with "
            "ModelTarget(model, names={stream: model})"
            + (", pass dense=False there" if kind == "dense tensor" else "")
            + ", name what you need in Predictor(tables=[...]), or apply what fits with "
            "ModelTarget(model, on_model_change='continue')",
        )

    def with_version(self, version: int) -> Self:
        """Set :attr:`version` if it is None. Return the error."""
        if self.version is None:
            self.version, self.problem = version, f"version {version} does not fit: {self.problem}"
        return self.with_remedy(self.remedy)


class MissingTableError(StreamError, InvalidArgumentError):
    """A name or pattern of ``tables=[...]`` matches no name in a snapshot. Nothing was applied or copied."""


class PartialRowsError(StreamError, ValueError):
    """A version contains only a part of the columns that the predictor must write together. Nothing was applied.

    For ``num_rows`` rows of ``table``, the version contains the column ranges ``found``. The predictor must write the
    column range ``needed``.
    """

    def __init__(self, table: str, num_rows: int, found: Iterable[tuple[int, int]], needed: tuple[int, int]) -> None:
        self.table, self.num_rows, self.found, self.needed = table, num_rows, tuple(found), needed
        super().__init__(
            f"{num_rows} rows of table {table!r} have the columns {_listed(self.found)} only, "
            f"and the predictor must write the columns {needed!r} together",
            "Wait for the next snapshot, which has whole rows; publish column-wise tables without top-k and with fused "
            "kernels, or do not shard this one by columns",
        )


class HeldVersionError(StreamError, RuntimeError):
    """A predictor's gate rejected version ``version``; see ``reason``. The tables are unchanged."""

    def __init__(self, version: int, reason: str) -> None:
        remedy = f"Check the trainer; then call accept({version}) or rollback(...), or publish a good snapshot"
        super().__init__(f"version {version} is held back by the gate: {reason}", remedy)
        self.version, self.reason = version, reason


class WaitTimeoutError(StreamError, TimeoutError):
    """``Predictor.wait`` timed out before the predictor applied the version.

    ``wanted`` is the version to wait for; None for any version. ``version`` is the last applied version, or None.
    """

    def __init__(
        self, url: str, wanted: int | None, version: int | None, seconds: float | None, error: Exception | None
    ) -> None:
        what = "any version" if wanted is None else f"version {wanted}"
        held = "no version" if version is None else f"version {version}"
        cause = "" if error is None else f"; the last attempt failed: {type(error).__name__}: {error}"
        problem = f"the predictor of {url} has not applied {what} after {seconds} s and holds {held}{cause}"
        super().__init__(problem, "Check the url and that the publisher publishes, or pass a longer timeout")
        self.wanted, self.version = wanted, version


class FollowEndedError(StreamError, RuntimeError):
    """The background thread of ``Predictor.follow`` has ended, or exists only in the parent process.

    ``__cause__`` is the exception that ended the thread. It is None if this process was forked while ``follow`` ran.
    In this case, rows that were being written during the fork may be incomplete in this process. A copied or pickled
    error has no ``__cause__``, but its message contains the type and text of the cause.
    """

    def __init__(self, cause: BaseException | str, remedy: str = "Call follow() again") -> None:
        if isinstance(cause, str):
            super().__init__(f"this process was forked while follow() ran in its parent: {cause}", remedy)
        else:
            super().__init__(f"the thread of follow() ended: {type(cause).__name__}: {cause}", remedy)
            self.__cause__ = cause


class SinkError(StreamError, OSError):
    """The row store at ``target`` cannot be reached, read or written; see ``reason``. No stored rows are lost.

    If the store already has another writer, ``writer`` describes the process of that writer. Otherwise, it is None.
    """

    def __init__(self, target: str, reason: str, remedy: str | None = None, *, writer: str | None = None) -> None:
        remedy = remedy or "Check the row store and its free space. The next sync() or follow() completes the version"
        super().__init__(f"the row store {target} cannot be used: {reason}", remedy)
        self.target, self.reason, self.writer = target, reason, writer

    @classmethod
    def busy(cls, target: str, writer: str) -> Self:
        """Return the error for the row store at ``target``, to which another process, ``writer``, already writes."""
        remedy = "Stop the other writer, or use another prefix or directory: a row store has one writer"
        return cls(target, f"{writer} is its writer", remedy, writer=writer)


class MalformedSinkError(StreamError, ValueError):
    """The object ``where`` of a row store is invalid; see ``reason``."""

    def __init__(self, where: str, reason: str) -> None:
        remedy = "Delete the keys of the prefix, or the directory, and write the store again from the stream"
        super().__init__(f"{where} in the row store is invalid: {reason}", remedy)
        self.where, self.reason = where, reason


# Questions about an error that do not depend on its class alone


def kind_of(error: BaseException) -> tuple[object, ...]:
    """Return a key that is equal for errors of the same kind. Use it to log a repeated error only once.

    The messages of errors of the same kind may differ, for example in the time of a request or the name of a part.
    """
    match error:
        case MalformedError() | CorruptPartError():
            return type(error), error.path.partition("/")[0]
        case ModelMismatchError():
            return type(error), error.name
        case PartialRowsError():
            return type(error), error.table
        case RankFailedError():
            return type(error), error.rank
    return (type(error),)


def is_unknown(error: BaseException) -> bool:
    """Return True if a version may have been published, or may appear later, despite ``error``."""
    match error:
        case RankFailedError():
            return error.is_unknown
        case UnknownOutcomeError():
            return error.directory in (None, "log")
    return False


def is_panic(error: BaseException) -> bool:
    """Return True if the class name of ``error`` is that of a panic in a Rust extension."""
    return type(error).__name__ == "PanicException"


def without_traceback(error: _Error) -> _Error:
    """Return a copy of ``error`` without its traceback, cause and context.

    Use this function to keep an error for later: store a copy, and raise a new copy each time. A traceback keeps the
    variables of its frames alive, for example the rows of a version, and each ``raise`` adds frames to it.

    The cause of a :class:`FollowEndedError` is copied in the same way. If an error cannot be copied, its references are
    removed, and it is returned itself. Nested errors, for example of an ``ExceptionGroup``, lose only their tracebacks.
    """
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001  the constructor of any class may run
        copied = error
    if type(copied) is not type(error) or str(copied) != str(error):
        copied = error
    cause = error.__cause__ if isinstance(error, FollowEndedError) else None
    copied.__traceback__ = copied.__context__ = None
    copied.__cause__ = None if cause is None else without_traceback(cause)
    _remove_tracebacks(_held(copied))
    return copied


def _remove_tracebacks(values: list[object]) -> None:
    """Remove the tracebacks of the errors in ``values`` and of up to 10,000 errors and containers nested in them."""
    pending, seen = values, set[int]()
    while pending and len(seen) < _MAX_HELD:
        value = pending.pop()
        if id(value) in seen or not isinstance(value, BaseException | list | tuple | dict):
            continue
        seen.add(id(value))
        if isinstance(value, BaseException):
            value.__traceback__ = None
            pending += [*_held(value), value.__cause__, value.__context__]
        else:
            pending += islice(value.values() if isinstance(value, dict) else value, _MAX_HELD)


def _held(error: BaseException) -> list[object]:
    """Return the arguments and attributes of an error, and the nested errors if it is an exception group."""
    group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [*error.args, *vars(error).values(), *group]


def _rebuilt(kind: type[_Own], args: tuple[Any, ...], fields: Mapping[str, Any]) -> _Own:
    """Return an error with these ``args`` and attributes, without calling its constructor."""
    error = kind.__new__(kind)
    super(DeltaTrackerError, error).__init__(*args)
    vars(error).update(fields)
    return error


@cache
def _distribution() -> str | None:
    """Return the name of the distribution that installed this library; None if it is unknown or ambiguous."""
    from importlib.metadata import entry_points  # noqa: PLC0415  slow to import

    try:
        scripts = entry_points(group="console_scripts", name="delta-tracker")
        names = {each.dist.name for each in scripts if each.dist and each.module.startswith("delta_tracker.")}
    except Exception:  # noqa: BLE001  the metadata of any package may be malformed
        return None
    return names.pop() if len(names) == 1 else None


def _shown(value: object, depth: int = 0) -> str:
    """Return the ``repr`` of a value, with the type and shape in place of large arrays, even in dicts and lists."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None and not isinstance(value, type) and math.prod(shape) > _MAX_ITEMS:
        return f"<{type(value).__name__} {list(shape)} of {str(dtype).removeprefix('torch.')}>"
    if isinstance(value, dict) and depth < _MAX_DEPTH:
        return f"{{{', '.join(f'{key!r}: {_shown(each, depth + 1)}' for key, each in value.items())}}}"
    if type(value) is list and depth < _MAX_DEPTH:
        return f"[{', '.join(_shown(each, depth + 1) for each in value)}]"
    return repr(value)


def _listed(names: Iterable[object]) -> str:
    """Return the quoted names, separated by commas, or ``none`` if there are no names."""
    return ", ".join(repr(name) for name in names) or "none"
