"""Position of a reader in a stream (:class:`Position`), and state of the tables it writes (:class:`Written`)."""

from dataclasses import dataclass, replace
from enum import Enum
from math import ceil
from typing import Self, cast

from msgspec import Struct, convert, to_builtins

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.field_types import Count, Hex, Time
from delta_tracker.stream.format.manifest import Link, Manifest
from delta_tracker.stream.store_clock import SKEW_SECONDS


class Rows(Enum):
    """Kind of rows that the tables of a reader contain, relative to its position."""

    WHOLE = "whole"
    """Only rows of the position."""
    AHEAD = "ahead"
    """Also rows of later versions, because a version was partly written or the rows were saved after the position."""
    MIXED = "mixed"
    """Rows of unrelated versions. Only a snapshot may be applied next."""


class SavedPosition(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """JSON format of a :class:`Position`."""

    stream: Hex
    version: Count
    xxh3: Hex
    generation: Count
    created: Count


@dataclass(frozen=True, slots=True)
class Position:
    """Last entry that a reader has applied completely.

    Args:
        stream: id of the stream, 32 hex digits.
        generation: generation of the entry.
        created: Unix time at which the entry was committed, in seconds; rounded up if the position was saved.
        rows: kind of rows that the tables contain.
    """

    stream: str
    link: Link
    generation: int
    created: float
    rows: Rows = Rows.WHOLE

    @property
    def version(self) -> int:
        """Version of the entry."""
        return self.link.version

    @classmethod
    def after(cls, entry: Manifest) -> Self:
        """Return the position of a reader that has applied ``entry`` completely."""
        return cls(entry.stream, entry.link, entry.generation, entry.created)

    def names(self, entry: Manifest | None) -> bool:
        """Return True if ``entry`` is the entry at this position. Return False if ``entry`` is None."""
        return entry is not None and (entry.stream, entry.link) == (self.stream, self.link)

    def leads_to(self, entry: Manifest) -> bool:
        """Return True if ``entry`` is the next entry after this position."""
        follows = entry.stream == self.stream and entry.parent == self.link
        return follows and entry.generation >= self.generation

    def precedes(self, entry: Manifest) -> bool:
        """Return True if ``entry``, an entry of the same stream, is newer than this position.

        Compares the generations first, because a publisher with a higher generation fences the others.
        """
        return (entry.generation, entry.version) > (self.generation, self.version)

    def is_long_before(self, entry: Manifest) -> bool:
        """Return True if ``entry`` was committed later than this position by more than the tolerated clock skew."""
        return entry.created > self.created + SKEW_SECONDS

    def to_dict(self) -> dict[str, str | int]:
        """Return the position as a dict that can be converted to JSON."""
        saved = SavedPosition(self.stream, self.link.version, self.link.xxh3, self.generation, ceil(self.created))
        return cast("dict[str, str | int]", to_builtins(saved))

    @classmethod
    def from_dict(cls, state: object) -> Self:
        """Restore a position from the result of :meth:`to_dict`. Raise InvalidArgumentError if it is invalid."""
        try:
            saved = convert(state, SavedPosition)
        except ValueError as error:
            raise InvalidArgumentError("state", state, "Pass what state_dict() returned") from error
        return cls(saved.stream, Link(saved.version, saved.xxh3), saved.generation, saved.created)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """State of tables to which versions of one stream were written.

    Each row has the value that it had at :attr:`version`, or at a later version up to :attr:`applying`. If
    :attr:`is_mixed` is True, a row may also have the value of any version that was applied before.

    Args:
        stream: id of the stream, 32 hex digits; empty if nothing was written.
        version: last version that was written completely; None until the first snapshot is complete.
        xxh3: 128-bit xxh3 of the entry of ``version``, in hex; None if ``version`` is None.
        generation: generation of that entry; None if ``version`` is None.
        created: Unix time at which that entry was committed, in seconds; rounded up if the state was saved; None if
            ``version`` is None.
        pin: counter of the pin to ``version``; 0 without a pin.
        release: counter of the last release that was followed; 0 without a release, or if ``pin`` is above 0.
        applying: newest version that may be partly written; None if there is no such version.
        applying_xxh3: 128-bit xxh3 of the entry of ``applying``, in hex; None if ``applying`` is None.
        applying_generation: generation of that entry; None if ``applying`` is None.
        is_mixed: True if the tables may contain rows of unrelated versions. Only a snapshot may then be applied next.
    """

    stream: str
    version: Count | None = None
    xxh3: Hex | None = None
    generation: Count | None = None
    created: Time | None = None
    pin: Count = 0
    release: Count = 0
    applying: Count | None = None
    applying_xxh3: Hex | None = None
    applying_generation: Count | None = None
    is_mixed: bool = False

    @property
    def position(self) -> Position | None:
        """Position after :attr:`version`; None before the first version."""
        if self.version is None or self.xxh3 is None or self.generation is None or self.created is None:
            return None
        rows = Rows.MIXED if self.is_mixed else Rows.WHOLE if self.applying is None else Rows.AHEAD
        return Position(self.stream, Link(self.version, self.xxh3), self.generation, self.created, rows)

    def leaves_rows(self, entry: Manifest) -> bool:
        """Return True if applying ``entry`` could leave rows of the partly written version in place.

        This is the case if ``entry`` is not a snapshot, and conflicts with the partly written version.
        """
        if self.applying is None or entry.kind == "snapshot" or entry.stream != self.stream:
            return False
        if self.applying == entry.version:
            return self.applying_xxh3 != entry.link.xxh3
        return self.applying > entry.version and (self.applying_generation or 0) < entry.generation

    def begun(self, entry: Manifest, *, is_elsewhere: bool) -> Self:
        """Return a copy of this state that records that rows of ``entry``, an entry of this stream, are being written.

        Pass ``is_elsewhere=True`` if ``entry`` may not continue from :attr:`version`.
        """
        begun = replace(self, is_mixed=self.is_mixed or is_elsewhere)
        if self.applying is not None and self.applying > entry.version:
            return begun
        link = entry.link
        return replace(begun, applying=link.version, applying_xxh3=link.xxh3, applying_generation=entry.generation)

    def finished(self, entry: Manifest) -> Self:
        """Return the state once all rows of ``entry``, an entry of this stream, are written.

        Keeps :attr:`applying` if it is above ``entry``, unless ``entry`` is a snapshot.
        """
        finished = replace(self.at(entry), is_mixed=False, pin=0)
        if self.applying is not None and self.applying > entry.version and entry.kind != "snapshot":
            return finished
        return replace(finished, applying=None, applying_xxh3=None, applying_generation=None)

    def at(self, entry: Manifest) -> Self:
        """Return a copy in which ``entry`` is the last version that was written completely."""
        link = entry.link
        return replace(self, version=link.version, xxh3=link.xxh3, generation=entry.generation, created=entry.created)

    @property
    def saved_created(self) -> int | None:
        """Value of :attr:`created`, rounded up so that a stream created in the same second does not look newer."""
        return None if self.created is None else ceil(self.created)

    def with_order(self, kind: str, counter: int) -> Self:
        """Return a copy whose last followed order has ``counter``. ``kind`` is ``pin`` or ``release``."""
        return replace(self, pin=counter, release=0) if kind == "pin" else replace(self, pin=0, release=counter)
