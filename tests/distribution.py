"""Build the sdist and the wheel, check them, and use the wheel in new environments: ``python -m tests.distribution``.

The sdist is built from the checkout and the wheel from the sdist. ``--out DIRECTORY`` keeps them, and leaves out the
environments. Each of these has the wheel and what its metadata require, hard-linked from the environment of
``--python``, because a download of torch takes minutes. pip must find all of it there: it has no package index.

- A trainer, with the extras ``torch`` and ``numba``, publishes a stream.
- A predictor, with ``torch``, applies it, and has the same rows.
- The command line says that it lacks the extra ``cli``. Once pip has followed that advice, it reads the stream without
  torch, and names the extra ``torch`` for a command that needs it.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from trove_classifiers import classifiers

_ROOT = Path(__file__).parent.parent
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
_NAME, _VERSION = _PROJECT["name"], _PROJECT["version"]
_STEM = f"{_NAME.replace('-', '_')}-{_VERSION}"
_METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
# What the library reads beside its code; the wheel must have these files, whatever the checkout has.
_READ = {
    "cli/report.html.jinja", "cli/report.js", "monitor/alerts.yml", "monitor/dashboard.json", "py.typed",
}  # fmt: skip

_TRAINER = """
import sys
import torch
from delta_tracker import ModelDeltaTracker, Publisher
model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16, sparse=True))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tracker = ModelDeltaTracker(model, engine="numba")
with Publisher(tracker, sys.argv[1]) as publisher:
    publisher.snapshot()
    model(torch.tensor([[7, 42, 7]])).sum().backward()
    optimizer.step()
    tracker.step()
    assert publisher.publish().num_rows == 2
print(publisher.version, model[0].weight.double().sum().item())
"""
_PREDICTOR = """
import sys
import torch
from delta_tracker import Predictor
model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16))
print(Predictor(model, sys.argv[1]).sync(), model[0].weight.double().sum().item())
"""
_FILE = "import delta_tracker; print(delta_tracker.__file__)"
_SITE = "import sysconfig; print(sysconfig.get_python_version(), sysconfig.get_paths()['purelib'])"


def build(out: Path) -> tuple[Path, Path]:
    """Build the sdist, and from it the wheel. Return their paths."""
    with tempfile.TemporaryDirectory() as folder:
        _hatchling("sdist", _ROOT, out)
        sdist = out / f"{_STEM}.tar.gz"
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        _hatchling("wheel", Path(folder) / _STEM, out)
    return sdist, out / f"{_STEM}-py3-none-any.whl"


def _hatchling(target: str, source: Path, out: Path) -> None:
    _run([sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)], cwd=source)


def check(sdist: Path, wheel: Path) -> None:
    """Check the contents and the metadata of the sdist and the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
    package = {name.removeprefix("delta_tracker/") for name in found if name.startswith("delta_tracker/")}
    rest = {name.removeprefix(f"{_STEM}.dist-info/") for name in found if not name.startswith("delta_tracker/")}
    assert rest == _METADATA, rest ^ _METADATA
    assert package == _files(_ROOT / "delta_tracker"), package ^ _files(_ROOT / "delta_tracker")
    assert package >= _READ, _READ - package
    with tarfile.open(sdist) as archive:
        names = {str(PurePosixPath(name).relative_to(_STEM)) for name in archive.getnames() if "/" in name}
    for part in ("Makefile", ".ci/run", "requirements-cpu.txt", "tests/distribution.py", "examples/README.md"):
        assert part in names, f"{part} is not in the sdist"
    _check_metadata(_metadata(wheel))


def _metadata(wheel: Path) -> Metadata:
    with zipfile.ZipFile(wheel) as archive:
        return Metadata.from_email(archive.read(f"{_STEM}.dist-info/METADATA"), validate=True)


def _check_metadata(metadata: Metadata) -> None:
    """Check what a package index reads: it rejects unknown fields and classifiers, and renders the description."""
    assert metadata.name == _NAME
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (_ROOT / "README.md").read_text()
    assert set(metadata.classifiers or ()) <= classifiers
    assert set(metadata.provides_extra or ()) == _PROJECT["optional-dependencies"].keys()
    required = {canonicalize_name(each.name) for each in metadata.requires_dist or ()}
    assert "delta-tracker" not in required, "the package index has another project of this name"


