"""The previous release of the library, in a process of its own: :func:`previous_release`.

No release is on the package index yet, so a commit of this repository takes its place. Once there is one,
:func:`unpack` becomes ``pip download --no-deps`` of the wheel of that version, and the rest remains.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

COMMIT = "72d67d78acc25f4c85f233b0f29e1e39468e03fc"
"""The previous release. After each release, name its tag here and write ``frozen/`` anew, see ``make.py``."""

FROZEN = Path(__file__).with_name("frozen")
"""Data that this release wrote."""

REQUIRED = "DELTA_TRACKER_REQUIRE_RELEASE"
_ROOT = Path(__file__).parents[2]
_PROGRAM = Path(__file__).with_name("jobs.py")


class ReleaseError(Exception):
    """Error of a call in the process of the other release.

    Attributes:
        kind: name of the type of the error there.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Release:
    """Jobs in a process that imports a release; calls are those of :class:`tests.releases.jobs.Jobs`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    def of(cls, process: subprocess.Popen[str], folder: Path) -> Release:
        """Return the jobs of a process, once it has imported the library below a folder."""
        release = cls(process)
        imported = release.answer()
        assert Path(imported) == folder / "delta_tracker", f"{imported} was imported"
        return release

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: self._call([name, arguments, options])

    def _call(self, call: list[Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        result, kind, message = self.answer()
        if kind is not None:
            raise ReleaseError(kind, message)
        return result

    def answer(self) -> Any:
        """Return the next line of the process."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process of the release ended with {self._process.wait(60)}"
        return json.loads(line)


@contextmanager
def previous_release(folder: Path) -> Iterator[Release]:
    """Unpack the previous release below a folder, and run jobs with it. Skip the test if git does not have it."""
    if problem := unpack(folder):
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(problem)
        pytest.skip(f"{problem}; {REQUIRED}=1 makes this a failure")
    with start(folder) as process:
        try:
            yield Release.of(process, folder)
        finally:
            process.kill()


def start(folder: Path, *, is_temporary: bool = False) -> subprocess.Popen[str]:
    """Start a process with the library below a folder, which ends with its input.

    With ``is_temporary``, it then deletes the folder, and it writes no logs.
    """
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "ignore", str(_PROGRAM), *([str(folder)] if is_temporary else [])]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if is_temporary else None,
    )


def unpack(folder: Path) -> str:
    """Unpack the library of the release. Return why that is impossible, and a remedy; or an empty string."""
    if shutil.which("git") is None or not (_ROOT / ".git").exists():
        return f"there is no git repository with the previous release, {COMMIT}"
    command = ["git", "-C", str(_ROOT), "archive", "--format=tar", COMMIT, "delta_tracker"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        remedy = f"run `git fetch --depth 1 origin {COMMIT}`"
        return f"git does not have the previous release: {done.stderr.decode().strip()}; {remedy}"
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return ""
