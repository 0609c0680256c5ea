"""Every example runs as its docstring describes, and asserts its result."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.servers import S3, free_ports, installed, redis_server

_ROOT = Path(__file__).parent.parent.parent
_EXAMPLES = sorted(path for path in (_ROOT / "examples").glob("*.py") if path.name != "__init__.py")
_ENVIRON = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_LIMIT_SECONDS = 280
_LOAD_SECONDS = 1

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs an example and returns its output."""

    def run(name: str, *arguments: str) -> str:
        environ = _ENVIRON | {"TMPDIR": str(tmp_path)}
        done = forked.run(f"examples.{name}", *arguments, timeout_seconds=_LIMIT_SECONDS, environ=environ)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def ranks(folder: Path, num_ranks: int, module: str, *arguments: str) -> tuple[list[int], list[str], str]:
    """Run an example on ranks, as ``torchrun`` does; return exit codes and outputs by rank, and all errors."""
    folder.mkdir()
    (port,) = free_ports(1)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TMPDIR": str(folder)}
    group |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    outputs = [folder / f"output-{rank}" for rank in range(num_ranks)]
    errors = folder / "errors"
    programs = [
        forked.Program(
            module,
            *arguments,
            output=output,
            errors=errors,
            environ=_ENVIRON | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        codes = [program.wait(_LIMIT_SECONDS) for program in programs]
    finally:
        for program in programs:
            program.kill()
    return codes, [output.read_text() for output in outputs], errors.read_text()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("one_process", "'stream' has received them; 3 rows are pending for 'audit'"),
        ("top_k", "without training, bit for bit"),
        ("quantized", "bytes equal those of the trainer's table, newly quantized"),
        ("extensions", "the store equals the trainer bit for bit"),
        ("raw_ids", "all 640 ids get the trainer's answer in both predictors"),
        ("publish_and_predict", "equal the trainer's bit for bit"),
        ("row_store", "version 2: the rows in the file equal the trainer's bit for bit"),
    ],
)
def test_it_prints_the_expected_output(run: Run, name: str, shown: str) -> None:
    assert shown in run(name)


@pytest.mark.sweep("short", only=True)
def test_the_compiled_model(run: Run) -> None:
    assert "10 versions: all tensors of the compiled model equal the trainer's bit for bit" in run("compiled")


def test_own_metrics(run: Run) -> None:
    said = run("own_metrics", "--port", "0")
    assert 'training_examples_total{job="trainer",split="train"} 160.0' in said
    assert 'delta_tracker_published_rows_total{job="trainer",publisher="publisher",table="embedding_bags.item"}' in said


def test_lightning_trainer(run: Run) -> None:
    pytest.importorskip("pytorch_lightning", exc_type=ModuleNotFoundError)
    assert re.findall(r"batch (\d+): generation (\d)", run("lightning_trainer")) == [("10", "1"), ("20", "2")]


def test_s3(run: Run, s3: S3) -> None:
    options = [f"{name}={value}" for name, value in s3.options.items()]
    said = run("s3", f"{s3.url}/example", *options)
    assert f"{s3.url}/example/log: 5 objects" in said
    assert "bit for bit" in said


def test_redis_hints(run: Run) -> None:
    with redis_server(*free_ports(1)) as url:
        assert "never waited for its next poll" in run("redis_hints", url)


def test_sharded(tmp_path: Path) -> None:
    codes, outputs, errors = ranks(tmp_path / "ranks", 2, "examples.sharded")
    assert codes == [0, 0], errors
    assert "".join(outputs).count("the predictor equals this rank's shards bit for bit") == 2


@pytest.mark.sweep("short", only=True)
def test_torchrun_starts_other_numbers_of_ranks_that_count() -> None:
    done = forked.run("examples.metrics_per_rank", timeout_seconds=_LIMIT_SECONDS, environ=_ENVIRON)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d of (\d): (\d+) clicks of 1111, longest 21", done.stdout)) == [
        ("2", "101"), ("2", "1010"), ("4", "1"), ("4", "10"), ("4", "100"), ("4", "1000")
    ]  # fmt: skip


@pytest.mark.sweep("short", only=True)
def test_torchrun_restarts_a_job_that_lost_a_rank(tmp_path: Path) -> None:
    done = forked.run("examples.elastic", str(tmp_path), timeout_seconds=_LIMIT_SECONDS, environ=_ENVIRON)
    assert done.returncode == 0, done.stderr
    assert "the predictor equals it" in done.stdout


def test_crash_and_resume(tmp_path: Path) -> None:
    folder, program = str(tmp_path / "trainer"), "examples.crash_and_resume"
    codes, (killed, _), errors = ranks(tmp_path / "killed", 2, program, folder, "--die-after", "25")
    assert 0 not in codes
    assert killed.endswith("batch 24: version 8, delta\nkilled after batch 25\n"), errors
    codes, (resumed,), errors = ranks(tmp_path / "resumed", 1, program, folder)
    assert codes == [0], errors
    assert "the predictor is at version 8, from the killed trainer" in resumed
    assert "1 rank resumes at batch 20\nbatch 21: version 10, delta" in resumed
    assert resumed.endswith("the predictor equals the trainer bit for bit\n")


