"""Checks that a version must pass before a predictor applies it."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from delta_tracker.errors import HeldVersionError, InvalidArgumentError
from delta_tracker.stream.format.contents import Contents
from delta_tracker.stream.format.manifest import Link, Manifest

_logger = logging.getLogger(__name__)

Measure = dict[tuple[str, str], float]
"""Mapping of (kind of version, table FQN) to the size of the table's rows in the version; see :class:`Gate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Set of bounds on the rows and dense tensors of a version.

    The size of a table's rows in a version is the root mean square of their L2 norms. It does not depend on the
    trainer's column-wise sharding.

    Args:
        non_finite: True to reject NaN and infinite values.
        max_drift: maximum relative difference between that size and the size in the last applied version of the same
            kind (snapshot or delta), as a fraction of the smaller size: 0.5 allows growth by half or shrinkage by a
            third. None disables the check. The first version of a kind is the baseline.
        min_rows: minimum number of a table's rows in a version for the check of the drift; the size of fewer rows
            varies too much.

    Raises:
        InvalidArgumentError: for a ``max_drift`` that is not positive and finite, or a ``min_rows`` below 1.
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
    """Checks versions against a gate, and keeps the sizes of the last applied versions as the baseline.

    Args:
        gate: the bounds.

    Attributes:
        held: error of the last held version; None once a version was applied after it.

    Raises:
        InvalidArgumentError: if ``gate`` is not a :class:`Gate`.
    """

    def __init__(self, gate: Gate) -> None:
        if not isinstance(gate, Gate):
            raise InvalidArgumentError("gate", gate, "Pass a Gate")
        self._gate = gate
        self._sizes: Measure = {}
        self._accepted: set[int] = set()
        self._refused: dict[Link, HeldVersionError] = {}
        self.held: HeldVersionError | None = None

    def accept(self, version: int) -> None:
        """Accept a version until it has been applied, whatever the result of its check.

        Args:
            version: number of the version, whether or not it has been checked yet.

        Raises:
            InvalidArgumentError: if ``version`` is not an integer of 0 or more.
        """
        if type(version) is not int or version < 0:
            raise InvalidArgumentError("version", version, "Pass the number of the version that is held")
        self._accepted.add(version)

    def recall(self, manifest: Manifest) -> None:
        """Raise the saved error if the version was held before and not accepted since, without reading its rows.

        Raises:
            HeldVersionError: if the version was held and was not accepted since.
        """
        refused = self._refused.get(manifest.link)
        if refused is not None and manifest.version not in self._accepted:
            self.held = refused
            raise refused

    def check(self, manifest: Manifest, contents: Contents) -> Measure:
        """Check the rows and dense tensors of a version.

        Args:
            manifest: manifest of the version.
            contents: rows and dense tensors of the version.

        Returns:
            Sizes of the rows of each table with at least ``min_rows`` rows, for :meth:`passed`.

        Raises:
            HeldVersionError: if the version violates a bound and is not accepted.
        """
        measure, reason = self._measure(manifest, contents)
        reason = reason or self._drift(measure)
        if reason and manifest.version not in self._accepted:
            _logger.error("version %d is held back by the gate: %s", manifest.version, reason)
            self.held = self._refused[manifest.link] = HeldVersionError(manifest.version, reason)
            raise self.held
        return measure

    def passed(self, manifest: Manifest, measure: Measure) -> None:
        """Record the sizes of an applied version as the baseline, and remove it from the accepted versions.

        Args:
            manifest: manifest of the version.
            measure: result of :meth:`check` or :meth:`follow`.
        """
        # Skip sizes that are not finite: no size can be compared with them.
        self._sizes |= {key: size for key, size in measure.items() if math.isfinite(size)}
        self._accepted.discard(manifest.version)
        self._refused.clear()
        self.held = None

    def restart(self) -> None:
        """Reset the baseline, for a rollback."""
        self._sizes.clear()

    def follow(self, manifest: Manifest, contents: Contents) -> Measure:
        """Return the same sizes as :meth:`check`, without rejecting the version."""
        return self._measure(manifest, contents)[0]

    def _measure(self, manifest: Manifest, contents: Contents) -> tuple[Measure, str]:
        """Return the RMS row norm of each table of a version, and the reason to reject it for NaN or infinite values.

        The reason is empty if the version has no such values, or if the gate allows them.
        """
        sums: dict[str, tuple[float, float]] = {}
        reason = ""
        for fqn, values in contents.chunks():
            if self._gate.non_finite and not bool(values.isfinite().all()):
                reason = reason or f"table {fqn!r} has rows with NaN or infinite values"
            squares, rows = sums.get(fqn, (0.0, 0.0))
            squares += float(values.double().square().sum())
            sums[fqn] = squares, rows + values.numel() / manifest.tables[fqn].dim
        for name, tensor in contents.dense.items():
            if self._gate.non_finite and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                reason = reason or f"dense tensor {name!r} has NaN or infinite values"
        sizes = {
            (str(manifest.kind), fqn): math.sqrt(squares / rows)
            for fqn, (squares, rows) in sums.items()
            if rows >= self._gate.min_rows
        }
        return sizes, reason

    def _drift(self, measure: Measure) -> str:
        bound = self._gate.max_drift
        for (kind, fqn), size in measure.items():
            before = self._sizes.get((kind, fqn))
            if bound is None or before is None or before == size:
                continue
            smaller, larger = sorted((before, size))
            if smaller == 0 or not larger / smaller <= 1 + bound:
                return f"the size of the rows of table {fqn!r} changed from {before:.4g} to {size:.4g}"
        return ""
