"""Two hosts: trainers on both, the store on one, a predictor on the other, and a link that is cut and restored."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests import forked
from tests.servers import s3_command
from tests.system.hosts import LINK, Host, two_hosts

pytestmark = pytest.mark.hosts

_PATIENCE_SECONDS = 120
_CUT_SECONDS = 3
_PROGRAM = "tests.system.two_hosts_cases"


class Programs:
    """Processes that end with the block, each with a file of its output."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.running: dict[str, subprocess.Popen[bytes] | forked.Program] = {}

    def fork(self, name: str, host: Host, *arguments: str, **env: str) -> None:
        self.running[name] = host.fork(_PROGRAM, *arguments, output=self.directory / f"{name}.txt", **env)

    def check(self) -> None:
        for name, process in self.running.items():
            assert process.poll() in (None, 0), self.said(name)

    def said(self, name: str) -> str:
        return f"{name} ended:\n{(self.directory / f'{name}.txt').read_text()[-4000:]}"

    def wait(self, name: str) -> None:
        assert self.running[name].wait(_PATIENCE_SECONDS) == 0, self.said(name)

    def until(self, version: int) -> int:
        """Wait for the predictor to reach a version; return the version that it has then."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (found := self.version()) < version:
            self.check()
            assert time.monotonic() < deadline, "".join(self.said(name) for name in self.running)
            time.sleep(0.05)
        return found

    def version(self) -> int:
        path = self.directory / "progress.json"
        return (json.loads(path.read_text())["version"] or -1) if path.exists() else -1


@contextmanager
def programs(directory: Path) -> Iterator[Programs]:
    each = Programs(directory)
    try:
        yield each
    finally:
        for process in each.running.values():
            process.terminate()
        for process in each.running.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


def test_a_link_that_is_cut_and_restored(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with two_hosts() as hosts, programs(tmp_path) as running:
        command, options = s3_command(store, hosts.first.address, range(19300, 19308))
        options |= {"timeout": "5s", "connect_timeout": "2s"}
        running.running["store"] = hosts.first.start(command, tmp_path / "store.txt")
        given = [str(tmp_path), json.dumps(options)]
        env = {"GLOO_SOCKET_IFNAME": LINK, "TP_SOCKET_IFNAME": LINK}
        env |= {"MASTER_ADDR": hosts.first.address, "MASTER_PORT": "29400", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        for rank, host in enumerate((hosts.first, hosts.second)):
            running.fork(f"trainer-{rank}", host, "train", *given, RANK=str(rank), LOCAL_RANK="0", **env)
        running.fork("predictor", hosts.second, "serve", *given)
        running.until(3)
        hosts.cut()
        try:
            time.sleep(_CUT_SECONDS)
            while_cut = running.version()
            running.check()
        finally:
            hosts.restore()
        running.until(while_cut + 3)
        (tmp_path / "stop").touch()
        for name in ("trainer-0", "trainer-1", "predictor"):
            running.wait(name)
    expected, found = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("expected", "found"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[fqn], table) for fqn, table in found.items())
    assert json.loads((tmp_path / "end.json").read_text())["version"] >= while_cut + 3
