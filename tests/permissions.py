"""Permissions of each role of a stream, from the table of the guide."""

from __future__ import annotations

import re

from tests.documents import GUIDE

VERBS = ("read", "list", "create", "replace", "delete")
"""Permissions, in the order of the columns."""

Permissions = dict[str, set[str]]
"""Folders or objects, by permission."""

_HEADER = f"| role | {' | '.join(VERBS)} |"


def documented() -> dict[str, Permissions]:
    """Return the folders of each permission of each role."""
    page = (GUIDE / "operate.md").read_text()
    rows = re.search(re.escape(_HEADER) + r"\n\|[-|]+\|\n((?:\|.*\|\n)+)", page)
    assert rows is not None
    found = {}
    for row in rows[1].splitlines():
        role, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        found[role] = {
            verb: set(re.findall(r"`([^`]+)`", cell)) for verb, cell in zip(VERBS, cells, strict=True) if cell
        }
    return found


def folder_of(name: str) -> str:
    """Return the folder or object of the table that has the object or prefix ``name``."""
    folder, _, rest = name.partition("/")
    if folder == "control":
        return f"control/{rest.partition('/')[0]}"
    return "probe" if folder.startswith("probe") else folder
