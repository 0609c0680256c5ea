"""Check what the tests and benchmarks for GPUs need, before they import it.

``python -m benchmarks.gpu_needs PACKAGE ...`` exits with a message if a package is missing. It needs Python alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

_OLDEST = (3, 11)
# The dependencies of the library; tests/README.md names those of the tests.
_PACKAGES = ("torch", "numpy", "obstore", "xxhash", "msgspec")

_PROBE_SECONDS = 120
# Adds two bags of one row; it fails if fbgemm was built without CUDA or for another GPU.
_PROBE_FBGEMM = """
import sys, torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
import torchrec
on_gpu = sys.argv[1] == "cuda"
place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
tables = SplitTableBatchedEmbeddingBagsCodegen([(10, 8, *place)], device=torch.device("cuda" if on_gpu else "cpu"))
device = tables.current_device
ids, offsets = torch.tensor([3, 4], device=device), torch.tensor([0, 1, 2], device=device)
tables(ids, offsets).sum().backward()
print(tables.split_embedding_weights()[0].sum().item())
"""


def fbgemm_obstacle(device: str) -> str:
    """Return the reason why FBGEMM's kernels do not run; an empty string if they do.

    Args:
        device: ``"cuda"``; FBGEMM's kernels for CPUs are checked for any other name.
    """
    missing = [name for name in ("torchrec", "fbgemm_gpu") if find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    command = [sys.executable, "-W", "ignore", "-c", _PROBE_FBGEMM, device]
    try:
        done = subprocess.run(  # noqa: S603  our program
            command, check=False, capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"fbgemm does not finish a lookup of two rows within {_PROBE_SECONDS} s"
    return "" if done.returncode == 0 else f"fbgemm does not run here:\n{done.stderr[-2000:]}"


def main(packages: Sequence[str]) -> int:
    """Print what is missing to standard error. Return 0 if nothing is missing.

    Args:
        packages: names of further packages that are needed.
    """
    found = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info < _OLDEST:
        sys.stderr.write(f"Python 3.11 or newer is needed: {sys.executable} is {found}. Pass PYTHON=...\n")
        return 1
    missing = [name for name in (*_PACKAGES, *packages) if find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"missing packages: {', '.join(missing)}. Install them for {sys.executable}, or pass PYTHON=...\n"
        )
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
