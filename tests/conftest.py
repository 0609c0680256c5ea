"""Fixtures: pools of ranks and servers that all tests of a session share."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
import signal
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests import forked
from tests.raise_sites import made
from tests.raise_sites import named as named_sites
from tests.ranks import RankPool
from tests.servers import S3, s3_server
from tests.sweeps import is_selected, skip_if_only_a_sweep

# Ranks inherit this. The order of sends in TorchRec's reshard depends on string hashes, and it hangs if ranks differ.
os.environ.setdefault("PYTHONHASHSEED", "0")
# Programs inherit this, too. Without it, torch's store asks the DNS for the name of each client, in the thread that
# answers all ranks, because /etc/hosts lacks the IPv6 form of 127.0.0.1: a lost packet then stops all ranks for 5 s.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# The workers, and the programs that they start, have about one core each: threads of OpenMP would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    gc.disable()  # until the tests are collected
    import torch  # the process that distributes the tests needs none

    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # otherwise a pool of processes that import torch

# A revert needs any failing example, not the smallest, and shrinking may take a minute.
settings.register_profile(
    "reverts", derandomize=True, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False
)

# An object of a stream is flushed with its directory, for which a disk takes milliseconds and memory nothing.
_MEMORY, _NEEDED_BYTES = Path("/dev/shm"), 4 << 30
if (
    not os.environ.keys() & {"TMPDIR", "PYTEST_DEBUG_TEMPROOT"}
    and os.access(_MEMORY, os.W_OK)
    and shutil.disk_usage(_MEMORY).free > _NEEDED_BYTES
):
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_MEMORY)

# A shell that starts the tests in the background disables SIGINT for them and for every program that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Slowest first, so that the workers, which run whole files, finish at about the same time.
_SLOWEST = [
    "system/test_faults.py",
    "tracker/test_checkpoint.py",
    "contract/test_storage.py",
    "sharding/test_copies.py",
    "recovery/test_standby.py",
    "system/test_examples.py",
    "integrations/test_lightning.py",
    "stream/test_sleepers.py",
    "system/test_simulation.py",
    "system/test_s3.py",
    "system/test_command_line.py",
    "predictor/test_resync_random.py",
    "publisher/test_cadence.py",
    "tracker/test_outside_loads.py",
    "publisher/test_background.py",
    "publisher/test_publisher.py",
    "system/test_hosts.py",
    "stream/test_upkeep_faults.py",
    "system/test_demo.py",
    "system/test_fault_sweep.py",
    "system/test_killed.py",
    "system/test_imports.py",
    "system/test_fuzz.py",
    "system/test_syscall_sweep.py",
    "stream/test_transfer_random.py",
    "system/test_soak.py",
    "monitor/test_device.py",
    "sharding/test_kernel_hooks.py",
    "sharding/test_replicas.py",
    "predictor/test_serving.py",
    "recovery/test_restore.py",
    "system/test_crash.py",
    "system/test_follower_forks.py",
    "publisher/test_building.py",
    "releases/test_mixed.py",
    "system/test_benchmarks.py",
    "tracker/test_change_log.py",
    "stream/test_lost_entries.py",
    "stream/test_transfer.py",
    "system/test_traces.py",
    "system/test_readme.py",
    "test_advice.py",
    "stream/reading/test_decisions.py",
    "contract/test_notify.py",
    "system/test_check.py",
    "system/test_failover.py",
    "sharding/test_pairs.py",
    "sharding/test_plain_tables.py",
    "system/test_random_trainers.py",
]


_RANKS = {"one_rank", "two_ranks", "four_ranks"}
_TESTS = Path(__file__).parent


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let a worker use the server of processes that this process starts for all of them."""
    node.workerinput["forked"] = forked.serve()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect the tests without garbage collections, and leave their modules out of later ones."""
    gc.disable()
    try:
        if (given := getattr(session.config, "workerinput", None)) is not None:
            forked.join(given["forked"])
            if any(Path(each).resolve() == _TESTS for each in session.config.args):
                _import_tests(int(given["workerid"].removeprefix("gw")), given["workercount"])
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _import_tests(number: int, count: int) -> None:
    """Import the tests, each worker from another one on: the first that comes to a file compiles it for the others."""
    paths = sorted(_TESTS.rglob("test_*.py"))
    first = len(paths) * number // count
    for path in paths[first:] + paths[:first]:
        with suppress(Exception, pytest.skip.Exception):  # the collection repeats and reports it
            importlib.import_module(".".join(path.relative_to(_TESTS.parent).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the sweeps, and put the slowest files first."""
    config.hook.pytest_deselected(items=[item for item in items if not is_selected(item)])
    items[:] = filter(is_selected, items)
    for item in items:
        skip_if_only_a_sweep(item)
    order = {_TESTS / name: number for number, name in enumerate(_SLOWEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


_SKIPPED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Record that a test skips itself."""
    try:
        return (yield)
    except pytest.skip.Exception:
        item.stash[_SKIPPED] = True
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """Fail a test that silences the log of the library, because later tests in the same process read it."""
    result = yield
    logger = logging.getLogger("delta_tracker")
    assert (logger.level, logger.disabled, logger.propagate) == (logging.NOTSET, False, True)
    assert logging.root.manager.disable == logging.NOTSET
    return result


@pytest.fixture(autouse=True)
def _the_error_of_an_advice_is_made(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that a test with the marker ``advice`` meets an error that it names, unless other processes meet it."""
    named = {site for mark in request.node.iter_markers("advice") for text in mark.args for site in named_sites(text)}
    if not named or request.node.path.parent.name == "system" or _RANKS & set(request.fixturenames):
        yield
        return
    with made() as found:
        yield
    assert found & named or _SKIPPED in request.node.stash, f"it meets only {sorted(found)}"


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """A world of one process."""
    pool = RankPool(1)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """A world of two processes."""
    pool = RankPool(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """A world of four processes, which start at the first case that runs on them."""
    pool = RankPool(4)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """A bucket of a server on loopback."""
    with s3_server() as bucket:
        yield bucket
