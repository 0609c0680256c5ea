"""The program that runs TorchRec's tests of its tracker with our names, on a checkout with other tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchrec_tests.__main__ import Different, problems
from tests.torchrec_tests.rewriting import with_imports, without_imports

_ROOT = Path(__file__).parents[2]
_SOURCE = '''"""A module."""
import torch, sys
from torch import nn
from torchrec.distributed.model_tracker.delta_store import (
    DeltaStoreTrec,
    _unique as unique,
)
from torchrec.distributed.model_tracker.tests.utils import TABLES
from torchrec.distributed.model_trackers import other; size = len


def num_tables() -> int:
    from torchrec.distributed.model_tracker import Trackers; return size(TABLES)
'''
_HOMES = {
    "import torch": "stand_ins",
    "torchrec.distributed.model_tracker": "delta_tracker.compat",
    "torchrec.distributed.model_tracker.tests.utils": "helpers",
}
_TESTS = {
    "utils.py": "NAMES = {'default'}\n",
    "test_store.py": """import unittest
import torch
from torchrec.distributed.model_tracker.delta_store import DeltaStoreTrec
from torchrec.distributed.model_tracker.tests.utils import NAMES

class Store(unittest.TestCase):
    def test_home(self):
        self.assertEqual(DeltaStoreTrec.__module__, MODULE)
        self.assertEqual(NAMES, {'default'})

    @unittest.skipIf(torch.cuda.device_count() < 2, 'two GPUs')
    def test_device(self):
        torch.zeros(1, device=torch.device('cuda:1'))

    def test_tracker_embedding_mode_2_assert_on_validation(self):
        with self.assertRaises(AssertionError):
            assert MODULE != 'passes'
""",
}


def test_only_imports_are_changed() -> None:
    changed = with_imports(_SOURCE, _HOMES, "first")
    assert changed.splitlines() == [
        '"""A module."""',
        "import first; from stand_ins import torch; import sys",
        "from torch import nn",
        "from delta_tracker.compat import DeltaStoreTrec; from delta_tracker.compat import _unique as unique",
        *[""] * 3,
        "from helpers import TABLES",
        "from torchrec.distributed.model_trackers import other; size = len",
        *[""] * 2,
        "def num_tables() -> int:",
        "    from delta_tracker.compat import Trackers; return size(TABLES)",
    ]
    assert without_imports(changed) == without_imports(_SOURCE)
    for other in (_SOURCE.replace("= len", "= max"), _SOURCE.replace("\ndef", "def")):
        assert without_imports(other) != without_imports(_SOURCE)


def test_what_is_not_as_expected_is_named() -> None:
    different = {"b": Different("b is none", "ValueError: none")}
    assert list(problems({"a": "", "b": "... ValueError: none"}, different)) == []
    assert list(problems({"a": "an error"}, {})) == ["a fails:\nan error"]
    assert list(problems({"b": "KeyError: none"}, different)) == ["b fails:\nKeyError: none"]
    assert ["b passes, and must" in each for each in problems({"b": ""}, different)] == [True]
    assert ["b is missing, and" in each for each in problems({"a": ""}, different)] == [True]


def _run(checkout: Path, *options: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-W", "ignore", "-m", "tests.torchrec_tests", *options, str(checkout)]
    return subprocess.run(program, cwd=_ROOT, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    ("options", "module", "num_passed", "status"),
    [
        ([], "delta_tracker.compat", 2, 0),
        (["--own"], "torchrec.distributed.model_tracker.delta_store", 2, 1),
        ([], "another", 1, 1),
        ([], "passes", 2, 1),
    ],
)
def test_the_tests_of_a_checkout_run(
    tmp_path: Path, options: list[str], module: str, num_passed: int, status: int
) -> None:
    folder = tmp_path / "torchrec" / "distributed" / "model_tracker" / "tests"
    folder.mkdir(parents=True)
    for name, source in _TESTS.items():
        (folder / name).write_text(source.replace("MODULE", repr(module)))
    result = _run(tmp_path, *options)
    assert result.returncode == status, result.stdout + result.stderr
    assert f"test_store.py: {num_passed} of 3 pass" in result.stdout
    for name, source in _TESTS.items():
        assert (folder / name).read_text() == source.replace("MODULE", repr(module))


def test_another_folder_is_refused(tmp_path: Path) -> None:
    result = _run(tmp_path)
    assert result.returncode == 2
    assert "clone github.com/meta-pytorch/torchrec, and pass it" in result.stderr
