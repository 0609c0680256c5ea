"""Registry of stats, which can be found and configured by name pattern."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.clock import Progress
from delta_tracker.monitor.names import exposed
from delta_tracker.monitor.policy import Policy
from delta_tracker.monitor.polled_stats import MetricSource
from delta_tracker.monitor.stat import DEFAULT_POLICIES, KINDS, Definition, Kind, Stat

_SETTINGS = tuple(Policy.__dataclass_fields__)


class Registry:
    """Registry of all stats, their policies, and the sources that are read at each collection. Thread-safe.

    Args:
        progress: clock, step and epoch, shared by all stats; None to create a new :class:`Progress`.
        overflowed: function that is called with the name of a stat when a new cell would exceed its ``max_cells``.
    """

    def __init__(self, progress: Progress | None = None, overflowed: Callable[[str], None] = lambda _: None) -> None:
        self.progress = progress or Progress()
        self._overflowed = overflowed
        self._lock = threading.RLock()
        self._stats: dict[str, Stat] = {}
        self._exposed: dict[str, Stat] = {}  # by each of Definition.exposed_names
        self._defaults: dict[str, Policy] = {}
        self._rules: dict[str, dict[str, Any]] = {}
        self._sources: dict[str, MetricSource] = {}

    def define(self, definition: Definition, **settings: Any) -> Stat:  # noqa: ANN401  the fields of Policy
        """Register a stat and return it. If an equal definition is already registered, return the existing stat.

        ``settings`` are fields of :class:`~delta_tracker.monitor.policy.Policy`. Settings passed to :meth:`configure`
        take precedence. Names that differ only in dots and underscores are considered equal.

        Raises:
            InvalidArgumentError: for an invalid setting, if the name is registered with a different definition, or if
                one of the :attr:`~delta_tracker.monitor.stat.Definition.exposed_names` is in use by another stat.
        """
        default = DEFAULT_POLICIES[definition.kind]
        if settings:
            default = replace(default, **_checked(settings))
        with self._lock:
            known = self._stats.get(exposed(definition.name))
            if known is None:
                self._check_exposed(definition)
                self._defaults[exposed(definition.name)] = default
                policy = self._policy(definition.name)
                known = KINDS[definition.kind](definition, policy, self.progress, self._overflowed)
                self._stats[exposed(definition.name)] = known
                self._exposed |= dict.fromkeys(definition.exposed_names, known)
            elif known.definition != definition:
                remedy = f"Use another name: this is a {known.definition.kind} defined as {known.definition}"
                raise InvalidArgumentError("name", definition.name, remedy)
            return known

    def add_source(self, source: MetricSource) -> None:
        """Add a source, which is read once per collection.

        If the name of ``source`` is in use, the result depends on ``source.if_taken``: ``"replace"`` replaces the other
        source, ``"number"`` appends a number to the name, and ``"refuse"`` raises InvalidArgumentError.
        """
        with self._lock:
            self.remove_ended()
            if source.name in self._sources and source.if_taken == "refuse":
                raise InvalidArgumentError("name", source.name, "Use another name: this one has a callback already")
            wanted, numbers = source.name, itertools.count(2)
            while source.name in self._sources and source.if_taken == "number":
                source.name = f"{wanted}-{next(numbers)}"
            self._sources[source.name] = source

    def remove_ended(self) -> None:
        """Remove all sources whose ``is_over`` is True. Calls the ``end()`` method of each of them first."""
        with self._lock:
            for known in [each for each in self._sources.values() if each.is_over]:
                known.end()
                del self._sources[known.name]

    def configure(self, pattern: str, **settings: Any) -> list[str]:  # noqa: ANN401  the fields of Policy
        """Change the policy of the existing and future stats whose names match a shell pattern.

        Args:
            pattern: shell pattern of names, such as ``training.*``. If several patterns match a name, the most recent
                value of each setting applies.
            settings: fields of :class:`~delta_tracker.monitor.policy.Policy`.

        Returns:
            The names of the registered stats that match.

        Raises:
            InvalidArgumentError: for an unknown setting or an invalid value. Nothing is changed.
        """
        replace(Policy(), **_checked(settings))
        with self._lock:
            self._rules[pattern] = {**self._rules.pop(pattern, {}), **settings}
            found = self.find(pattern)
            for stat in found:
                stat.configure(self._policy(stat.name))
            return [stat.name for stat in found]

    def find(self, pattern: str = "*", *, kind: Kind | None = None) -> list[Stat]:
        """Return the stats whose names match a shell pattern, sorted by name. ``kind=None`` includes all kinds."""
        with self._lock:
            found = [stat for stat in self._stats.values() if fnmatchcase(stat.name, pattern)]
        return sorted((s for s in found if kind is None or s.definition.kind is kind), key=lambda stat: stat.name)

    @property
    def sources(self) -> list[MetricSource]:
        """Sources that are read once per collection."""
        with self._lock:
            return list(self._sources.values())

    def reset(self) -> list[MetricSource]:
        """Discard all records and replace the locks. Called in a forked child, whose parent may have held the locks.

        Removes and returns the sources whose ``after_fork()`` raised an exception.
        """
        self._lock = threading.RLock()
        for stat in self._stats.values():
            stat.reset()
        failed = []
        for source in list(self._sources.values()):
            try:
                source.after_fork()
            except Exception:  # noqa: BLE001  it is the user's code; the caller counts it
                failed.append(source)
                del self._sources[source.name]
        return failed

    def _check_exposed(self, definition: Definition) -> None:
        for name in sorted(definition.exposed_names & self._exposed.keys()):
            known = self._exposed[name].definition
            remedy = (
                f"Use another name: Prometheus cannot distinguish it from the {known.kind} {known.name!r}, which also "
                f"uses the name {name!r}"
            )
            raise InvalidArgumentError("name", definition.name, remedy)

    def _policy(self, name: str) -> Policy:
        policy = self._defaults[exposed(name)]
        for pattern, settings in self._rules.items():
            if fnmatchcase(name, pattern):
                policy = replace(policy, **settings)
        return policy


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    for name in settings:
        if name not in _SETTINGS:
            raise InvalidArgumentError("setting", name, f"Pass one of {', '.join(_SETTINGS)}")
    return settings
