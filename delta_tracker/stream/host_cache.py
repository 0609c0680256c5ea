"""Cache of parts for the predictors of one host, in a directory that they share."""

from __future__ import annotations

from pathlib import Path

from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.storage.storage import Storage


class HostCache:
    """Directory in which the processes of one host keep the parts that they read, so that each is fetched once.

    Args:
        directory: directory of the cache; created if it is missing.
        max_bytes: maximum size of all cached parts.
    """

    def __init__(self, directory: str | Path, *, max_bytes: int = 32 << 30) -> None:
        self._directory = Path(directory)
        self._max_bytes = max_bytes

    def over(self, storage: Storage, manifest: Manifest) -> Storage:  # noqa: ARG002  skeleton
        """Return a store that reads the parts of a version through the cache, and everything else from ``storage``."""
        return storage
