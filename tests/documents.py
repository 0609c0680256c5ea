"""The documents of the project: every Markdown file that is not the output of a program."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent

README = ROOT / "README.md"

GUIDE = ROOT / "delta_tracker" / "guide"
"""Folder of the pages for users."""

# Measurements, which a benchmark writes.
_RESULTS = ROOT / "benchmarks" / "results"


def _documents() -> list[Path]:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and (path.name[0] != "." or path.name == ".github")]
    below = [path for folder in folders for path in folder.rglob("*.md") if _RESULTS not in path.parents]
    return sorted([*ROOT.glob("*.md"), *below])


DOCUMENTS = _documents()


def name_of(document: Path) -> str:
    """Return the path of a document below the root of the project."""
    return str(document.relative_to(ROOT))
