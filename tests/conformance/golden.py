"""Cases of the frozen streams of formats 1 and 2: every version, from every snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tests.conformance.case import Case, Run, Trial
from tests.conformance.stream import GOLDEN, NO_OWNER, Stream, Tensors, tensors_of

_READING = "Start at the newest snapshot"
_RAW_IDS = [0, 1, 7, 42, 43, -1, -2, 499, 500, 599, 600, 1999, 123_456_789, NO_OWNER, -(1 << 63), -(1 << 63) + 1]


def golden(number: int) -> Stream:
    """Return the frozen stream of a format."""
    return Stream.load(GOLDEN / f"format-{number}" / "stream")


def _expected(number: int, version: int) -> tuple[Tensors, frozenset[str]]:
    """Return the frozen tensors after a version, and the names of those that the newest snapshot does not have."""
    stream = golden(number)
    held = tensors_of((GOLDEN / f"format-{number}" / "expected" / f"{version}.safetensors").read_bytes())
    found = {name.replace("/owners", ".owners"): each for name, each in held.items() if _is_value(name)}
    must = stream.expected(version).keys()
    return {name: found[name] for name in must}, frozenset(found.keys() - must)


def _is_value(name: str) -> bool:
    return "/" not in name or name.endswith("/owners")


def _trial(number: int, state: int, *, version: int | None, change: Callable[[Stream], object]) -> Trial:
    stream = golden(number)
    expected, optional = _expected(number, state)
    raw_ids = {}
    if number == 2:
        owners = {name: each for name, each in stream.state(state).items() if name.endswith("/owners")}
        raw_ids = {name[:-7]: [*each.tolist(), *_RAW_IDS] for name, each in owners.items()}
        answers = stream.expected(state, raw_ids)
        expected |= {name: each for name, each in answers.items() if name.endswith(".answers")}
    change(stream)
    return Trial(stream, expected=expected, optional=optional, version=version, raw_ids=raw_ids)


def _no_states(stream: Stream) -> None:
    for version in stream.versions:
        entry = stream.entry(version)
        names = [part["states"]["name"] for part in entry["parts"] if part.get("states")]
        stream.remove(*names, *(each["name"] for each in entry.get("training", ())))


_CHANGES: list[tuple[str, str, Callable[[Stream], object]]] = [
    ("with merged entries", _READING, lambda _: None),
    ("without merged entries", _READING, lambda stream: stream.remove("merged/")),
]


def cases() -> Iterator[Case]:
    for number, versions in ((1, [1, 2, 3, 4, 5, 6, 7]), (2, [1, 2, 3, 4, 5, 6])):
        for version in versions:
            state = version - 1 if (number, version) in ((1, 5), (2, 4)) else version  # a claim has no rows
            for text, rule, change in _CHANGES:
                name = f"golden format {number} version {version} {text}"
                yield Run(name, rule, partial(_trial, number, state, version=version, change=change))
        for text, rule, change in _CHANGES:
            name = f"golden format {number} newest {text}"
            yield Run(name, rule, partial(_trial, number, versions[-1], version=None, change=change))
    need = "Readers that need only values, such as predictors, MUST NOT need"
    for version in (3, 6):
        name = f"golden format 2 version {version} without states and training states"
        yield Run(name, need, partial(_trial, 2, version, version=version, change=_no_states))
