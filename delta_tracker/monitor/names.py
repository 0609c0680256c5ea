"""Which names, units and labels are allowed: those that every sink can carry.

The rules are Prometheus' (https://prometheus.io/docs/concepts/data_model/), with dots allowed between the parts of a
name: they make namespaces, such as ``training.loss``, and become underscores where a sink has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from delta_tracker.errors import InvalidArgumentError

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*(\.[a-zA-Z_][a-zA-Z0-9_]*)*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_UNIT = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED_LABELS = frozenset({"le", "quantile"})
_MAX_LENGTH = 200

Labels = tuple[tuple[str, str], ...]
"""Label names and values, in the order of the definition."""


def check_name(argument: str, name: object) -> str:
    """``name`` itself.

    Raises:
        InvalidArgumentError: if it is no name of a stat or an event.

    Example:
        >>> check_name("name", "training.loss")
        'training.loss'
    """
    if not isinstance(name, str) or len(name) > _MAX_LENGTH or not _NAME.fullmatch(name):
        remedy = f"Use letters, digits and underscores, dots between parts, at most {_MAX_LENGTH} characters"
        raise InvalidArgumentError(argument, name, remedy)
    return name


def check_label_names(names: Iterable[str]) -> tuple[str, ...]:
    """``names`` as a tuple.

    Raises:
        InvalidArgumentError: if one is no label, is reserved (``le``, ``quantile``), or stands twice.
    """
    found = tuple(names)
    for name in found:
        if type(name) is not str or not _LABEL.fullmatch(name) or name in _RESERVED_LABELS:
            raise InvalidArgumentError("labels", name, "Use letters, digits and underscores, not le or quantile")
    if len(set(found)) < len(found):
        raise InvalidArgumentError("labels", found, "Name each label once")
    return found


def check_unit(unit: str) -> str:
    """``unit`` itself, which may be empty.

    Raises:
        InvalidArgumentError: if it is no base unit written out, such as ``seconds`` or ``bytes``.
    """
    if unit and not _UNIT.fullmatch(unit):
        raise InvalidArgumentError("unit", unit, "Write the base unit out, in lower case: seconds, bytes, ratio")
    return unit


def exposed(name: str) -> str:
    """``name`` as Prometheus takes it.

    Example:
        >>> exposed("training.loss")
        'training_loss'
    """
    return name.replace(".", "_")


def order_labels(stat: str, names: tuple[str, ...], labels: Mapping[str, object]) -> Labels:
    """``labels`` in the order of ``names``, values as text.

    Raises:
        InvalidArgumentError: if other labels are given than ``names``.
    """
    if len(labels) != len(names) or any(name not in labels for name in names):
        raise InvalidArgumentError("labels", dict(labels), f"{stat!r} has exactly the labels {list(names)}")
    return tuple((name, str(labels[name])) for name in names)


def label_pairs(labels: Labels) -> list[str]:
    """Return each label as text.

    Example:
        >>> label_pairs((("table", "user"), ("kind", "delta")))
        ['table=user', 'kind=delta']
    """
    return [f"{name}={value}" for name, value in labels]


def matches(pattern: str, name: str) -> bool:
    """Whether a name fits a shell pattern, as in ``training.*``; case counts.

    Example:
        >>> matches("training.*", "training.loss"), matches("training.*", "training")
        (True, False)
    """
    return fnmatchcase(name, pattern)
