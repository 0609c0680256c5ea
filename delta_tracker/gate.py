"""Gate: what a version must pass before a predictor lets it in front of users."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Bounds on the rows and dense tensors of a version.

    Args:
        non_finite: refuse NaN and infinite values.
        max_drift: by how much the mean L2 norm of a table's rows in a version may differ from that of the last version
            of its kind (snapshot or delta) that was let through, as a share of the smaller one: 0.5 lets it grow by
            half, or shrink by a third. None for no bound. The first version of a kind sets the measure.
        min_rows: tables with fewer rows in the version are not measured for drift: few rows vary much.

    Raises:
        InvalidArgumentError: for a bound that is not a positive number.
    """

    non_finite: bool = True
    max_drift: float | None = None
    min_rows: int = 100

    def __post_init__(self) -> None:
        if self.max_drift is not None and not (math.isfinite(self.max_drift) and self.max_drift > 0):
            raise InvalidArgumentError("max_drift", self.max_drift, "Pass a positive number")
        if self.min_rows < 1:
            raise InvalidArgumentError("min_rows", self.min_rows, "Pass a count of 1 or more")


class GateKeeper:
    """Measures versions, and remembers what the last one that was let through measured.

    Args:
        gate: the bounds.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._norms: dict[tuple[str, str], float] = {}  # kind and table to mean norm

    def inspect(
        self, kind: str, rows: Iterable[tuple[str, Tensor]], dense: Mapping[str, Tensor]
    ) -> tuple[str, dict[tuple[str, str], float]]:
        """Measure a version.

        Args:
            kind: snapshot or delta.
            rows: FQN and values ``[N, columns]`` of some of its rows, any number of times.
            dense: its dense tensors, by name.

        Returns:
            Why it is to be held, empty if it is not; and its measure, for :meth:`passed`.
        """
        sums: dict[str, tuple[float, int]] = {}
        for fqn, values in rows:
            norms = torch.linalg.vector_norm(values.double(), dim=1)
            if self._gate.non_finite and not bool(norms.isfinite().all()):
                return f"table {fqn!r} has rows with NaN or infinite values", {}
            total, count = sums.get(fqn, (0.0, 0))
            sums[fqn] = total + float(norms.sum()), count + len(norms)
        for name, tensor in dense.items():
            if self._gate.non_finite and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                return f"dense tensor {name!r} has NaN or infinite values", {}
        measure = {(kind, fqn): total / count for fqn, (total, count) in sums.items() if count >= self._gate.min_rows}
        return self._drift(measure), measure

    def passed(self, measure: Mapping[tuple[str, str], float]) -> None:
        """A version with this measure was let through."""
        self._norms.update(measure)

    def _drift(self, measure: Mapping[tuple[str, str], float]) -> str:
        bound = self._gate.max_drift
        for (kind, fqn), norm in measure.items():
            before = self._norms.get((kind, fqn))
            if bound is None or before is None or before == norm:
                continue
            smaller, larger = sorted((before, norm))
            if smaller == 0 or not larger / smaller <= 1 + bound:
                return f"the mean norm of the rows of table {fqn!r} went from {before:.4g} to {norm:.4g}"
        return ""
