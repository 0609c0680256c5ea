"""One fix, and what finds the defect again once the fix is taken out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Revert:
    """A change of the package's text that brings a defect back.

    Args:
        defect: what goes wrong, as a short sentence.
        generator: the test that must fail then, as pytest names it; a random schedule or a sweep where there is one.
        edits: file to pairs of text, as it is and as it was; each text occurs exactly once in its file.
        timeout_seconds: how long the generator may take. Taking longer counts as failing if ``hangs`` is set.
        hangs: the defect is a wait that does not end.
    """

    defect: str
    generator: str
    edits: dict[str, list[tuple[str, str]]]
    timeout_seconds: float = 120.0
    hangs: bool = False
