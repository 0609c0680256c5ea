"""Run TorchRec's tests of its tracker with ``delta_tracker.compat``. The package's docstring has the details."""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import unittest
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Never

import torch

from tests.torchrec_tests.rewriting import with_imports


class Different(NamedTuple):
    """What a test asserts that the library does better, and the error with which it therefore fails."""

    asserts: str
    error: str


DIFFERENT = {
    "test_tracker_embedding_mode_2_assert_on_validation": Different(
        "EMBEDDING mode rejects an EmbeddingBagCollection, because its lookups return pooled rows. This library reads "
        "the rows of the tables",
        "AssertionError: AssertionError not raised",
    )
}

_TESTS = Path("torchrec", "distributed", "model_tracker", "tests")
_PACKAGE = "torchrec_tracker_tests"  # of the tests with other imports
_OURS = {"torchrec.distributed.model_tracker": "delta_tracker.compat"}
_PATCH = "tests.torchrec_tests.patched"
_STAND_INS = "tests.torchrec_tests.stand_ins"
_ON_GPUS = (
    "import torch",
    "torchrec.distributed.planner.EmbeddingShardingPlanner",
    "fbgemm_gpu.split_embedding_configs",
)
_SECONDS = 300  # for each test


class _Outcomes(unittest.TestResult):
    """Outcomes of tests by name: an empty text, or the error. Each is printed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        signal.alarm(_SECONDS)

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        signal.alarm(0)
        super().stopTest(test)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().addSuccess(test)
        self._add(test, "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        super().addSkip(test, reason)
        self._add(test, f"skipped: {reason}")

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addError(test, err)
        self._add(test, self.errors[-1][1])

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addFailure(test, err)
        self._add(test, self.failures[-1][1])

    def _add(self, test: unittest.TestCase, error: str) -> None:
        name = test.id().rpartition(".")[2]
        self.found[name] = error
        print("fail" if error else "pass", name, flush=True)


def problems(outcomes: Mapping[str, str], different: Mapping[str, Different]) -> Iterator[str]:
    """Yield what is not as expected: tests that fail, and those in ``different`` that do not, or in another way."""
    for name, error in outcomes.items():
        if error and (name not in different or different[name].error not in error):
            yield f"{name} fails:\n{error}"
    for name in different:
        if not outcomes.get(name):
            yield f"{name} {'passes' if name in outcomes else 'is missing'}, and must fail: correct DIFFERENT"


def main() -> int:
    """Run the tests; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.torchrec_tests", description=__doc__)
    parser.add_argument("checkout", type=Path, help="folder of a checkout of TorchRec")
    parser.add_argument("--own", action="store_true", help="run them with TorchRec's own tracker")
    arguments = parser.parse_args()
    sources = {path.name: path.read_text() for path in sorted((arguments.checkout / _TESTS).glob("*.py"))}
    if not any(name.startswith("test_") for name in sources):
        parser.error(
            f"{arguments.checkout} has no {_TESTS}/test_*.py: clone github.com/meta-pytorch/torchrec, and pass it"
        )
    stand_ins = [] if find_spec("parameterized") else ["parameterized"]
    stand_ins += _ON_GPUS if torch.cuda.device_count() < 2 else []
    homes = {} if arguments.own else dict(_OURS)
    homes |= {".".join([*_TESTS.parts, name[:-3]]): f"{_PACKAGE}.{name[:-3]}" for name in sources}
    homes |= dict.fromkeys(stand_ins, _STAND_INS)
    print(f"torchrec {version('torchrec')}, stand-ins for {', '.join(stand_ins) or 'nothing'}")
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / _PACKAGE
        package.mkdir()
        for name, source in sources.items():
            (package / name).write_text(with_imports(source, homes, "" if arguments.own else _PATCH))
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # of the process that forks the ranks
        outcomes = _run([name[:-3] for name in sources if name.startswith("test_")])
    different = {} if arguments.own else DIFFERENT
    for name, difference in different.items():
        print(f"{name} must fail. It asserts that {difference.asserts}.")
    found = list(problems(outcomes, different))
    print(*found, sep="\n")
    return 1 if found else 0


def _run(names: list[str]) -> dict[str, str]:
    """Run the tests of some modules; return the error of each test, empty if it passed."""
    multiprocessing.set_forkserver_preload([f"{_PACKAGE}.{name}" for name in names])  # once, not by each rank
    signal.signal(signal.SIGALRM, _stop)
    outcomes: dict[str, str] = {}
    for name in names:
        try:
            module = importlib.import_module(f"{_PACKAGE}.{name}")
        except ImportError as error:
            outcomes[name] = str(error)
            continue
        result = _Outcomes()
        unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
        print(f"{name}.py: {list(result.found.values()).count('')} of {len(result.found)} pass")
        outcomes |= result.found
    return outcomes


def _stop(*_: object) -> Never:
    raise TimeoutError(f"a test took more than {_SECONDS} s")


if __name__ == "__main__":
    raise SystemExit(main())
