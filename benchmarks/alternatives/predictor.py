"""The predictor's process: ``python -m benchmarks.alternatives.predictor WAY PLACE FQN ROWS DIM TABLE``.

It prints ``ready`` once it serves a table, then looks at the last row every millisecond until standard input has a line
with that row's last value. It then saves the served table as the file TABLE, and prints when it served each value.
"""

from __future__ import annotations

import json
import select
import sys
import time

import numpy as np
import torch

from benchmarks.alternatives.receivers import RECEIVERS

_POLL_SECONDS = 0.001
_PATIENCE_SECONDS = 60.0


def main(argv: list[str]) -> None:
    """Serve, and print when each value of the last row was served."""
    way, place, fqn, num_rows, dim, path = argv
    torch.set_num_threads(1)
    receiver = RECEIVERS[way](place, fqn, int(num_rows), int(dim))
    marked, seen, last = int(num_rows) - 1, [(0.0, 0.0)], None
    deadline = time.monotonic() + _PATIENCE_SECONDS  # for the first table, and later for the last value
    while seen[-1][1] != last:
        receiver.look()
        value = receiver.value(marked)
        if value != seen[-1][1]:
            if len(seen) == 1:
                sys.stdout.write("ready\n")
                sys.stdout.flush()
                deadline = float("inf")
            seen.append((time.monotonic(), value))
        if last is None and select.select([sys.stdin], [], [], 0)[0]:
            last, deadline = float(sys.stdin.readline()), time.monotonic() + _PATIENCE_SECONDS
        assert time.monotonic() < deadline, f"{way}: the last row is {value}, and not {last}"
        time.sleep(_POLL_SECONDS)
    np.save(path, receiver.table().numpy())
    receiver.close()
    sys.stdout.write(json.dumps(seen[1:]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
