"""Ways to find the entries of a log: by listing the store, or by the pointer object if the store cannot list."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from delta_tracker.errors import StorageError
from delta_tracker.stream.entry_names import ENTRY_NAME, Merged, entry_name, merged_after
from delta_tracker.stream.pointer import HeadPointer
from delta_tracker.stream.storage.storage import Storage

_MAX_POINTED = 1 << 20  # versions that a pointed index returns: a forged pointer may have any version


class ListedIndex:
    """Index of a store that can list."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def versions(self, after: int) -> list[int]:
        """Return the versions above ``after``, ascending."""
        found = self._storage.names("log", after=entry_name(after) if after >= 0 else None)
        self._refuse_file(found)
        return [int(match[1]) for match in map(ENTRY_NAME.fullmatch, found) if match is not None]

    def listed(self, after: int) -> dict[int, float]:
        """Return the versions above ``after``, ascending, with the modification times of their entries."""
        found = self._storage.objects("log", after=entry_name(after) if after >= 0 else None)
        self._refuse_file(found)
        matches = [(ENTRY_NAME.fullmatch(stored.name), stored.modified) for stored in found]
        return {int(match[1]): modified for match, modified in matches if match is not None}

    def merged(self, after: int) -> list[Merged]:
        """Return references to all merged entries with a last version above ``after``."""
        found = map(Merged.named, self._storage.names("merged", after=merged_after(after)))
        return [merged for merged in found if merged is not None]

    def _refuse_file(self, found: Sequence[object]) -> None:
        """Raise StorageError if a local store lists nothing because ``log`` is a file: it is not an empty stream."""
        if found or self._storage.is_remote or (num_bytes := self._storage.size("log")) is None:
            return
        remedy = "Move it away and restore the directory, for example from a mirror; or correct the url"
        raise StorageError(self._storage.url, f"log is a file of {num_bytes} bytes instead of a directory", remedy)


class PointedIndex:
    """Index of a store that cannot list: the newest pointer whose entry was read, and the entries that were read.

    Versions have no gap from the oldest to the newest one. Modification times are unknown, and returned as 0.
    """

    def __init__(self, pointed: Callable[[], HeadPointer | None]) -> None:
        self._pointed = pointed

    def versions(self, after: int) -> list[int]:
        """Return the versions above ``after``, as :meth:`listed` does."""
        return list(self.listed(after))

    def listed(self, after: int) -> dict[int, float]:
        """Return the versions above ``after`` of the pointer; of more than 1,048,576, the newest."""
        found = self._pointed()
        if found is None:
            return {}
        first = max(after + 1, found.oldest, found.version + 1 - _MAX_POINTED)
        return dict.fromkeys(range(first, found.version + 1), 0.0)

    def merged(self, after: int) -> list[Merged]:
        """Return references to the merged deltas and the merged snapshot of the pointer."""
        found = self._pointed()
        if found is None:
            return []
        merged = [Merged(last, first, "delta") for first, last in found.merged]
        if found.snapshot is not None and found.snapshot.merged:
            merged.append(Merged(found.snapshot.version, 0, "snapshot"))
        return sorted((each for each in merged if each.last > after), key=lambda each: each.name)


LogIndex = ListedIndex | PointedIndex
"""Knowledge of which entries a log has."""
