"""Names of the entries of a log, and of merged entries."""

from __future__ import annotations

import re
from dataclasses import dataclass

from delta_tracker.stream.format.manifest import Manifest

MAX_ENTRY_BYTES = 64 << 20  # a manifest has about 300 bytes per rank and table
_DIGITS = 20  # zero-padded, so that names sort by version, up to 2**63
ENTRY_NAME = re.compile(rf"log/([0-9]{{{_DIGITS}}})\.json")
_MERGED_NAME = re.compile(rf"merged/([0-9]{{{_DIGITS}}})-([0-9]{{{_DIGITS}}})-(delta|snapshot)\.json")


@dataclass(frozen=True, slots=True)
class Merged:
    """Reference to a merged ``delta`` or ``snapshot``, which replaces ``first`` (0 for a snapshot) to ``last``."""

    last: int
    first: int
    kind: str

    @property
    def name(self) -> str:
        """Name of the entry in the store; names sort by ``last``."""
        return f"merged/{self.last:0{_DIGITS}d}-{self.first:0{_DIGITS}d}-{self.kind}.json"

    @classmethod
    def of(cls, manifest: Manifest) -> Merged:
        """Return the reference to a merged entry."""
        first = 0 if manifest.parent is None else manifest.parent.version + 1
        return cls(manifest.version, first, manifest.kind)

    @classmethod
    def named(cls, name: str) -> Merged | None:
        """Return the reference to the merged entry of a name, None if it is not the name of one."""
        match = _MERGED_NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]), match[3])


def entry_name(version: int) -> str:
    """Return the name of a version's entry in the store."""
    return f"log/{version:0{_DIGITS}d}.json"
