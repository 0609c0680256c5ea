"""Tracebacks of errors: an error that an object keeps must have none, because its frames keep their variables alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error with its causes and contexts."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]


def has_frames(error: BaseException) -> bool:
    """Return whether an error, a cause or a context of it has a traceback."""
    return any(each.__traceback__ is not None for each in chain(error))


def num_frames(error: BaseException) -> int:
    """Return the number of frames of the traceback of an error."""
    count, trace = 0, error.__traceback__
    while trace is not None:
        count, trace = count + 1, trace.tb_next
    return count


def frames_of_each(call: Callable[[], object], kind: type[BaseException], times: int = 4) -> list[int]:
    """Return the number of frames of the error that each of several calls raises."""
    found = []
    for _ in range(times):
        with pytest.raises(kind) as caught:
            call()
        found.append(num_frames(caught.value))
    return found
