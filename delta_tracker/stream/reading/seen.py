"""What a reader has seen of a log, and what it must look up: :class:`SeenLog`, :class:`Order` and :class:`Look`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from delta_tracker.errors import StreamError
from delta_tracker.stream.entry_names import Merged
from delta_tracker.stream.format.manifest import Link, Manifest
from delta_tracker.stream.pin import Pin
from delta_tracker.stream.reading.position import Position, Rows


@dataclass(frozen=True, slots=True)
class Order:
    """Order to apply one version and stay at it, or to continue from it: a pin, a release, or a rollback.

    Args:
        counter: counter of the pin or release; of a rollback, that of the newest pin when it was made.
        kind: ``pin`` to apply the version and stay there; ``release`` to continue from it or from a later snapshot;
            ``rollback`` for a pin of this process, which bypasses a canary and ends with its release.
        link: link of the entry; None for a rollback, as ``pin``.
        newest: newest version when the order was made.
        is_new: True if it was not known in the round before.
    """

    counter: int
    kind: str
    stream: str
    version: int
    link: Link | None
    newest: int
    is_new: bool = False
    pin: Pin | None = None

    @classmethod
    def of(cls, pin: Pin) -> Order:
        """Return the order of a pin or a release."""
        link = Link(pin.version, pin.xxh3)
        return cls(pin.counter, pin.kind, pin.stream, pin.version, link, pin.bad, pin=pin)

    def is_followed_by(self, position: Position | None) -> bool:
        """Return True if a reader at a position has done what the order says."""
        if position is None or position.stream != self.stream or position.rows is Rows.MIXED:
            return False
        if self.kind == "release":
            return position.version >= self.version
        is_there = position.version == self.version if self.link is None else position.link == self.link
        return is_there and position.rows is Rows.WHOLE


class Entries(Protocol):
    """Entries of one log: those that were seen, or a :class:`~delta_tracker.stream.log.StreamLog`, which reads them.

    The methods raise MalformedError for an entry that does not follow the format, and StorageError if the store cannot
    be read.
    """

    @property
    def url(self) -> str:
        """Url of the store."""

    def read(self, version: int) -> Manifest | None:
        """Return the entry of a version, None if it does not exist."""

    def read_merged(self, merged: Merged) -> Manifest | None:
        """Return a merged entry, None if it does not exist."""

    def merged(self, *, after: int = -1) -> list[Merged]:
        """Return references to the merged entries with a last version above ``after``, ascending."""

    def versions(self, *, after: int = -1) -> list[int]:
        """Return the versions above ``after``, ascending."""

    def head(self) -> Manifest | None:
        """Return the newest entry, None if there is none."""

    def newest_snapshot(self) -> Manifest | None:
        """Return the newest snapshot that a reader can start from, of the log or merged; None if there is none."""

    def is_committed(self, entry: Manifest) -> bool:
        """Return True if an entry that was read, such as a claim, is part of the log."""


@dataclass(frozen=True, slots=True)
class Look:
    """Decision to look something up before the next decision.

    Args:
        about: name of the method of :class:`SeenLog` that needs the answer.
        key: what the question is about.
        subject: argument to look it up with.
    """

    number: int
    about: str
    key: Hashable = None
    subject: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """Answer of a look that raised an error."""

    error: StreamError


class Unseen(Exception):  # noqa: N818  no error: a decision needs one more look
    """Raised by a :class:`SeenLog` with the :class:`Look` for what was not looked up yet."""

    look: Look


@dataclass(frozen=True, slots=True, eq=False)
class SeenLog:
    """What one round of a reader has seen of the log at one url. Only the loop adds answers, between two decisions.

    A method returns the answer of a look, raises the error of one that failed, or raises :class:`Unseen`.

    Args:
        is_doubted: True if a fault may be that of a cache, and must not be believed yet.
        answers: what was looked up, by the name of the method and the key.
    """

    number: int
    url: str
    is_doubted: bool = False
    answers: dict[tuple[str, Any], object] = field(default_factory=dict)

    def next(self, position: Position, *, looks_for_gap: bool) -> Manifest | None:
        """Return the entry after a position; None if it does not exist, as far as a poll can tell.

        With ``looks_for_gap``, raises MissingVersionError or StreamReplacedError if it was deleted, or if the log lacks
        the position's entry.
        """
        return cast("Manifest | None", self._ask("next", looks_for_gap, position))

    def ahead(self, position: Position) -> Manifest | None:
        """Return a merged delta or a snapshot to apply instead of many versions; None if there is none."""
        return cast("Manifest | None", self._ask("ahead", None, position))

    def allows(self, entry: Manifest) -> bool:
        """Return False for an entry that a canary must not apply yet."""
        return cast("bool", self._ask("allows", (entry.stream, entry.link), entry))

    def order(self) -> Order | None:
        """Return the newest pin or release, None if there is none."""
        return cast("Order | None", self._ask("order"))

    def named(self, order: Order) -> Manifest | None:
        """Return the entry that a pin or a release names; None if the log does not have it."""
        return cast("Manifest | None", self._ask("named", order.counter, order))

    def former_streams(self) -> tuple[str, ...]:
        """Return the streams of which the newest entry's stream is a fork, the last one first."""
        head = self.head()
        return () if head is None else cast("tuple[str, ...]", self._ask("former_streams", head.stream, head))

    def generation(self, position: Position) -> int | None:
        """Return the generation of a position's entry; None if the log does not have it."""
        return cast("int | None", self._ask("generation", None, position))

    def read(self, version: int) -> Manifest | None:
        """See :class:`Entries`."""
        return cast("Manifest | None", self._ask("read", version, version))

    def read_merged(self, merged: Merged) -> Manifest | None:
        """See :class:`Entries`."""
        return cast("Manifest | None", self._ask("read_merged", merged, merged))

    def merged(self, *, after: int = -1) -> list[Merged]:
        """See :class:`Entries`."""
        return cast("list[Merged]", self._ask("merged", after, after))

    def versions(self, *, after: int = -1) -> list[int]:
        """See :class:`Entries`."""
        return cast("list[int]", self._ask("versions", after, after))

    def head(self) -> Manifest | None:
        """See :class:`Entries`."""
        return cast("Manifest | None", self._ask("head"))

    def newest_snapshot(self) -> Manifest | None:
        """See :class:`Entries`."""
        return cast("Manifest | None", self._ask("newest_snapshot"))

    def is_committed(self, entry: Manifest) -> bool:
        """See :class:`Entries`."""
        return cast("bool", self._ask("is_committed", (entry.stream, entry.link), entry))

    def _ask(self, about: str, key: Hashable = None, subject: object = None) -> object:
        if (about, key) not in self.answers:
            unseen = Unseen()
            unseen.look = Look(self.number, about, key, subject)
            raise unseen
        answer = self.answers[about, key]
        if isinstance(answer, Failed):
            raise answer.error.with_traceback(None)
        return answer
