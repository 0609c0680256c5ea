"""Where an object store is and what its objects are called, checked before the store sees them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from delta_tracker.errors import InvalidArgumentError

_SCHEMES = ("file", "memory", "s3", "gs", "az")
# obstore's own limit is three minutes; nobody waits that long for an answer of a store that does not give one.
_MAX_RETRIES = 6  # some five seconds
_RETRY_TIMEOUT = timedelta(seconds=30)
# A request may take as long as it brings bytes; obstore's own limit is 30 seconds for all of them.
_CLIENT_DEFAULTS = {"timeout": "365days", "read_timeout": "30s"}
# These belong to the HTTP client. obstore takes them apart from the settings of the store, and panics if it does not.
_CLIENT_OPTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
_OPTION_PREFIX = re.compile(r"^(aws|google|azure)_")
# Control characters, backslashes, and #, with which obstore marks a file that is still being written.
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\#]")
_NO_PARTS = frozenset(("", ".", ".."))
_MAX_NAME_BYTES = 1024


def local_directory(url: object) -> Path | None:
    """The directory that a url names, None if it names a remote store or one in memory.

    Raises:
        InvalidArgumentError: for anything but a url of one of the schemes.
    """
    parts = _split(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def is_remote(url: str) -> bool:
    """Whether the objects of a url are reached over a network."""
    return _split(url).scheme not in ("file", "memory")


def connection(url: str, options: Mapping[str, str] | None) -> dict[str, Any]:
    """What obstore's ``from_url`` takes beside the url. No error shows the value of an option: it may be a secret.

    Raises:
        InvalidArgumentError: if the store has no options, or one of them is not a string.
    """
    scheme = _split(url).scheme
    if scheme in ("file", "memory"):
        if options is not None:
            raise InvalidArgumentError("options", sorted(options), f"Leave them out: a {scheme}:// store has none")
        return {}
    client: dict[str, str] = dict(_CLIENT_DEFAULTS)
    store: dict[str, str] = {}
    for key, value in (options or {}).items():
        if not (_is_text(key) and _is_text(value)):
            raise InvalidArgumentError("options", key, "Pass names and values as strings, true and false too")
        plain = _OPTION_PREFIX.sub("", key.lower())
        if plain in _CLIENT_OPTIONS:
            client[plain] = value
        else:
            store[key] = value
    retry = {"max_retries": _MAX_RETRIES, "retry_timeout": _RETRY_TIMEOUT}
    return {"client_options": client, "config": store, "retry_config": retry}


def check_name(argument: str, name: object) -> None:
    """Refuse a name that leaves the root, or that not every store can hold.

    Raises:
        InvalidArgumentError: naming ``argument``.
    """
    if (
        not isinstance(name, str)
        or _FORBIDDEN.search(name)
        or not _NO_PARTS.isdisjoint(name.split("/"))
        or len(name.encode(errors="replace")) > _MAX_NAME_BYTES
    ):
        raise InvalidArgumentError(
            argument, name, "Pass a relative name such as parts/x, without backslash, #, control, empty, . or .. part"
        )


def _split(url: object) -> SplitResult:
    if not isinstance(url, str):
        raise InvalidArgumentError("url", url, "Pass a string; of a path, path.absolute().as_uri()")
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise InvalidArgumentError("url", url, "Leave ? and # out of it")
    if parts.scheme not in _SCHEMES:
        raise InvalidArgumentError(
            "url", url, f"Give it one of the schemes {', '.join(_SCHEMES)}; a directory is file:///directory"
        )
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise InvalidArgumentError("url", url, "Write an absolute directory as file:///directory")
    return parts


def _is_text(value: object) -> bool:
    return isinstance(value, str)
