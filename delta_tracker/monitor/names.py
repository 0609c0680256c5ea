"""Validation of names and labels.

Names and labels follow the rules of Prometheus (https://prometheus.io/docs/concepts/data_model/). In addition, names of
stats and events may contain dots, which separate namespaces, as in ``training.loss``. Sinks without namespaces replace
the dots by underscores.
"""

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from numbers import Number
from os import PathLike

from delta_tracker.errors import InvalidArgumentError

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*(\.[a-zA-Z_][a-zA-Z0-9_]*)*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED_LABELS = frozenset({"le", "quantile"})
_MAX_LENGTH = 200
_LABEL_VALUES = (str, Number, Enum, PathLike)  # types whose text is short and the same in each run

Labels = tuple[tuple[str, str], ...]
"""Label names and values, in the order of the definition."""


def check_stat_name(argument: str, name: object) -> str:
    """Return ``name`` if it is a valid stat or event name. ``argument`` is the parameter's name in error messages.

    Raises:
        InvalidArgumentError: for an invalid name.

    Example:
        >>> check_stat_name("name", "training.loss")
        'training.loss'
    """
    if not isinstance(name, str) or len(name) > _MAX_LENGTH or not _NAME.fullmatch(name):
        remedy = f"Use letters, digits and underscores, dots between parts, at most {_MAX_LENGTH} characters"
        raise InvalidArgumentError(argument, name, remedy)
    return name


def check_label_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` as a tuple if all of them are valid label names.

    Raises InvalidArgumentError for an invalid, reserved (``le``, ``quantile``) or duplicate name, or if ``names`` is a
    string.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InvalidArgumentError("labels", names, "Pass a list of label names, for example labels=['table']")
    found = tuple(names)
    for name in found:
        if type(name) is not str or not _LABEL.fullmatch(name) or name in _RESERVED_LABELS:
            raise InvalidArgumentError("labels", name, "Use letters, digits and underscores, not le or quantile")
    if len(set(found)) < len(found):
        raise InvalidArgumentError("labels", found, "Name each label once")
    return found


def check_text(argument: str, text: object) -> str:
    """Return ``text`` if it is a string that UTF-8 can encode. Raise InvalidArgumentError otherwise."""
    if not isinstance(text, str) or encodable(text) != text:
        raise InvalidArgumentError(argument, text, "Pass a text that UTF-8 can encode")
    return text


def encodable(text: str) -> str:
    r"""Return ``text`` with each surrogate character replaced by an escape sequence, so that UTF-8 can encode it.

    Python uses surrogate characters for bytes that are not valid UTF-8, for example in file names.

    Example:
        >>> encodable("a\udc80"), encodable("ä")
        ('a\\udc80', 'ä')
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def exposed(name: str) -> str:
    """Return the name of a stat in Prometheus: ``name`` with dots replaced by underscores.

    Example:
        >>> exposed("training.loss")
        'training_loss'
    """
    return name.replace(".", "_")


def order_labels(stat: str, names: tuple[str, ...], labels: Mapping[str, object]) -> Labels:
    """Return ``labels`` in the order of ``names``, with values converted to encodable strings.

    Raises InvalidArgumentError if the keys of ``labels`` differ from ``names``, or a value is not a string, a number, a
    path or an enum member.
    """
    if labels and not names:
        remedy = f"Define {stat!r} with labels={list(labels)}: it has no labels"
        raise InvalidArgumentError("labels", dict(labels), remedy)
    if len(labels) != len(names) or any(name not in labels for name in names):
        raise InvalidArgumentError("labels", dict(labels), f"Pass exactly the labels {list(names)} of {stat!r}")
    for name, value in labels.items():
        if not isinstance(value, _LABEL_VALUES):
            remedy = f"Pass a string or a number as label {name!r} of {stat!r}, whose labels are {list(names)}"
            raise InvalidArgumentError("labels", {name: value}, remedy)
    return tuple((name, encodable(str(labels[name]))) for name in names)


def labelled_call(stat: str, labels: Iterable[str], value: object) -> str:
    """Return the Python code of a call that records ``value``. ``labels`` are the arguments of ``cell()`` as text."""
    return f"{stat}.cell({', '.join(labels)}).add({value!r})"


def shown(labels: Mapping[str, object]) -> list[str]:
    """Format each label as a keyword argument in Python code.

    Example:
        >>> shown({"table": "user", "rank": 3})
        ["table='user'", 'rank=3']
    """
    return [f"{name}={value!r}" for name, value in labels.items()]


def refuse_labels(stat: str, value: object, labels: Mapping[str, object]) -> None:
    """Raise InvalidArgumentError for a call that passed ``labels`` and ``value`` to a stat without labels."""
    call = labelled_call(stat, shown(labels), value)
    remedy = f"Define {stat!r} with labels={list(labels)}, then call {call}: it has no labels"
    raise InvalidArgumentError("labels", dict(labels), remedy)


def label_pairs(labels: Labels) -> list[str]:
    """Format each label as ``name=value``.

    Example:
        >>> label_pairs((("table", "user"), ("kind", "delta")))
        ['table=user', 'kind=delta']
    """
    return [f"{name}={value}" for name, value in labels]
