"""Record or compare traces: ``python -m tests.traces record FILE [TESTS ...]``, ``compare OLD NEW``."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.traces.compare import report, stable

_ROOT = Path(__file__).parents[2]
_STREAM = ("mirror", "pin", "pointer", "promotion", "retention", "rollback")
_TESTS = ["tests/predictor", "tests/recovery", *(f"tests/stream/test_{name}.py" for name in _STREAM)]
_PYTEST = "-m pytest -q -p no:cacheprovider -p tests.traces.plugin --hypothesis-profile=traces --hypothesis-seed=0"


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.traces", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run tests and worlds several times, and write their traces")
    recording.add_argument("file", type=Path)
    recording.add_argument("tests", nargs="*", default=_TESTS, help="arguments of pytest; default: tests of readers")
    recording.add_argument("--worlds", type=int, default=100, metavar="SEEDS", help="number of worlds (default: 100)")
    recording.add_argument("--runs", type=int, default=3, help="number of runs that must agree (default: 3)")
    comparison = commands.add_parser("compare", help="print the first difference of each trace, and a summary")
    comparison.add_argument("old", type=Path)
    comparison.add_argument("new", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        _record(arguments)
    else:
        old, new = (json.loads(gzip.decompress(path.read_bytes())) for path in (arguments.old, arguments.new))
        print(*report(old, new), sep="\n")


def _record(arguments: argparse.Namespace) -> None:
    """Write the traces of all runs, as far as they agree. The runs disturb each other, which shows what is stable."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        files = [[Path(folder) / f"{kind}-{run}" for kind in ("tests", "worlds")] for run in range(arguments.runs)]
        started = [process for pair in files for process in _started(arguments, *pair)]
        for process in started:
            process.wait()
        runs = [
            {name: trace for file in pair for name, trace in json.loads(file.read_text()).items()} for pair in files
        ]
    names = dict.fromkeys(name for run in runs for name in run)
    traces = {name: stable([run.get(name, {}) for run in runs]) for name in names}
    arguments.file.write_bytes(gzip.compress(json.dumps(traces).encode()))
    forms = Counter(reader["form"] for trace in traces.values() for reader in trace.values())
    print(f"{len(traces)} traces of {len(runs)} runs in {time.monotonic() - began:.0f} s; readers: {dict(forms)}")


def _started(arguments: argparse.Namespace, tests: Path, worlds: Path) -> list[subprocess.Popen[bytes]]:
    """Start the tests and the worlds, which write two files."""
    environ = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    commands = [
        [*_PYTEST.split(), "--traces", str(tests), *arguments.tests],
        ["-W", "ignore", "-m", "tests.traces.worlds", str(arguments.worlds), str(worlds)],
    ]
    return [subprocess.Popen([sys.executable, *each], cwd=_ROOT, env=environ) for each in commands]


if __name__ == "__main__":
    main()
