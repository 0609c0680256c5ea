"""``sink``: write a stream to a row store, and keep the row store up to date."""

import importlib
import time
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

import click

from delta_tracker.cli.stream_command import Number, Stream, stream_command, terminated
from delta_tracker.errors import FollowEndedError, InvalidArgumentError
from delta_tracker.predictor.predictor import Predictor
from delta_tracker.sinks.row_sink import RowSink

_TARGETS = (
    "Pass redis://HOST:PORT/DB?prefix=PREFIX, rediss://..., lmdb:///DIRECTORY, or MODULE:FUNCTION, a function that "
    "returns a RowSink"
)
_REDIS_OPTIONS = ["prefix"]
_SHOW_SECONDS = 0.2  # interval at which a new version is looked for, to print it

_HELP = """Write the stream at URL to a row store and follow it, until SIGTERM or Ctrl-C.

TARGET is redis://HOST:PORT/DB?prefix=PREFIX (rediss:// with TLS), lmdb:///DIRECTORY, or MODULE:FUNCTION for a row store
of your own: a function without arguments that returns a RowSink. Readers find each row by table and row id, or by table
and raw id, as of the stored version or a later one. Dense tensors are not written. Run one sink per row store; a second
one stops with exit code 2.

After an interruption at any point, the next run continues from the stored version. Errors of the stream or of the row
store are logged, and the write is tried again. SIGTERM ends the command with exit code 143.

\b
Examples:
  delta-tracker sink s3://bucket/ctr 'redis://127.0.0.1:6379/0?prefix=ctr' --name redis-1
  delta-tracker sink file:///streams/ctr lmdb:///var/lib/ctr --once
"""


@click.command("sink", help=_HELP)
@stream_command
@click.argument("target")
@click.option("--once", is_flag=True, help="Exit when TARGET has the newest version of URL.")
@click.option("--name", help="Write heartbeats with this name to URL.")
@click.option("--poll", type=Number(0.01), metavar="SECONDS", help="Polling interval. Default: by URL.")
@click.option("--cache", metavar="DIRECTORY", help="Directory in which the predictors of this host keep parts.")
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="PATTERN",
    help="Write only tables of this name or pattern; repeat it for more.",
)
def command(
    stream: Stream,
    target: str,
    name: str | None,
    poll: float | None,
    cache: str | None,
    tables: tuple[str, ...],
    *,
    once: bool,
) -> int:
    """Write the stream until SIGTERM or Ctrl-C, or up to its newest version if ``once`` is True. Print each version."""
    if once and poll is not None:
        raise InvalidArgumentError("--poll", poll, "Pass it without --once, which does not poll")
    sink = _opened(target)
    shown: int | None = None
    try:
        predictor = Predictor(sink, stream.storage, tables=tables or None, name=name, cache=cache)
        if once:
            stream.out.result({"version": predictor.sync()}, f"version {predictor.version} is stored")
            return 0
        with terminated(), predictor:
            predictor.follow(poll)
            while not isinstance(predictor.error, FollowEndedError):
                if predictor.version is not None and predictor.version != shown:
                    shown = predictor.version
                    stream.out.result({"version": shown}, f"version {shown} is stored")
                time.sleep(_SHOW_SECONDS)
    finally:
        sink.close()
    return 0


def _opened(target: str) -> RowSink:
    """Create the sink for a target, without opening it.

    Args:
        target: ``redis://host:port/db?prefix=...``, ``rediss://...`` for TLS, ``lmdb:///directory``, or
            ``module:function``, which names a function without arguments that returns a
            :class:`~delta_tracker.sinks.row_sink.RowSink`.

    Raises:
        InvalidArgumentError: if the target or one of its options is invalid. The message never contains a password.
        MissingExtraError: if the package of the row store is not installed.

    Example:
        >>> _opened("redis://127.0.0.1:6379/0?color=red")
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
    options: dict[str, Any] = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in _REDIS_OPTIONS:
            raise InvalidArgumentError("TARGET", name, f"Pass options of: {_REDIS_OPTIONS}")
    if not parts.hostname or parts.fragment:
        raise InvalidArgumentError("TARGET", f"{parts.scheme}://", _TARGETS)
    from delta_tracker.sinks.redis import RedisSink  # noqa: PLC0415  optional

    return RedisSink(urlunsplit(parts._replace(query="")), **options)


def _lmdb(target: str) -> RowSink:
    parts = urlsplit(target)
    if parts.netloc or parts.query or parts.fragment or len(parts.path) < len("/d"):
        raise InvalidArgumentError("TARGET", target, "Pass lmdb:///DIRECTORY, an absolute path without options")
    from delta_tracker.sinks.lmdb import LmdbSink  # noqa: PLC0415  optional

    return LmdbSink(unquote(parts.path))


def _custom(target: str) -> RowSink:
    module, separator, function = target.partition(":")
    if not separator or not module or not function:
        raise InvalidArgumentError("TARGET", target, _TARGETS)
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError("TARGET", target, f"{_TARGETS}: {error}") from error
    try:
        sink = build()
    except TypeError as error:  # it takes arguments, or cannot be called
        raise InvalidArgumentError("TARGET", target, f"{_TARGETS}: {error}") from error
    if not isinstance(sink, RowSink):
        raise InvalidArgumentError("TARGET", target, f"{_TARGETS}: it returned a {type(sink).__name__}")
    return sink
