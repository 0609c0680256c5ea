"""Forks while `follow()` runs, as in web servers that preload: a child reads complete rows without waiting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked
from tests.sweeps import SWEEPS_ARE_WHOLE

# Each child has a watchdog: an alarm, whose default action ends the process.
_PRELUDE = """
import os, signal, sys, threading, time
import torch
torch.set_num_threads(1)
from delta_tracker import ModelTarget, Predictor
from delta_tracker.errors import StreamError
from tests.notifiers import LocalNotifier
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.serving import Breakable
from tests.stream.streams import FQN, Writer

def in_child(work):
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(120)
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)
    os._exit(0)

writer = Writer(Storage(sys.argv[1], create=True, fsync=False), num_rows=64, dim=64)
writer.snapshot()

def publish(value):
    writer.table.fill_(value)
    return writer.snapshot()
"""

_MANY = '''
import faulthandler
faulthandler.dump_traceback_later(230, exit=True)
from delta_tracker.row_target import TensorTarget

class Halves(TensorTarget):
    """Writes each row in two steps with a pause between them, in which a fork would find it torn."""

    def write(self, ids, values, columns):
        middle = columns[1] // 2
        super().write(ids, values[:, :middle], (0, middle))
        time.sleep(0.001)
        super().write(ids, values[:, middle:], (middle, columns[1]))

MOST_VERSIONS = 10_000  # of 16 KiB: a child that hangs must not let the publisher fill the disk
notifier = LocalNotifier()
model = writer.model()
predictor = Predictor(ModelTarget({FQN: Halves.of(model[FQN])}, chunk_rows=4), writer.storage)
predictor.sync()
predictor.follow(poll_seconds=1e-6, notifier=notifier)
done = threading.Event()

def train():
    for value in range(1, MOST_VERSIONS):
        if done.is_set():
            return
        notifier.announce(writer.claim.head.stream, publish(value).version)
    print(f"{MOST_VERSIONS} versions were published, and only {len(codes)} children have ended", flush=True)
    os._exit(1)

def look_up():
    while not done.is_set():
        with predictor.reading():
            model[FQN].sum()

def child(number):
    with predictor.reading() as served:
        rows = model[FQN].clone()
    assert bool((rows == rows[:, :1]).all()), "a row is torn"
    values = {int(value) for value in rows[:, 0]}
    if served.applying is None:
        assert len(values) == 1, f"version {served.version} is said to be whole: {values}"
    status = predictor.status()
    assert status.error.startswith("FollowEndedError: this process was forked while follow() ran"), status.error
    assert predictor.version == served.version, "nothing moves"
    predictor.stop()
    if number % 40 == 0:
        end = threading.Event()
        predictor.follow(poll_seconds=0.001)
        while predictor.version < served.version + 2 or predictor.error is not None:
            time.sleep(0.001)
        predictor.stop()
        assert predictor.status().error is None

# A first call of a function of torch registers a destructor. During a fork in another thread, it leaves the lock for
# this held in the child (glibc 2.36), which then waits for ever in its own first calls.
publish(0)
model[FQN].sum()

codes = []
threads = [threading.Thread(target=work) for work in (train, look_up)]
for thread in threads:
    thread.start()
while len(codes) < int(sys.argv[2]) and not any(codes):
    codes.append(in_child(lambda: child(len(codes))))
done.set()
for thread in threads:
    thread.join()
predictor.stop()
with predictor.reading() as served:  # stop() may have ended the thread in the middle of a version
    assert served.applying is not None or model[FQN].unique().numel() == 1
assert not any(codes), (len(codes), codes[-1])
'''

# A target that forks while it writes, and a fork inside `reading()`: the thread that forks must not wait for itself.
_BY_HOLDERS = """
target = Breakable.of(writer.model()[FQN])
predictor = Predictor(ModelTarget({FQN: target}, chunk_rows=32), writer.storage)
predictor.sync()
codes = []

def in_a_write(number):
    if number == 2:
        codes.append(in_child(lambda: None))

target.num_writes, target.before_write = 0, in_a_write
publish(1)
predictor.sync()
with predictor.reading():
    def child():
        with predictor.reading() as served:
            assert served == (predictor.version, None)
    codes.append(in_child(child))

def inside():
    with predictor.reading():
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        signal.alarm(120)
    publish(2)
    predictor.sync()  # the block of the parent that the child has left holds it up no more
    os._exit(0)

