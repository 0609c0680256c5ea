"""Two hosts on one machine: network namespaces joined by a veth pair, which can be cut. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import forked

_ROOT = Path(__file__).parent.parent.parent
LINK = "veth0"  # the interface's name on both hosts


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@dataclass(frozen=True)
class Host:
    """A namespace and its address on the link."""

    name: str
    address: str

    def start(self, command: list[str], output: Path) -> subprocess.Popen[bytes]:
        """Start a program on the host; write its output to a file."""
        with output.open("wb") as file:
            return subprocess.Popen(["ip", "netns", "exec", self.name, *command], cwd=_ROOT, stdout=file, stderr=file)

    def fork(self, module: str, *arguments: str, output: Path, **env: str) -> forked.Program:
        """Start a Python program on the host; write its output to a file."""
        namespace = Path("/run/netns") / self.name
        environ = os.environ | env
        return forked.Program(module, *arguments, output=output, errors=output, environ=environ, namespace=namespace)


@dataclass(frozen=True)
class Hosts:
    """Two hosts that can reach only each other."""

    first: Host
    second: Host

    def cut(self) -> None:
        """Take the link down at its first end, so that the other end loses its carrier."""
        _ip("-n", self.first.name, "link", "set", LINK, "down")

    def restore(self) -> None:
        """Take the link up."""
        _ip("-n", self.first.name, "link", "set", LINK, "up")


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two linked hosts; skip the test if the machine does not allow it."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip (Debian: iproute2)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    hosts = Hosts(*(Host(f"dt-{os.getpid()}-{end}", f"10.77.0.{end}") for end in (1, 2)))
    ends = (hosts.first, hosts.second)
    try:
        try:
            for host in ends:
                _ip("netns", "add", host.name)
            peer = ("peer", "name", LINK, "netns", hosts.second.name)
            _ip("link", "add", LINK, "netns", hosts.first.name, "type", "veth", *peer)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine allows no network namespaces: {error.stderr.strip()}")
        for host in ends:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", LINK)
            for interface in ("lo", LINK):
                _ip("-n", host.name, "link", "set", interface, "up")
        yield hosts
    finally:
        for host in ends:  # also deletes the pair
            subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True, timeout=20)
