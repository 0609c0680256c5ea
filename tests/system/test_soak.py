"""A short run of all components in one process, with a watchdog on every lock."""

from __future__ import annotations

import json
from pathlib import Path

from tests import forked

_ROOT = Path(__file__).parent.parent.parent

_HOLD_TOO_LONG = """
import threading, time
from tests.system import watched_locks

waits = watched_locks.install(limit_seconds=0.5)
lock, condition = threading.Lock(), threading.Condition()
with condition:
    condition.wait(0.2)  # no wait for a lock
assert waits.num_acquired and not waits.too_long, waits


def hold(is_held):
    with lock:
        is_held.set()
        while not waits.too_long:
            time.sleep(0.001)


is_held = threading.Event()
thread = threading.Thread(target=hold, args=(is_held,))
thread.start()
is_held.wait()
with lock:
    pass
thread.join()
stacks, seconds = waits.too_long
assert "in hold" in stacks, stacks
assert waits.longest[0] > 0.5, waits
"""


def _run(program: str, *arguments: str) -> str:
    # The library is imported again, under the watchdog.
    done = forked.run(program, *arguments, timeout_seconds=200, root=_ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout


def test_all_components_at_once_never_wait_long_and_leave_no_thread() -> None:
    seen = json.loads(_run("tests.system.soak", "--seconds", "2"))
    assert seen["problems"] == 0
    assert seen["versions"] > 3
    assert seen.get("forks: load", 0) + seen.get("forks: serve", 0) > 1
    assert seen["lookups"] > 10
    assert seen["locks acquired"] > 1000


def test_the_watchdog_finds_a_wait_for_a_lock(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_HOLD_TOO_LONG)
    _run(str(tmp_path / "program.py"))
