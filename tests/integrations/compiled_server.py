"""Server of a compiled model, a process that tests kill: follows a stream, and saves its tensors and outputs.

``python -m tests.integrations.compiled_server PACKAGE URL OUT [--once]``
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from delta_tracker import Predictor
from delta_tracker.integrations.aot_inductor import CompiledModel
from tests.integrations.test_aot_inductor import INPUTS


def main() -> None:
    package, url, out = sys.argv[1:4]
    model = CompiledModel(package)
    predictor = Predictor(model.tensors, url)
    if sys.argv[4:] != ["--once"]:
        predictor.follow(0.001)
        print("follows", flush=True)
        time.sleep(600)
    version = predictor.sync()
    with predictor.reading():
        torch.save({"version": version, "tensors": model.tensors, "output": model(*INPUTS)}, Path(out))


if __name__ == "__main__":
    main()