codes.append(inside())
assert codes == [0, 0, 0], codes
predictor.sync()
"""

# A write takes longer than a fork waits: the child reports that rows may be torn until it has applied the version.
_TOO_SLOW = """
target = Breakable.of(writer.model()[FQN])
table = target.regions[0].memory
predictor = Predictor(ModelTarget({FQN: target}, chunk_rows=32), writer.storage)
predictor.sync()
slow, gate = threading.Event(), threading.Event()

def wait(number):
    slow.set()
    gate.wait()

target.before_write = wait
publish(1)
predictor.follow(poll_seconds=0.001)
slow.wait()

def child():
    target.before_write = lambda number: None
    try:
        with predictor.reading():
            raise AssertionError("it may be torn")
    except StreamError as error:
        assert "torn" in str(error)
    predictor.sync()
    with predictor.reading() as served:
        assert served.applying is None
        assert torch.equal(table, writer.table)
    assert predictor.status().error is None

begin = time.monotonic()
code = in_child(child)
gate.set()
predictor.stop()
assert code == 0, code
"""


def _run(program: str, tmp_path: Path, *arguments: str, prelude: str = _PRELUDE) -> None:
    path = tmp_path / "program.py"
    path.write_text(prelude + program)
    done = forked.run(str(path), f"file://{tmp_path}/stream", *arguments, timeout_seconds=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


_WAITING = """
from delta_tracker.errors import FollowEndedError
model = writer.model()
with Predictor(model, writer.storage) as predictor:
    predictor.follow()
    assert predictor.wait(timeout=240) == 1

    def child():
        try:
            predictor.wait(99)  # the parent's thread does not exist here
        except FollowEndedError as error:
            assert "Call follow() or sync() in this process" in str(error), error
        else:
            raise AssertionError("nothing was raised")
        predictor.follow(poll_seconds=0.001)
        assert predictor.wait(2, timeout=240) == 2
        predictor.stop()
        assert torch.equal(model[FQN], writer.table)

    publish(3)
    assert in_child(child) == 0
    assert predictor.wait(2, timeout=240) == 2
"""


@pytest.mark.advice("FollowEndedError: Follower.after_fork_in_child ModelWriter.reading")
@pytest.mark.sweep("short")
def test_many_children_of_a_process_that_follows(tmp_path: Path) -> None:
    _run(_MANY, tmp_path, "60" if SWEEPS_ARE_WHOLE else "15")


@pytest.mark.advice("FollowEndedError: Follower.after_fork_in_child ModelWriter.reading")
@pytest.mark.parametrize("program", [_BY_HOLDERS, _TOO_SLOW, _WAITING], ids=["by holders", "too slow", "waiting"])
def test_children_of_a_process_that_follows(tmp_path: Path, program: str) -> None:
    _run(program, tmp_path)


_REMOTE = """
import http.server
import torch
from delta_tracker.errors import StorageError

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
options = {
    "endpoint": f"http://127.0.0.1:{server.server_port}", "allow_http": "true", "region": "us-east-1",
    "access_key_id": "a", "secret_access_key": "b",
}
storage = Storage("s3://bucket/prefix", options=options)
predictor = Predictor({"t": torch.zeros(2, 2)}, storage)
first = Storage("s3://bucket/other", options=options)
assert storage.read("log/1", max_bytes=1) is None

def child():
    for each in (storage, first, Storage("s3://bucket/third", options=options)):
        for call in (lambda: each.read("log/1", max_bytes=1), lambda: each.names("log"), lambda: each.size("log/1")):
            try:
                call()
            except StorageError as error:
                assert "forked" in str(error), error
                assert "with spawn, or use no store before the fork" in str(error), error
            else:
                raise AssertionError("it cannot have been asked")
    status = predictor.status()
    assert (status.version, status.lag_versions) == (None, None)
    with predictor.reading() as served:
        assert served == (None, None)

code = in_child(child)
assert code == 0, code
"""
_REMOTE_AFTER_A_FORK = (
    """
import os, threading
from delta_tracker import Storage
"""
    + _REMOTE[: _REMOTE.index("storage = Storage")].replace("import torch\n", "")
    + """
pid = os.fork()
if pid == 0:
    os._exit(Storage("s3://bucket/prefix", options=options).read("log/1", max_bytes=1) is not None)
assert os.waitpid(pid, 0)[1] == 0
"""
)


@pytest.mark.advice("StorageError: BucketStore._client")
def test_a_remote_store_is_refused_in_a_child_instead_of_waiting_for_ever(tmp_path: Path) -> None:
    _run(_REMOTE, tmp_path)
    _run(_REMOTE_AFTER_A_FORK, tmp_path, prelude="")
