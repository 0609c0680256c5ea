"""Compatibility of FBGEMM releases with torch releases.

FBGEMM's libraries are compiled for one minor release of torch, but its wheels do not declare this dependency. With
another release of torch, importing FBGEMM fails with an ``OSError`` or an undefined symbol. The error message does not
name the two packages.
"""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from delta_tracker.errors import MissingExtraError

FBGEMM_OF_TORCH: Mapping[str, str] = {
    "2.6": "1.1",
    "2.7": "1.2",
    "2.8": "1.3",
    "2.9": "1.4",
    "2.10": "1.5",
    "2.11": "1.6",
    "2.12": "1.7",
    "2.13": "1.8",
    "2.14": "1.9",
}
"""Mapping from a minor release of torch to the FBGEMM release that was built for it. All pairs work with torchrec."""

_CUDA, _CPU = "fbgemm-gpu", "fbgemm-gpu-cpu"  # both install the import name fbgemm_gpu
_MINOR = re.compile(r"(\d+\.\d+)\b")


def check_pair() -> None:
    """Check that the installed FBGEMM was built for the installed torch. The check takes about a millisecond.

    It imports neither package. It passes if FBGEMM is not installed, or if :data:`FBGEMM_OF_TORCH` does not list the
    release. Raises MissingExtraError if FBGEMM was built for another torch release, or for CUDA but torch for the CPU.
    """
    torch, cuda, cpu = _installed("torch"), _installed(_CUDA), _installed(_CPU)
    wanted = FBGEMM_OF_TORCH.get(_minor(torch))
    if wanted is None:
        return
    if torch.endswith("+cpu") and cuda:
        line = f"pip uninstall -y {_CUDA} && pip install --no-deps --force-reinstall '{_CPU}=={wanted}.*'"
        raise MissingExtraError(f"{_CUDA} {cuda}", None, other=f"torch {torch}", command=line)
    for package, found in ((_CUDA, cuda), (_CPU, cpu)):
        if _minor(found) in FBGEMM_OF_TORCH.values() and _minor(found) != wanted:
            line = f"pip install --no-deps '{package}=={wanted}.*'"
            raise MissingExtraError(f"{package} {found}", None, other=f"torch {torch}", command=line)


def _installed(package: str) -> str:
    """Return the version of a package; empty if the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _minor(release: str) -> str:
    """Return the minor release of a version, such as ``2.13``; empty if it has none."""
    found = _MINOR.match(release)
    return "" if found is None else found[1]
