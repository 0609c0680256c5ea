"""Fixtures of the tests on a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.plain_torchrec import installed
from tests.gpu.devices import simulation


@pytest.fixture
def plain_torchrec() -> Iterator[None]:
    """The library finds sharded collections of plain torch instead of torchrec's."""
    with installed():
        yield


@pytest.fixture
def tensors_on_device() -> Iterator[None]:
    """Tensors can be created on the device, also if it is the simulated one."""
    with simulation():
        yield
