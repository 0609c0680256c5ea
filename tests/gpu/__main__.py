"""Run the tests on a device, the most informative part first: ``python -m tests.gpu``, as ``make test-gpu`` does.

Each part is a process of its own, because an error of a CUDA kernel breaks its process. The parts with FBGEMM run only
if torchrec and fbgemm are installed, and on a GPU only if fbgemm has CUDA kernels. The device is that of
:mod:`tests.gpu.devices`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks import gpu_results
from benchmarks.gpu_needs import fbgemm_obstacle
from tests.gpu.devices import ENGINES, IS_CUDA, KIND, MISSING
from tests.gpu.parts import PARTS, Part

_ROOT = Path(__file__).parent.parent.parent
_NUM_SHOWN = 200  # characters of a line about a failed test
_SHOWN = ("torch", "triton", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")


def probe(*, wants_fbgemm: bool) -> bool:
    """Print the device and versions. Return True if the parts with FBGEMM are wanted and can run."""
    print(f"device: {KIND}")
    fields: dict[str, object] = {}
    if IS_CUDA:
        if not torch.cuda.is_available():
            sys.exit(f"torch {torch.__version__} of {sys.executable} finds no CUDA device: pass DEVICE=simulated")
        properties = torch.cuda.get_device_properties(0)
        fields = {
            "name": properties.name,
            "GiB": properties.total_memory >> 30,
            "capability": torch.cuda.get_device_capability(),
            "CUDA": torch.version.cuda,
            "driver": _driver(),
        }
        print("  " + ", ".join(f"{name} {value}" for name, value in fields.items()))
        values = torch.arange(1000, device="cuda")
        assert int((values * values).sum()) == sum(n * n for n in range(1000)), "the device computes wrong sums"
    else:
        for name, description in MISSING.items():
            print(f"  without {name}: {description}")
    print(f"versions: python {sys.version.split()[0]}, " + ", ".join(filter(None, map(_version, _SHOWN))))
    print(f"engines of row sets: {', '.join(ENGINES)}")
    gpu_results.append("device", device=KIND, engines=ENGINES, **fields)
    if not wants_fbgemm:
        return False
    obstacle = fbgemm_obstacle(KIND)
    print(f"FBGEMM's kernels: {f'no, only the parts that need torch alone run: {obstacle}' if obstacle else 'yes'}")
    return not obstacle


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def _run(part: Part, log: Path) -> str:
    """Run a part, append what pytest says to ``log``, print the names of failed tests, and return the outcome."""
    # A newer torch than the pinned one warns about other things, which is no error here.
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"]
    command += ["-p", "benchmarks.gpu_results"]
    command += ["--no-header", "--tb=short", "-o", "minversion=7", *part.paths]
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"DELTA_TRACKER_DEVICE": KIND, "PYTHONPATH": path}
    begin = time.perf_counter()
    with log.open("a+") as said:
        print(f"\n== {part.title}", file=said, flush=True)
        said.seek(0, os.SEEK_END)
        start = said.tell()
        try:
            done = subprocess.run(
                command, check=False, cwd=_ROOT, env=env, timeout=part.seconds * 4, stdout=said, stderr=said
            )
        except subprocess.TimeoutExpired:
            return f"stopped after {part.seconds * 4} s"
        finally:
            said.seek(start)
            for line in said:
                if line.startswith(("FAILED ", "ERROR ")):
                    print(line.rstrip()[:_NUM_SHOWN], flush=True)
    code = done.returncode
    outcome = {0: "passed", 5: "nothing to run"}.get(code, f"FAILED, exit code {code}")
    return f"{outcome}, {time.perf_counter() - begin:.0f} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts whose titles have a given word, by default all. Return 0 if none failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="run only the parts whose titles have one of these")
    parser.add_argument("--log", type=Path, default=Path("test-gpu.log"), help="file for the output of all tests")
    arguments = parser.parse_args(argv)
    words, log = arguments.words, arguments.log.absolute()
    log.unlink(missing_ok=True)
    chosen = [part for part in PARTS if not words or any(word in part.title for word in words)]
    if not chosen:
        parser.error(f"no part has one of {words} in its title: {[part.title for part in PARTS]}")
    has_fbgemm = probe(wants_fbgemm=any(part.needs_fbgemm for part in chosen))
    outcomes = {part.title: "not run: needs FBGEMM" for part in chosen if part.needs_fbgemm and not has_fbgemm}
    chosen = [part for part in chosen if part.title not in outcomes]
    if not IS_CUDA:  # no part breaks the process, and each would import torch again
        paths = [path for part in chosen for path in part.paths]
        chosen = [Part(f"{len(chosen)} parts in one process", tuple(paths), 150)] if chosen else []
    for part in chosen:
        print(f"\n== {part.title}", flush=True)
        outcomes[part.title] = _run(part, log)
        gpu_results.append("part", name=part.title, outcome=outcomes[part.title])
    print(f"\n{'part':<55} on {KIND}")
    for title, outcome in outcomes.items():
        print(f"{title:<55} {outcome}")
    print(f"the output of the tests: {log}")
    return int(any(outcome.startswith(("FAILED", "stopped")) for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
