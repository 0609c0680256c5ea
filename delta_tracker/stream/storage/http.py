"""Store behind a web server or a cache, at ``http://`` or ``https://``: it serves single objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from obstore.exceptions import NotSupportedError

from delta_tracker.errors import StorageError
from delta_tracker.stream.storage.objects import BucketStore
from delta_tracker.stream.storage.store import Span, Store, StoredObject, Transfer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class HttpStore(Store):
    """Objects that a web server returns. ``past_cache`` asks caches for the origin's objects; they may ignore it."""

    is_read_only = True
    lists_from = False

    def __init__(self, url: str, options: Mapping[str, str] | None, *, past_cache: bool = False) -> None:
        self.url = url
        self._options = options
        self._past_cache = past_cache
        self._objects = BucketStore(url, options, past_cache=past_cache)

    def read(self, span: Span, transfer: Transfer | None) -> NDArray[np.uint8] | None:
        try:
            return self._objects.download(span, Transfer() if transfer is None else transfer, is_cached=True)
        except NotSupportedError as error:
            reason = f"{span.name}: the server answers a range with the whole object"
            raise StorageError(self.url, reason, "Make it pass ranges on, or cache slices") from error

    def stat(self, name: str) -> StoredObject | None:
        """The modification time is 0 if the server sends none."""
        return self._objects.stat(name)

    def past_caches(self) -> Store:
        return self if self._past_cache else HttpStore(self.url, self._options, past_cache=True)
