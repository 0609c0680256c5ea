"""Stream that was claimed before a publisher is built: :class:`ClaimedStream`."""

from __future__ import annotations

from dataclasses import dataclass

from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import Claim
from delta_tracker.stream.storage.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClaimedStream:
    """Claimed stream on one rank. One publisher can continue with the claim instead of claiming the stream again.

    Args:
        claim: the claim on rank 0; None on the other ranks.
        entry: entry of the claim, equal on all ranks.
        has_states: True for a recovery stream, whose versions need states; False for a serving stream.
    """

    storage: Storage
    claim: Claim | None
    entry: Manifest
    has_states: bool

    def __repr__(self) -> str:
        """Return the url and the version of the claim."""
        kind = "recovery" if self.has_states else "serving"
        return f"<{kind} stream {self.storage.url}, claimed at version {self.entry.version}>"
