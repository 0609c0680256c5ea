"""Names in a stream and in a predictor's model, where they differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from delta_tracker.errors import InvalidArgumentError

NameChoice = Mapping[str, str] | Callable[[str], str]


class Names:
    """Rule that gives the name in the model for a name in the stream, by the ``names`` of a :class:`ModelTarget`.

    A whole name wins over a prefix, a longer prefix over a shorter one, and all other names are equal on both sides.
    ``known`` has the names of the tables and tensors of the model. ``depends_on_stream`` is False if :meth:`of` returns
    the same names for every stream.
    """

    def __init__(self, choice: NameChoice, known: Collection[str]) -> None:
        self._function: Callable[[str], str] | None = None
        self._whole: dict[str, str] = {}
        self._prefixes: list[tuple[str, str]] = []
        if not isinstance(choice, Mapping):
            self._function, self.depends_on_stream = choice, True
            return
        for name, own in choice.items():
            is_prefix = not name or name.endswith(".")
            if not (any(each.startswith(own) for each in known) if is_prefix else own in known):
                raise InvalidArgumentError("names", own, f"Pass names of the model: {sorted(known)}")
            if is_prefix:
                self._prefixes.append((name, own))
            else:
                self._whole[name] = own
        self._prefixes.sort(key=lambda pair: len(pair[0]), reverse=True)
        self.depends_on_stream = bool(self._prefixes)

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """Return name in the stream to name in the model, for those of ``names`` that differ and all whole names."""
        if not self.depends_on_stream:
            return self._whole
        return {name: own for name in names if (own := self._own(name)) != name} | self._whole

    def _own(self, name: str) -> str:
        if self._function is not None:
            own: object = self._function(name)
            if not isinstance(own, str):
                raise InvalidArgumentError("names", own, f"Return a name in the model for {name!r}")
            return own
        for prefix, replacement in self._prefixes:
            if name.startswith(prefix):
                return replacement + name[len(prefix) :]
        return name
