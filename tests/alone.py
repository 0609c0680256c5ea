"""Run each test file by itself: ``python -m tests.alone [--collect] [WORD ...]``, the files whose paths have a word.

Each is a fork of this process, which has imported pytest and torch and nothing of ours, so that no file can rely on
what another one imported or left. With ``--collect`` the tests are found and not run. Exits with 1 if a file failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).parent.parent


def _runs(path: Path, arguments: list[str]) -> bool:
    """Run pytest on a file in a fork; return whether it had tests and all passed."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        status = pytest.main([str(path), "-q", "-x", "-p", "no:cacheprovider", *arguments])
        sys.stdout.flush()
        os._exit(int(status))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main() -> int:
    """Run the files and print those that failed; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collect", action="store_true", help="find the tests, do not run them")
    parser.add_argument("words", nargs="*", help="only files whose path has one of these")
    options = parser.parse_args()
    paths = [path for path in sorted((_ROOT / "tests").rglob("test_*.py")) if "__pycache__" not in path.parts]
    names = [path for path in paths if not options.words or any(word in str(path) for word in options.words)]
    failed = [path for path in names if not _runs(path, ["--collect-only"] if options.collect else [])]
    print(f"{len(names) - len(failed)} passed, {len(failed)} failed", *failed, sep="\n", flush=True)
    return 1 if failed or not names else 0


if __name__ == "__main__":
    sys.exit(main())
