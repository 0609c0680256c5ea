"""Run the tests of what changed for up to a minute: ``python -m tests.check [BASE]``.

Changed are the files that differ from the commit BASE, and new files. BASE is by default the commit at which the branch
left its upstream, or HEAD if it has none. ``tests/changed.py`` selects the tests. Prints what was left out for lack of
time. Exits with 1 if a test failed, and with 2 if git does not know what changed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from tests.alone import runs
from tests.areas import areas_of
from tests.changed import select

_ROOT = Path(__file__).parent.parent
_SECONDS = 50
_NUM_AREAS = 4  # above which their command is longer than it helps
_OWN = re.compile(r"was changed|tests \S+")  # reason of a file that says most about the change
_NO_TESTS = 5  # pytest's exit status if a file has no test, or only sweeps


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout


def base_of(root: Path) -> str:
    """Return the commit at which the branch left its upstream, or HEAD."""
    try:
        return _git(root, "merge-base", "HEAD", "@{upstream}").strip()
    except subprocess.CalledProcessError:
        return "HEAD"


def changed_since(root: Path, base: str) -> set[str]:
    """Return the paths that differ from a commit; both paths of a file that was moved."""
    tracked = _git(root, "diff", "--name-only", "--no-renames", "--relative", "-z", base, "--")
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return set(f"{tracked}{untracked}".split("\0")) - {""}


def _sources(root: Path) -> dict[str, str]:
    folders = [root / name for name in ("delta_tracker", "tests", "benchmarks", "examples")]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return {str(path.relative_to(root)): path.read_text() for path in paths}


def main(arguments: list[str], root: Path = _ROOT) -> int:
    """Run the tests of what changed and print their outcomes; return the exit code."""
    try:
        base = arguments[0] if arguments else base_of(root)
        changed = changed_since(root, base)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        first = reason.strip().partition("\n")[0]  # outside a checkout, all options of git diff follow
        print(f"git does not know what changed: {first}", file=sys.stderr)
        print("Run `make check BASE=COMMIT` in a git checkout, or `make test-area AREA=...`.", file=sys.stderr)
        return 2
    if not changed:
        print(f"Nothing differs from {base}. For your last commit, run `make check BASE=HEAD~1`.")
        return 0
    begin = time.monotonic()
    selection = select(changed, _sources(root))
    print(
        f"{len(changed)} files differ from {base}; test files to run, for up to {_SECONDS} s: {len(selection.reasons)}"
    )
    failed, left_out = [], []
    # -x: a file that has failed ends, so that a test which the end of the time interrupts hides no failure
    for run in runs(selection.reasons, ["-x"], num_processes=2, seconds=_SECONDS):
        outcome = "FAILED" if run.status not in (0, _NO_TESTS) else "passed"
        if run.status is None:
            left_out.append(run.path)
            continue
        print(f"{outcome} {run.seconds:3.0f} s  {run.path} ({selection.reasons[run.path]})", flush=True)
        if outcome == "FAILED":
            failed.append(run.path)
            print(run.output, flush=True)
    passed = len(selection.reasons) - len(failed) - len(left_out)
    print(f"{passed} test files passed and {len(failed)} failed in {time.monotonic() - begin:.0f} s.", *failed)
    if left_out:
        areas = sorted({area for path in left_out for area in areas_of(path)})
        target = "make test" if len(areas) > _NUM_AREAS else f'make test-area AREA="{" ".join(areas)}"'
        print(f"Not complete, for lack of time: {len(left_out)} test files, such as {left_out[0]}. Run `{target}`.")
    if own := [path for path in left_out if _OWN.fullmatch(selection.reasons[path])]:
        print(f"At least run the tests of what changed: `.venv/bin/python -m pytest {' '.join(own)}`.")
    if selection.untested:
        print("No test names these files, so run `make test`:", *selection.untested)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
