"""A case: a stream, a run of the program, and what the program must do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

import numpy as np

from tests.conformance.program import Program
from tests.conformance.stream import Stream, Tensor, Tensors, file_of, tensors_of


class Outcome(Enum):
    """What a program may do with a stream."""

    RIGHT = "right"
    REFUSED = "refused"
    NEWER = "newer"
    RIGHT_OR_REFUSED = "right or refused"


_STATUSES = {
    Outcome.RIGHT: {0},
    Outcome.REFUSED: {2},
    Outcome.NEWER: {3},
    Outcome.RIGHT_OR_REFUSED: {0, 2},
}


@dataclass(frozen=True)
class Trial:
    """One run of the program.

    Attributes:
        stream: the stream.
        outcome: what the program may do.
        expected: tensors that it must write if it writes any.
        optional: names of tensors that it may write, too: the dense tensors of versions before the snapshot.
        version: value of ``--version``; None to omit it.
        raw_ids: FQN to the raw ids in ``--ids``.
    """

    stream: Stream
    outcome: Outcome = Outcome.RIGHT
    expected: Tensors = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    version: int | None = None
    raw_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)


class Case(Protocol):
    """A case of the kit.

    Attributes:
        name: words that ``--only`` selects by.
        rule: beginning of the rule of ``FORMAT.md``.
    """

    name: str
    rule: str

    def fault(self, program: Program, root: Path) -> str:
        """Run the program on a stream below ``root``, an empty directory; return what it did wrong, "" for nothing."""


@dataclass(frozen=True)
class Run:
    """A case of one run, whose stream is made when it runs."""

    name: str
    rule: str
    trial: Callable[[], Trial]

    def fault(self, program: Program, root: Path) -> str:
        trial, output = self.trial(), root / "state.safetensors"
        trial.stream.write(root / "stream")
        arguments = [str(root / "stream"), "--out", str(output)]
        if trial.version is not None:
            arguments += ["--version", str(trial.version)]
        if trial.raw_ids:
            asked = {fqn: Tensor.of(np.array(each, "<i8"), "I64") for fqn, each in trial.raw_ids.items()}
            (root / "ids.safetensors").write_bytes(file_of(asked))
            arguments += ["--ids", str(root / "ids.safetensors")]
        before = set(root.rglob("*"))
        status, errors = program.run(arguments)
        if status is None:
            return errors
        if strange := set(root.rglob("*")) - {output} ^ before:
            return f"created or deleted {sorted(map(str, strange))}"
        if status not in _STATUSES[trial.outcome]:
            return f"ended with status {status}, must be {trial.outcome.value}: {errors[-200:].strip()}"
        if status == 0:
            return difference(output, trial.expected, trial.optional)
        if output.exists():
            return f"ended with status {status}, but wrote a state"
        return "" if errors.strip() else f"ended with status {status} without a reason on stderr"


def difference(output: Path, expected: Tensors, optional: frozenset[str] = frozenset()) -> str:
    """Return how the tensors in a file differ from the expected ones, an empty text if they do not."""
    try:
        found = tensors_of(output.read_bytes())
    except (OSError, ValueError, LookupError) as error:
        return f"wrote no safetensors file: {type(error).__name__}: {error}"
    missing, unexpected = expected.keys() - found.keys(), found.keys() - expected.keys() - optional
    if missing or unexpected:
        return f"missing tensors {sorted(missing)}, unexpected tensors {sorted(unexpected)}"
    wrong = [name for name, each in expected.items() if not found[name].is_same(each)]
    return f"wrong values in {wrong}" if wrong else ""