def _files(folder: Path) -> set[str]:
    """Return the names of the files below a folder, except compiled ones."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if "__pycache__" not in path.parts}


class Environment:
    """Virtual environment without pip, into which that of another interpreter installs.

    Args:
        folder: where to create it.
        python: interpreter of an environment with pip and the packages that are linked.
    """

    def __init__(self, folder: Path, python: str) -> None:
        self._bin, self._installer = folder / "bin", python
        _run([python, "-m", "venv", "--without-pip", str(folder)])
        self._version, self._source = _run([python, "-c", _SITE]).split()
        _, self._target = _run([self.python, "-c", _SITE]).split()

    @property
    def python(self) -> str:
        """Path of the interpreter."""
        return str(self._bin / "python")

    def install(self, requirement: str, needs: Iterable[Requirement], extras: Sequence[str] = ()) -> None:
        """Link what ``needs`` lists for some extras, unless it is there, and install the requirement with pip."""
        for distribution in self._closure(needs, extras):
            _link(distribution, Path(self._source), Path(self._target))
        pip = [self._installer, "-m", "pip", "--disable-pip-version-check", "--python", self.python]
        _run([*pip, "install", "--quiet", "--no-compile", "--no-index", requirement])

    def run(self, *command: str, code: int = 0) -> str:
        """Run a program of the environment and return what it printed."""
        return _run([str(self._bin / command[0]), *command[1:]], code=code)

    def _closure(self, needs: Iterable[Requirement], extras: Sequence[str]) -> Iterator[Distribution]:
        """Yield the distributions that fulfil requirements, and those that these require."""
        installed = {canonicalize_name(each.name): each for each in distributions(path=[self._source])}
        pending, seen = [(each, {"", *extras}) for each in needs], set[str]()
        while pending:
            each, wanted = pending.pop()
            environments = [{"python_version": self._version, "extra": extra} for extra in wanted]
            name = canonicalize_name(each.name)
            is_needed = each.marker is None or any(map(each.marker.evaluate, environments))
            if is_needed and name not in seen and name in installed:
                seen.add(name)
                yield installed[name]
                requires = map(Requirement, installed[name].requires or ())
                pending += [(required, {"", *each.extras}) for required in requires]


def _link(distribution: Distribution, source: Path, target: Path) -> None:
    """Link the files of a distribution from one folder of packages into another."""
    for name in distribution.files or ():
        if ".." in name.parts:
            continue
        if not (target / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(source / name, target / name)


def _run(command: Sequence[str], *, cwd: Path | None = None, code: int = 0) -> str:
    """Run a program, which must exit with ``code``, outside the checkout. Return what it printed."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_USER")}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            cwd=cwd or folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == code, f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def use(wheel: Path, python: str) -> None:
    """Install the wheel in the environments of a trainer, a predictor and the command line, and use it there."""
    # beside the packages that are linked, because a hard link cannot lead to another file system
    prefix = Path(_run([python, "-c", "import sys; print(sys.prefix)"]).strip())
    needs = _metadata(wheel).requires_dist or []
    with tempfile.TemporaryDirectory(dir=prefix, prefix="distribution-") as name:
        folder = Path(name)
        url = f"file://{folder / 'stream'}"
        trainer, predictor, command_line = (
            Environment(folder / role, python) for role in ("trainer", "predictor", "command-line")
        )
        trainer.install(f"{wheel}[torch,numba]", needs, ("torch", "numba"))
        assert str(folder) in trainer.run("python", "-c", _FILE)
        trained = trainer.run("python", "-W", "error", "-c", _TRAINER, url)
        predictor.install(f"{wheel}[torch]", needs, ("torch",))
        assert predictor.run("python", "-W", "error", "-c", _PREDICTOR, url) == trained
        command_line.install(str(wheel), needs)
        command_line.install(_advice(command_line, "--help"), needs, ("cli",))
        command_line.run("delta-tracker", "inspect", url)
        assert _advice(command_line, "verify", url) == f"{_NAME}[torch]"


def _advice(environment: Environment, *arguments: str) -> str:
    """Return what a command says to install. The name need not be registered: pip finds the installed distribution."""
    refused = environment.run("delta-tracker", *arguments, code=2)
    advice = re.search(r"Install it with: pip install '([^']+)'", refused)
    assert advice is not None, refused
    return advice[1]


def main(argv: Sequence[str]) -> int:
    """Build, check and use the packages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of an environment with torch and pip")
    parser.add_argument("--out", type=Path, help="directory for the sdist and the wheel")
    chosen = parser.parse_args(argv)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = build(Path(folder))
        check(sdist, wheel)
        if chosen.out is None:
            use(wheel, chosen.python)
        else:
            chosen.out.mkdir(parents=True, exist_ok=True)
            for path in (sdist, wheel):
                shutil.copy(path, chosen.out)
                sys.stdout.write(f"{chosen.out / path.name}\n")
    what = (
        "built and checked" if chosen.out else "built, checked, and used by a trainer, a predictor and the command line"
    )
    sys.stdout.write(f"{_NAME} {_VERSION}: {what} in {time.monotonic() - begin:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
