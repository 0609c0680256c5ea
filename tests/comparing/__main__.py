"""Run tests of a checkout with compared models: ``python -m tests.comparing CHECKOUT TEST ...``.

``CHECKOUT`` is a folder with the package ``torchrec`` of the tests, or ``-`` for the installed one; the tests are
arguments of pytest. The last lines count models, reads and rows, and name each difference and each refused model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.comparing.compared import RESULTS

_ROOT = Path(__file__).parents[2]
_SITE = Path(__file__).parent / "site"


def main(argv: Sequence[str]) -> int:
    """Run pytest; return 1 if a read lacked a row or had a wrong value."""
    checkout, *tests = argv
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        results.touch()
        checkouts = [] if checkout == "-" else [checkout]
        paths = [str(_SITE), *checkouts, str(_ROOT)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), RESULTS: str(results)}
        command = [sys.executable, "-P", "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
        subprocess.run(
            [*command, "-c", os.devnull, "--rootdir", *(checkouts or [folder]), *tests], env=env, check=False
        )
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    counts = Counter[str]()
    for line in lines:
        counts.update({"models": 1, **{key: line[key] for key in ("tables", "reads", "changed", "more")}})
    print(json.dumps(counts))
    for refused, number in Counter(line["refused"] for line in lines if line["refused"]).items():
        print(f"{number} models are refused: {refused}")
    faults = [f"{line['test']}: {fault}" for line in lines for fault in line["faults"]]
    print(*faults, sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
