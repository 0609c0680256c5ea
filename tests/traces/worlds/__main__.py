"""Traces of random worlds: ``python -m tests.traces.worlds SEEDS FILE``."""

import json
import logging
import sys
from pathlib import Path

from tests.simulation import threads

threads.install()

from tests.simulation.everything import prepare  # noqa: E402
from tests.simulation.values import generate  # noqa: E402
from tests.simulation.world import run  # noqa: E402
from tests.traces import recorder  # noqa: E402

if __name__ == "__main__":
    prepare()
    recorder.install()
    logging.disable(logging.CRITICAL)
    traces = {}
    for seed in range(int(sys.argv[1])):
        with recorder.recording() as trace:
            findings = run(generate(seed))
        found = [{"call": f"operation {each.number}", "events": [], "raises": each.rule} for each in findings]
        traces[f"world {seed}"] = trace.readers | {"findings": {"versions": [], "calls": found}}
    Path(sys.argv[2]).write_text(json.dumps(traces))
