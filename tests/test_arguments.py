"""Numbers as arguments: everything that is not a finite number is refused by name, also text from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

import delta_tracker
from delta_tracker import Cadence, Gate, ModelTarget, Recovery, Retention, Rollout, TopK, Upkeep
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.reading.canary import Canary

_NUMBERS: dict[str, Callable[[object], object]] = {
    "fraction": lambda value: TopK(fraction=value),  # type: ignore[arg-type]
    "max_drift": lambda value: Gate(max_drift=value),  # type: ignore[arg-type]
    "seconds": lambda value: Canary(seconds=value),  # type: ignore[arg-type]
    "heartbeat_seconds": lambda value: Recovery(heartbeat_seconds=value),  # type: ignore[arg-type]
    "pointer_seconds": lambda value: Upkeep(pointer_seconds=value),  # type: ignore[arg-type]
}
_COUNTS: dict[str, Callable[[object], object]] = {
    "rows": lambda value: TopK(rows=value),  # type: ignore[arg-type]
    "max_age": lambda value: TopK(rows=1, max_age=value),  # type: ignore[arg-type]
    "min_rows": lambda value: Gate(min_rows=value),  # type: ignore[arg-type]
    "batches": lambda value: Cadence(batches=value),  # type: ignore[arg-type]
    "versions": lambda value: Retention(versions=value),  # type: ignore[arg-type]
    "chunk_rows": lambda value: ModelTarget({}, chunk_rows=value),  # type: ignore[arg-type]
    "compact_every": lambda value: Upkeep(compact_every=value),  # type: ignore[arg-type]
}


@pytest.mark.promise("refused")
@pytest.mark.parametrize("value", ["1", "", float("nan"), float("inf"), True, [1], 1j], ids=repr)
@pytest.mark.parametrize("argument", [*_NUMBERS, *_COUNTS])
def test_what_is_not_a_finite_number_is_refused(argument: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{argument}="):
        (_NUMBERS | _COUNTS)[argument](value)


@pytest.mark.parametrize("argument", _NUMBERS)
@pytest.mark.parametrize("value", [0.5, 1, np.float32(0.5), np.int64(1)], ids=repr)
def test_numbers_of_numpy_are_numbers(argument: str, value: object) -> None:
    _NUMBERS[argument](value)


@pytest.mark.promise("refused")
@pytest.mark.parametrize("value", ["no", 0, None], ids=repr)
def test_a_switch_is_true_or_false(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="non_finite="):
        Gate(non_finite=value)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="per_table="):
        TopK(rows=1, per_table=value)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="dense="):
        ModelTarget({}, dense=value)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="follows_pins="):
        Rollout(follows_pins=value)  # type: ignore[arg-type]


_RESULTS = {"DeltaRows", "IndexedLookup", "Memory", "ShardSpec", "TableSpec", "Takeover"}  # the library makes them


@pytest.mark.promise("refused")
@pytest.mark.parametrize(
    "kind",
    [
        kind
        for name in sorted({*delta_tracker.__all__} - _RESULTS)
        if is_dataclass(kind := getattr(delta_tracker, name)) and isinstance(kind, type)
    ],
)
def test_a_misspelled_argument_is_named_with_a_similar_one(kind: Any) -> None:
    name = fields(kind)[-1].name
    with pytest.raises(InvalidArgumentError, match=rf"^{name}e=3 .*Write {name}="):
        kind(**{f"{name}e": 3})
    with pytest.raises(InvalidArgumentError, match=f"Pass arguments of {kind.__name__}: "):
        kind(qqq=3)
