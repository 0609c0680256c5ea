"""Releases of FBGEMM that were not built for the installed torch are named before they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interpreter import Interpreter, interpreter

_FIRST_USE = """
try:
    from delta_tracker import {name}
except ImportError as error:
    print(type(error).__name__, error)
else:
    print("imported")
"""


def _installed(folder: Path, package: str, version: str) -> None:
    """Install the metadata of a package, which pip finds before those of the environment."""
    place = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.fixture(scope="module")
def with_torch() -> Iterator[Interpreter]:
    with interpreter("torch", "torch.distributed.tensor") as each:
        yield each


@pytest.fixture(scope="module")
def with_torchrec() -> Iterator[Interpreter]:
    """Load what a pair that fits loads, because eight programs would take seconds for it."""
    with interpreter("fbgemm_gpu", "torchrec.distributed.model_parallel") as each:
        yield each


def _said(python: Interpreter, folder: Path, name: str = "ModelDeltaTracker") -> str:
    return python.run(_FIRST_USE.format(name=name), [folder]).strip()


@pytest.mark.promise("refused")
@pytest.mark.parametrize(
    ("torch", "package", "version", "command"),
    [
        ("2.13.0+cpu", "fbgemm-gpu-cpu", "1.9.0", "pip install --no-deps 'fbgemm-gpu-cpu==1.8.*'"),
        ("2.11.0+cu130", "fbgemm-gpu", "1.8.0", "pip install --no-deps 'fbgemm-gpu==1.6.*'"),
        (
            "2.13.0+cpu",
            "fbgemm-gpu",
            "1.8.0",
            "pip uninstall -y fbgemm-gpu && pip install --no-deps --force-reinstall 'fbgemm-gpu-cpu==1.8.*'",
        ),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_at_the_first_use(
    with_torch: Interpreter, tmp_path: Path, torch: str, package: str, version: str, command: str
) -> None:
    _installed(tmp_path, "torch", torch)
    _installed(tmp_path, package, version)
    wrong = f"{package} {version} was not built for torch {torch} and cannot be loaded"
    assert _said(with_torch, tmp_path) == f"MissingExtraError {wrong}. Install its match: {command}."


def test_a_pair_that_does_not_fit_is_not_loaded_by_a_predictor(with_torch: Interpreter, tmp_path: Path) -> None:
    _installed(tmp_path, "torch", "2.13.0+cpu")
    _installed(tmp_path, "fbgemm-gpu-cpu", "1.9.0")
    assert _said(with_torch, tmp_path, "Predictor") == "imported"


@pytest.mark.parametrize(
    ("torch", "version"),
    [
        ("2.13.1+cpu", "1.8.2"),
        ("2.99.0", "1.8.0"),
        ("2.13.0", "1.99.0"),
        ("2.14.0a0+git1", "1.9.0"),
        ("unknown", "1.8.0"),
    ],
)
def test_pairs_that_fit_or_are_not_known_are_accepted(
    with_torchrec: Interpreter, tmp_path: Path, torch: str, version: str
) -> None:
    _installed(tmp_path, "torch", torch)
    _installed(tmp_path, "fbgemm-gpu-cpu", version)
    assert _said(with_torchrec, tmp_path) == "imported"
