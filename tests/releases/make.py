"""Writes ``frozen/`` with the previous release: ``python -m tests.releases.make``. Run it once per release, by hand.

The streams have random names, so each run writes other bytes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

from tests.releases.jobs import SMALL
from tests.releases.release import FROZEN, previous_release


def make(folder: Path, library: Path) -> None:
    """Write a stream of each format, a saved position, a checkpoint and a row store to an empty folder."""
    with previous_release(library) as old:
        url, states = f"file://{folder}/format-1", f"file://{folder}/format-2"
        old.start(url, SMALL)
        old.train(url, 3)
        (folder / "position.json").write_text(json.dumps(old.read(url, SMALL)["state"]))
        old.train(url, 2)
        old.command("rollback", url, "3")
        old.snapshot(url)
        old.command("release", url)
        old.train(url, 8)
        old.command("compact", url)
        old.train(url, 1)
        old.fill(url, f"{folder}/rows")
        old.follow(url, SMALL, "p")
        old.leave(url)
        old.save(url, f"{folder}/checkpoint")
        old.start(states, SMALL, is_recoverable=True)
        old.train(states, 3)
        while not (folder / "format-2" / "publishers").exists():
            time.sleep(0.1)
            old.train(states, 1)
        old.close(states)
    for lock in ("lock.mdb", "writer.lock"):  # of the processes that used the row store
        (folder / "rows" / lock).unlink()


def main() -> None:
    """Replace ``frozen/``."""
    shutil.rmtree(FROZEN, ignore_errors=True)
    FROZEN.mkdir()
    with tempfile.TemporaryDirectory() as library:
        make(FROZEN, Path(library))


if __name__ == "__main__":
    main()
