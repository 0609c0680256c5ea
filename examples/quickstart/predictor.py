"""Follow the trainer's stream, and answer from the live table until Ctrl-C.

Run it in this folder, before, during or after the trainer: ``python predictor.py``
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from delta_tracker import Predictor

URL = sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "quickstart"


def main() -> None:
    """Apply each version as soon as it is committed, and print an answer of the model."""
    model = nn.Sequential(nn.EmbeddingBag(1000, 16), nn.Linear(16, 1))  # the trainer's names, without its wrapper
    with Predictor(model, URL) as predictor:
        predictor.follow(poll_seconds=0.1)  # in a thread; the trainer may start later
        try:
            version = predictor.wait()  # for the first version: before it, the model has its random values
            while True:
                with predictor.reading() as view, torch.inference_mode():  # no row changes inside this block
                    score = model(torch.tensor([[7, 42]])).item()
                print(f"version {view.version}: score {score:.6f}", flush=True)
                version = predictor.wait(version + 1)  # sleeps until a newer version has been applied
        except KeyboardInterrupt:
            print(f"stopped at version {predictor.version}")


if __name__ == "__main__":
    main()