@contextlib.contextmanager
def started(folder: Path, role: str, *arguments: str) -> Iterator[None]:
    """Run a role of the service in the background; it must exit cleanly when interrupted."""
    output = folder / f"{role}.txt"
    process = forked.Program("examples.service", role, *arguments, output=output, errors=output, environ=_ENVIRON)
    try:
        yield
        process.send_signal(signal.SIGINT)
        assert process.wait(240) == 0, output.read_text()
    finally:
        process.kill()


def asked(url: str) -> tuple[int, dict[str, Any]]:
    """Return the status and body of the service's answer; (0, {}) if there is none."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
    except OSError:
        return 0, {}


def answers(url: str, status: int) -> dict[str, Any]:
    """Wait for an answer of that status."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while (found := asked(url))[0] != status:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found[1]


def test_service_under_load(tmp_path: Path) -> None:
    """No request fails, versions advance, no row is torn, and only answers that report it use two versions."""
    wrk = installed("wrk")
    stream, (port,) = f"file://{tmp_path}/stream", free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with started(tmp_path, "serve", stream, "--port", str(port)):
        early = answers(f"{url}/health", 503)
        assert early["version"] is None
        assert asked(f"{url}/rows?ids=1") == (503, {"detail": "no version has been applied yet"})
        with started(tmp_path, "publish", stream, "--pause", "0.01"):
            first = answers(f"{url}/health", 200)
            load = [wrk, "--threads=1", "--connections=4", f"--duration={_LOAD_SECONDS}s", "--timeout=60s"]
            output = subprocess.run(
                [*load, "--script=examples/service.lua", url], cwd=_ROOT, capture_output=True, text=True, check=True
            ).stdout
        found = json.loads(output.splitlines()[-1])
        last = answers(f"{url}/health", 200)
    assert found["requests"] > 0
    for fault in ("errors", "malformed", "torn", "mixed"):
        assert found[fault] == 0, found
    assert found["versions"] > 0, "no version came meanwhile"
    assert last["version"] > first["version"]
    assert last["resyncs"] == 0


_QUICKSTART = _ROOT / "examples" / "quickstart"


@contextlib.contextmanager
def following(folder: Path, *arguments: str, environ: dict[str, str]) -> Iterator[Callable[[str], None]]:
    """Run the predictor of the quickstart; yield a function that waits for its line, and interrupt it at the end."""
    output = folder / "predictor.txt"
    program = str(_QUICKSTART / "predictor.py")
    predictor = forked.Program(program, *arguments, output=output, errors=output, environ=environ)

    def wait_for(line: str) -> None:
        deadline = time.monotonic() + _LIMIT_SECONDS
        while line not in output.read_text().splitlines():
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)

    try:
        yield wait_for
        predictor.send_signal(signal.SIGINT)
        assert predictor.wait(240) == 0, output.read_text()
        assert output.read_text().splitlines()[-1].startswith("stopped at version ")
    finally:
        predictor.kill()


def test_the_quickstart_in_two_files(tmp_path: Path) -> None:
    url = str(tmp_path / "stream")
    with following(tmp_path, url, environ=_ENVIRON) as wait_for:
        for job in ("first", "second"):  # which takes the stream over, and the predictor continues
            codes, outputs, errors = ranks(tmp_path / job, 2, str(_QUICKSTART / "trainer.py"), url)
            assert codes == [0, 0], errors
            assert outputs[0].startswith("version ")
            assert outputs[1] == ""
            wait_for(outputs[0].strip())  # the trainer's version and the score of its model


@pytest.mark.sweep("short", only=True)
def test_torchrun_starts_the_quickstart_as_it_is_written(tmp_path: Path) -> None:
    trainer, predictor = ((_QUICKSTART / f"{name}.py").read_text() for name in ("trainer", "predictor"))
    assert "``torchrun --nproc-per-node 2 trainer.py``" in trainer
    assert "``python predictor.py``" in predictor
    (port,) = free_ports(1)
    environ = _ENVIRON | {"TMPDIR": str(tmp_path), "PET_MASTER_PORT": str(port)}
    with following(tmp_path, environ=environ) as wait_for:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "trainer.py"],
            cwd=_QUICKSTART,
            env=environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), environ.get("PYTHONPATH")]))},
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        wait_for(done.stdout.strip())


def test_all_of_them_are_tested() -> None:
    tests = Path(__file__).read_text()
    for path in _EXAMPLES:
        assert f'"{path.stem}"' in tests or f'"examples.{path.stem}"' in tests, path
        assert f"-m examples.{path.stem}" in path.read_text(), "the docstring says how to run it"
