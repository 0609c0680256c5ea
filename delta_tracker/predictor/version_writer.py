"""Interface to what a predictor writes versions to: a model in this process, or a row store."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from delta_tracker.predictor.status import Served
from delta_tracker.stream.format.contents import Contents
from delta_tracker.stream.format.manifest import Link, Manifest
from delta_tracker.stream.reading.orders import Followed
from delta_tracker.stream.reading.position import Position
from delta_tracker.types import Identity


class VersionWrite(Protocol):
    """Write of one version, whose tables fit the destination."""

    def check(self, contents: Contents) -> None:
        """Raise PartialRowsError or MalformedError if the rows or raw ids cannot be written. Nothing is written."""

    def apply(self, contents: Contents, *, is_elsewhere: bool) -> None:
        """Check and write the version, and advance the position when it is complete.

        If it is no successor of the applied version (``is_elsewhere``) and its write is interrupted, only the same
        version or a snapshot can be applied next.
        """


class VersionWriter(Protocol):
    """Writer of versions to one destination, whose position it keeps.

    The methods are called in one thread at a time, except :meth:`reading`. Any thread may read the attributes.

    Attributes:
        manifest: manifest of the last applied snapshot or delta; None before the first.
        identities: table FQN to the buckets by which unknown raw ids are routed now.
    """

    manifest: Manifest | None
    identities: Mapping[str, Identity]

    @property
    def is_reading(self) -> bool:
        """True if this thread is inside :meth:`reading`."""
        return False

    @property
    def position(self) -> Position | None:
        """Position of the rows; None before the first version."""

    @property
    def followed(self) -> Followed | None:
        """Last order that was followed, as it was saved with the position; None without one."""

    def follow(self, followed: Followed) -> None:
        """Save with the position which order was followed."""

    def reading(self) -> AbstractContextManager[Served]:
        """Return a context manager that blocks writes during lookups; see :meth:`Predictor.reading`."""

    def restore(self) -> None:
        """Read the position that the destination stores, if it does and the position is unknown."""

    def resolve(self, manifest: Manifest) -> VersionWrite:
        """Return the write of a version. Raise TableMismatchError or DenseMismatchError if it does not fit."""

    def leaves_rows(self, manifest: Manifest) -> bool:
        """Return True if rows of a replaced version may remain once ``manifest`` is applied; see :func:`replaces`."""

    def state_dict(self) -> dict[str, str | int]:
        """Return the stream position; see :meth:`Predictor.state_dict`."""

    def load_state_dict(self, state: Mapping[str, str | int]) -> None:
        """Restore the stream position; see :meth:`Predictor.load_state_dict`."""

    def before_fork(self) -> None:
        """See :class:`~delta_tracker.forking.Forkable`, also for the two other methods."""

    def after_fork_in_parent(self) -> None:
        """Allow writes again after :meth:`before_fork`."""

    def after_fork_in_child(self) -> None:
        """Drop what only the parent's threads can complete."""


def replaces(manifest: Manifest, begun: Link, generation: int) -> bool:
    """Return True if a claim or delta belongs to a history without ``begun``, a version that is written in part.

    ``begun`` is then another entry with the same number, or a later one of a lower ``generation``. Only a snapshot
    replaces all of its rows.
    """
    if manifest.kind == "snapshot":
        return False
    is_fenced = begun.version > manifest.version and generation < manifest.generation
    return is_fenced or (begun.version == manifest.version and begun != manifest.link)
