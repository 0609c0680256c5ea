"""Position of a reader in a stream: :class:`Position`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import cast

from msgspec import Struct, convert, to_builtins

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.field_types import Count
from delta_tracker.stream.format.manifest import Link, Manifest
from delta_tracker.stream.store_clock import SKEW_SECONDS


class Rows(Enum):
    """What the tables may hold besides the rows of the position."""

    WHOLE = "whole"
    """Nothing else."""
    AHEAD = "ahead"
    """Some rows of later versions: of an interrupted one, or saved after the position."""
    MIXED = "mixed"
    """Rows of unrelated versions. Only a snapshot may be applied next."""


class _SavedPosition(Struct, forbid_unknown_fields=True, omit_defaults=True):
    stream: str
    version: Count
    xxh3: str
    generation: Count | None = None
    created: Count | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """Last entry that a reader has applied completely.

    Args:
        stream: id of the stream, 32 hex digits.
        generation: generation of the entry; None if it was saved without it.
        rows: what else the tables may hold.
        created: Unix time at which the entry was committed, in seconds; None if it was saved without it.
    """

    stream: str
    link: Link
    generation: int | None = None
    rows: Rows = Rows.WHOLE
    created: float | None = None

    @property
    def version(self) -> int:
        """Version of the entry."""
        return self.link.version

    @classmethod
    def after(cls, entry: Manifest) -> Position:
        """Return the position of a reader that has applied an entry completely."""
        return cls(entry.stream, entry.link, entry.generation, created=entry.created)

    def names(self, entry: Manifest | None) -> bool:
        """Return True if an entry that was read is the one of this position."""
        return entry is not None and (entry.stream, entry.link) == (self.stream, self.link)

    def leads_to(self, entry: Manifest) -> bool:
        """Return True if an entry that was read is the next one after this position."""
        follows = entry.stream == self.stream and entry.parent == self.link
        return follows and entry.generation >= (self.generation or 0)

    def precedes(self, entry: Manifest) -> bool:
        """Return True if an entry of the same stream is newer.

        Publishers fence each other by generations, so that the generation counts first. If that of the position is
        unknown, it is taken as that of the entry.
        """
        generation = entry.generation if self.generation is None else self.generation
        return (entry.generation, entry.version) > (generation, self.version)

    def is_long_before(self, entry: Manifest) -> bool:
        """Return True if an entry was committed so much later that no difference of two clocks explains it."""
        return self.created is not None and entry.created > self.created + SKEW_SECONDS

    def to_dict(self) -> dict[str, str | int]:
        """Return the position as plain values, for JSON."""
        created = None if self.created is None else int(self.created)
        saved = _SavedPosition(self.stream, self.version, self.link.xxh3, self.generation, created)
        return cast("dict[str, str | int]", to_builtins(saved))

    @classmethod
    def from_dict(cls, state: object) -> Position:
        """Restore a position from the result of :meth:`to_dict`. Raise InvalidArgumentError if it is invalid."""
        try:
            saved = convert(state, _SavedPosition)
        except ValueError as error:
            raise InvalidArgumentError("state", state, "Pass what state_dict() returned") from error
        return cls(saved.stream, Link(saved.version, saved.xxh3), saved.generation, created=saved.created)


def replaces(manifest: Manifest, begun: Link, generation: int) -> bool:
    """Return True if a claim or delta belongs to a history without ``begun``, a version that is written in part.

    ``begun`` is then another entry with the same number, or a later one of a lower ``generation``. Only a snapshot
    replaces all of its rows.
    """
    if manifest.kind == "snapshot":
        return False
    is_fenced = begun.version > manifest.version and generation < manifest.generation
    return is_fenced or (begun.version == manifest.version and begun != manifest.link)
