"""Row store that the command ``sink`` writes to, from its target on the command line."""

from __future__ import annotations

import importlib
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.sinks.row_sink import RowSink

_TARGETS = (
    "Pass redis://HOST:PORT/DB?prefix=PREFIX, rediss://..., lmdb:///DIRECTORY, or MODULE:FUNCTION, a function that "
    "returns a RowSink"
)
_REDIS_OPTIONS = ["prefix"]


def open_target(target: str) -> RowSink:
    """Return the sink of a target, which is not opened yet.

    Args:
        target: ``redis://host:port/db?prefix=...``, ``rediss://...`` with TLS, ``lmdb:///directory``, or
            ``module:function``, the name of a function without arguments that returns a
            :class:`~delta_tracker.sinks.row_sink.RowSink`.

    Raises:
        InvalidArgumentError: if the target or one of its options is invalid. The message omits a password.
        MissingExtraError: if the package of the row store is not installed.

    Example:
        >>> open_target("redis://127.0.0.1:6379/0?color=red")
        Traceback (most recent call last):
        delta_tracker.errors.InvalidArgumentError: TARGET='color' cannot be used. Pass options of: ['prefix'].
    """
    scheme, separator, _ = target.partition("://")
    if separator and scheme in ("redis", "rediss"):
        return _redis(target)
    if separator and scheme == "lmdb":
        return _lmdb(target)
    if separator:
        raise InvalidArgumentError("TARGET", f"{scheme}://", _TARGETS)
    return _custom(target)


def _redis(target: str) -> RowSink:
    parts = urlsplit(target)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in _REDIS_OPTIONS:
            raise InvalidArgumentError("TARGET", name, f"Pass options of: {_REDIS_OPTIONS}")
    if not parts.hostname or parts.fragment:
        raise InvalidArgumentError("TARGET", f"{parts.scheme}://", _TARGETS)
    sink = importlib.import_module("delta_tracker.sinks.redis").RedisSink
    return _checked(sink(urlunsplit(parts._replace(query="")), **options), target)


def _lmdb(target: str) -> RowSink:
    parts = urlsplit(target)
    if parts.netloc or parts.query or parts.fragment or len(parts.path) < len("/d"):
        raise InvalidArgumentError("TARGET", target, "Pass lmdb:///DIRECTORY, an absolute path without options")
    sink = importlib.import_module("delta_tracker.sinks.lmdb").LmdbSink
    return _checked(sink(unquote(parts.path)), target)


def _custom(target: str) -> RowSink:
    module, separator, function = target.partition(":")
    if not separator or not module or not function:
        raise InvalidArgumentError("TARGET", target, _TARGETS)
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError("TARGET", target, f"{_TARGETS}: {error}") from error
    return _checked(build(), target)


def _checked(sink: object, target: str) -> RowSink:
    if not isinstance(sink, RowSink):
        raise InvalidArgumentError("TARGET", target, f"{_TARGETS}: it returned a {type(sink).__name__}")
    return sink
