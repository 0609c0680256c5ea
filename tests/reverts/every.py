"""All reverts of this folder, and how one is applied."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from tests import reverts
from tests.reverts.revert import Revert


def all_reverts() -> list[Revert]:
    """Return the reverts of every file of this folder."""
    found: list[Revert] = []
    for module in pkgutil.iter_modules(reverts.__path__):
        if module.name not in ("__main__", "every", "revert"):
            found += importlib.import_module(f"tests.reverts.{module.name}").REVERTS
    return found


def apply(revert: Revert, root: Path) -> None:
    """Edit the files below ``root``.

    Raises:
        ValueError: if a text does not occur exactly once: the code has changed, and the revert must follow it.
    """
    for name, edits in revert.edits.items():
        text = (root / name).read_text()
        for now, before in edits:
            if text.count(now) != 1:
                raise ValueError(f"{revert.defect}: {name} has {text.count(now)} times {now!r}, not once")
            text = text.replace(now, before)
        (root / name).write_text(text)
