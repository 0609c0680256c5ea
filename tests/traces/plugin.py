"""Plugin of pytest that writes the trace of each test, and of each example of a random test."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.ranks import RankPool
from tests.traces import recorder

# The seed of the examples is an option, so that they do not depend on the text of a test.
_PHASES = [Phase.explicit, Phase.generate]
settings.register_profile("traces", database=None, phases=_PHASES, suppress_health_check=list(HealthCheck))
_traces: dict[str, Any] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--traces", type=Path, required=True, help="file for the traces")


def pytest_configure() -> None:
    recorder.install()
    RankPool.run = _traced(RankPool.run)  # type: ignore[method-assign]


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.getoption("traces").write_text(json.dumps(_traces))


@contextmanager
def _kept(name: str) -> Iterator[None]:
    """Context manager that keeps the trace of its body."""
    with recorder.recording() as trace:
        try:
            yield
        finally:
            _traces.update({name: trace.readers} if trace.readers else {})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with _kept(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    handle = getattr(pyfuncitem.obj, "hypothesis", None)
    if handle is None:
        return (yield)
    inner, numbers = handle.inner_test, count()

    @wraps(inner)
    def example(*args: Any, **kwargs: Any) -> Any:
        with _kept(f"{pyfuncitem.nodeid} example {next(numbers)}"):
            return inner(*args, **kwargs)

    handle.inner_test = example
    try:
        return (yield)
    finally:
        handle.inner_test = inner


def _traced(original: Any) -> Any:
    """Return a :meth:`RankPool.run` that keeps what the readers on the ranks do."""

    @wraps(original)
    def run(self: RankPool, case: str, **kwargs: Any) -> list[Any]:
        answers = original(self, f"{recorder.__name__}:{recorder.on_rank.__name__}", traced=case, **kwargs)
        for trace in recorder.TRACES[-1:]:
            number = trace.number("case")
            for answer in answers:
                trace.readers |= {f"{number} {name}": kept for name, kept in answer["readers"].items()}
        return [answer["result"] for answer in answers]

    return run
