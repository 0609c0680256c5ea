"""The functions that the README's first program runs, and the files that they are in.

Run it as ``python -m benchmarks.spine``. A newcomer who follows one row from the training step to the served table
reads these. Functions and methods of ``delta_tracker`` count once if they run in any thread after the import; lambdas
and comprehensions belong to the function around them. ``--show`` lists the functions by file.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import runpy
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType

import delta_tracker

_PACKAGE = Path(delta_tracker.__file__).parent
_README = _PACKAGE.parent / "README.md"


def functions_by_file() -> dict[str, set[str]]:
    """Run the program; return the qualified names of the functions that it runs, by path in the package."""
    program = re.findall(r"```python\n(.*?)```", _README.read_text(), re.DOTALL)[0]
    found: dict[str, set[str]] = defaultdict(set)
    prefix = f"{_PACKAGE}{os.sep}"

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix) and code.co_flags & CO_OPTIMIZED:
            # not the body of a module or class
            name = re.sub(r"\.<locals>\.<\w+>", "", code.co_qualname)
            if not name.startswith("<"):  # a comprehension in the body of a module
                found[code.co_filename.removeprefix(prefix)].add(name)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "program.py"
            path.write_text(program)
            runpy.run_path(str(path))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return dict(found)


def num_docstring_lines(path: Path) -> int:
    """Return how many lines of a file of Python are docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first_statements = (
        node.body[0] for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented) and node.body
    )
    return sum(
        node.end_lineno - node.lineno + 1
        for node in first_statements
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and node.end_lineno is not None
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run, count and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spine")
    parser.add_argument("--show", action="store_true", help="list the functions by file")
    arguments = parser.parse_args(argv)
    found = functions_by_file()
    paths = [_PACKAGE / name for name in found]
    lines = sum(len(path.read_text().splitlines()) for path in paths)
    for name in sorted(found) if arguments.show else ():
        sys.stdout.write(f"{name}\n" + "".join(f"    {function}\n" for function in sorted(found[name])))
    figures = {
        "functions": sum(map(len, found.values())),
        "files": len(found),
        "lines": lines,
        "lines_without_docstrings": lines - sum(map(num_docstring_lines, paths)),
    }
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
