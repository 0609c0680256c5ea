"""Checks of the values of a version before a predictor applies the version: :class:`Gate`."""

import logging
import math
from dataclasses import dataclass
from typing import NoReturn

from delta_tracker.arguments import check_count, check_switch, is_number, refuses_unknown
from delta_tracker.errors import HeldVersionError, InvalidArgumentError
from delta_tracker.stream.format.manifest import Link, Manifest, Merged
from delta_tracker.stream.format.part_reader import Contents

_logger = logging.getLogger(__name__)
Measure = dict[tuple[str, str], float]
"""Mapping of (kind of version, table FQN) to the RMS row norm of the table in a version; see :class:`Gate`."""


@refuses_unknown()
@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Bounds on the values of a version, for :class:`Rollout`. A predictor holds a version that violates a bound.

    The RMS row norm of a table is the root mean square of the L2 norms of its rows in the version. Error messages call
    this norm the size of the rows.

    Args:
        non_finite: True to reject NaN and infinite values.
        max_drift: maximum difference between the RMS row norm of a table and the norm in the last applied version of
            the same kind (snapshot or delta), as a fraction of the smaller norm. For example, 0.5 allows an increase by
            one half or a decrease by one third. None disables the check. The first version of a kind is not checked.
        min_rows: minimum number of rows of a table in a version. If there are fewer rows, ``max_drift`` is not checked
            for the table, because the norm of few rows varies too much.

    Example:
        >>> gate = Gate(max_drift=0.5)  # for Rollout(gate=gate)
        >>> gate.non_finite
        True
    """

    non_finite: bool = True
    max_drift: float | None = None
    min_rows: int = 100

    def __post_init__(self) -> None:
        if self.max_drift is not None and not (is_number(self.max_drift) and self.max_drift > 0):
            raise InvalidArgumentError("max_drift", self.max_drift, "Pass a positive number")
        check_switch("non_finite", self.non_finite)
        check_count("min_rows", self.min_rows)


class GateKeeper:
    """Checker of versions against the bounds of a :class:`Gate`. It also records the rejected versions.

    Attributes:
        held: last error for a rejected version; None if no version was rejected since the last applied version.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._sizes: Measure = {}
        self._accepted: set[int] = set()
        self._refused: dict[tuple[str, Link], str] = {}  # reasons, by stream and version
        self.held: HeldVersionError | None = None

    def accept(self, version: int) -> None:
        """Accept ``version`` even if it violates a bound, until it has been applied once."""
        check_count("version", version, 0)
        self._accepted.add(version)

    def check_not_held(self, manifest: Manifest) -> None:
        """Raise HeldVersionError if this version, or a version merged into it, was rejected before. Reads no rows."""
        if manifest.version in self._accepted:
            return
        reason = self._refused.get((manifest.stream, manifest.link))
        if reason is not None:
            self._hold(manifest, reason)
        if manifest.merges is None:
            return
        first = Merged.of(manifest).first
        for (stream, link), why in self._refused.items():
            is_inside = stream == manifest.stream and first <= link.version <= manifest.version
            if is_inside and link.version not in self._accepted:
                self._hold(manifest, f"it has the rows of version {link.version}: {why}")

    def check(self, manifest: Manifest, contents: Contents) -> Measure:
        """Raise HeldVersionError if a version violates a bound. Return its RMS row norms, to pass to :meth:`passed`."""
        measure, reason = self.measure(manifest, contents)
        reason = reason or self._drift(measure)
        if reason and manifest.version not in self._accepted:
            _logger.error("version %d is held back by the gate: %s", manifest.version, reason)
            self._refused[manifest.stream, manifest.link] = reason
            self._hold(manifest, reason)
        return measure

    def passed(self, manifest: Manifest, measure: Measure) -> None:
        """Record that a version was applied, and use ``measure``, the result of :meth:`check`, as the new baseline."""
        # Skip norms that are not finite: no norm can be compared with them.
        self._sizes |= {key: size for key, size in measure.items() if math.isfinite(size)}
        self._accepted.discard(manifest.version)
        self._refused.clear()
        self.held = None

    def restart(self) -> None:
        """Clear the baseline. Call this before a rollback."""
        self._sizes.clear()

    def _hold(self, manifest: Manifest, reason: str) -> NoReturn:
        raise HeldVersionError(manifest.version, reason)

    def measure(self, manifest: Manifest, contents: Contents) -> tuple[Measure, str]:
        """Return the RMS norms of tables with ``min_rows`` rows or more, and an error text if values are not finite."""
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
