"""Runs examples in one process like ``python -m examples.NAME``, because importing torchrec takes seconds.

Each line of standard input is a JSON list of a name and its arguments; the answer to each is one line.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import traceback

from torch import distributed as dist


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not be read as an answer
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        sys.argv = [name, *arguments]
        said, error = io.StringIO(), None
        try:
            with contextlib.redirect_stdout(said):
                runpy.run_module(f"examples.{name}", run_name="__main__", alter_sys=True)
        except BaseException:  # noqa: BLE001  it goes to the test, SystemExit too
            error = traceback.format_exc()
        finally:
            if dist.is_initialized():  # Lightning leaves its group until the process ends
                dist.destroy_process_group()
        answers.write(json.dumps({"said": said.getvalue(), "error": error}) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
