"""Resolve and run the environments of the version table in ``tests/README.md``: ``python -m tests.installs``.

Each line is resolved by pip for a fresh environment, from the package index that pip is configured with. A line whose
torch is the CPU build of this interpreter's environment is also installed into a new virtual environment, where both
quickstarts of the README run. The exit status is 1 if a line cannot be resolved, has other releases, or does not run.
Names as arguments choose lines: ``python -m tests.installs 2.13``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from delta_tracker.sharding.pairs import FBGEMM_OF_TORCH

_ROOT = Path(__file__).parent.parent
_TORCHREC = {
    "2.8": "1.3", "2.9": "1.4", "2.10": "1.5", "2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9",
}  # fmt: skip
_CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Args:
        torch: minor release of torch.
        is_cpu: True for FBGEMM's CPU build.
    """

    torch: str
    is_cpu: bool

    @property
    def name(self) -> str:
        """Name of the line."""
        return f"{self.torch} {'CPU' if self.is_cpu else 'CUDA'}"

    @property
    def releases(self) -> dict[str, str]:
        """Name of each package to its minor release."""
        fbgemm = "fbgemm-gpu-cpu" if self.is_cpu else "fbgemm-gpu"
        return {"torch": self.torch, "torchrec": _TORCHREC[self.torch], fbgemm: FBGEMM_OF_TORCH[self.torch]}

    @property
    def steps(self) -> list[list[str]]:
        """Arguments of ``pip install``, in order."""
        pins = {name: f"{name}=={release}.*" for name, release in self.releases.items()}
        if not self.is_cpu:
            return [[f"{_ROOT}[torchrec,numba,cli]", *pins.values()]]
        torchrec = pins.pop("torchrec")
        return [[f"{_ROOT}[torchrec-cpu,numba,cli]", *pins.values()], ["--no-deps", torchrec]]

    @property
    def runs_here(self) -> bool:
        """True if this interpreter's environment has the CPU build of the line's torch."""
        found = version("torch")
        return self.is_cpu and found.startswith(f"{self.torch}.") and found.endswith("+cpu")


LINES = [Line(torch, is_cpu) for torch in _TORCHREC for is_cpu in (True, False)]


def _pip(python: str, *arguments: str) -> None:
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=1800,
    )


def resolve(line: Line, folder: Path) -> None:
    """Let pip resolve a line for an empty environment, and check the releases that it chose."""
    found: dict[str, str] = {}
    for step in line.steps:
        report = folder / "report.json"
        _pip(sys.executable, "--dry-run", "--ignore-installed", "--report", str(report), *step)
        items = (each["metadata"] for each in json.loads(report.read_text())["install"])
        found |= {each["name"].lower().replace("_", "-"): each["version"] for each in items}
    for name, release in line.releases.items():
        assert found[name].startswith(f"{release}."), f"{name} {found[name]} in place of {release}"
    other = "fbgemm-gpu" if line.is_cpu else "fbgemm-gpu-cpu"
    assert other not in found, f"{other} is installed too"


def run(line: Line, folder: Path) -> None:
    """Install a line into a new environment, and run the README's quickstarts there."""
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    for step in line.steps:
        _pip(python, *step)
    program = folder / "quickstart.py"
    program.write_text("".join(_CODE.findall((_ROOT / "README.md").read_text())[:2]))
    subprocess.run(
        [python, "-W", "ignore", str(program)], check=True, capture_output=True, text=True, timeout=300, cwd=folder
    )


def main(argv: Sequence[str]) -> int:
    """Resolve the chosen lines, and run those that can run here."""
    failed = 0
    for line in LINES:
        if argv and not any(word in line.name for word in argv):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                resolve(line, Path(folder))
                if line.runs_here:
                    run(line, Path(folder))
            except (AssertionError, subprocess.CalledProcessError) as error:
                failed += 1
                output = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
                sys.stdout.write(f"{line.name}: FAILED\n{output[-2000:]}\n")
            else:
                sys.stdout.write(f"{line.name}: {'resolved and run' if line.runs_here else 'resolved only'}\n")
        sys.stdout.flush()
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
