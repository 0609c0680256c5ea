"""Parsing and validation of store URLs, options and object names."""

import difflib
import math
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from delta_tracker.arguments import check_home
from delta_tracker.errors import InvalidArgumentError

REMOTE_POLL_SECONDS, LOCAL_POLL_SECONDS = 1.0, 0.01  # between two polls of a reader, by default
SCHEMES = ("file", "memory", "s3", "gs", "az", "http", "https")
_BUCKETS = {"s3": "bucket", "gs": "bucket", "az": "container"}
_NO_CACHE = {"Cache-Control": "no-cache", "Pragma": "no-cache"}
# obstore's own limit is three minutes, too long to wait for a store that does not respond.
_MAX_RETRIES = 6  # for about five seconds
_RETRY_TIMEOUT = timedelta(seconds=30)
# A request may take any time as long as bytes arrive; obstore's own limit is 30 seconds for the whole request.
_CLIENT_DEFAULTS = {"timeout": "365days", "read_timeout": "30s"}
# Options of the HTTP client. obstore expects them separately from the store's options, and panics otherwise.
_CLIENT_OPTIONS = {
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
# The options of each kind of bucket that most programs set, to suggest one of them. obstore knows all that are valid.
_BUCKET_OPTIONS = {
    "s3": {
        "access_key_id",
        "endpoint",
        "region",
        "secret_access_key",
        "session_token",
        "skip_signature",
        "virtual_hosted_style_request",
    },
    "gs": {"application_credentials", "service_account", "service_account_key", "skip_signature"},
    "az": {"account_key", "account_name", "client_id", "client_secret", "endpoint", "sas_token", "tenant_id"},
}
_UNIT_SECONDS = {"n": 1e-9, "u": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_NO_COLON = re.compile(rf"({'|'.join(SCHEMES)})//+", re.IGNORECASE)
_OPTION_PREFIX = re.compile(r"^(aws|google|azure)_")
_ENDPOINTS = {"endpoint", "endpoint_url"}
# Control characters, backslashes, #, which obstore uses to mark a file that is still being written, and surrogates,
# which replace bytes that are not UTF-8.
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\#\ud800-\udfff]")
PLAIN_NAME = re.compile(r"[a-z]+/[0-9a-z_-]+(\.[a-z]+)?")
"""Pattern of most names in a store. All names that match are valid, so no further check of them is needed."""
_NO_PARTS = frozenset(("", ".", ".."))
_MAX_NAME_BYTES = 1024


def store_url(location: object) -> str:
    """Return the URL of a store. ``location`` is a URL, an ``os.PathLike``, or a path string without a scheme."""
    if isinstance(location, str) and location:
        if _SCHEME.match(location):
            return location
        if found := _NO_COLON.match(location):
            corrected = f"{found[1].lower()}://{location[found.end() :]}"
            raise InvalidArgumentError("url", location, f"Write {corrected}, with a colon")
    elif not isinstance(location, os.PathLike):
        raise InvalidArgumentError("url", location, "Pass a url such as s3://bucket/prefix, or the path of a directory")
    path = Path(location)
    check_home("url", path)  # only a shell expands a leading ~
    return path.absolute().as_uri()


def local_directory(url: object) -> Path | None:
    """Return the directory of a ``file://`` URL, or None for a remote or in-memory store."""
    parts = _split(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def redacted_url(url: str) -> str:
    """Return ``url`` without user and password, for use in metrics."""
    parts = urlsplit(url)  # of any kind of store
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if "@" in parts.netloc else url


def is_remote(url: str) -> bool:
    """Return True if the store is accessed over a network."""
    return _split(url).scheme not in ("file", "memory")


def is_http(url: str) -> bool:
    """Return True for an http or https url: a web server or a cache in front of one, which cannot list its objects."""
    return _split(url).scheme in ("http", "https")


def connection(url: str, options: object, *, past_cache: bool = False) -> dict[str, Any]:
    """Return obstore's arguments to open the remote store at ``url``. With ``past_cache``, requests bypass caches.

    Errors do not contain the values of options, which may be secret.
    """
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        remedy = "Pass a mapping of names to values, both strings, such as {'region': 'us-east-1'}"
        raise InvalidArgumentError("options", type(options), remedy)
    client: dict[str, str] = dict(_CLIENT_DEFAULTS)
    store: dict[str, str] = {}
    for key, value in options.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise InvalidArgumentError("options", key, "Pass names and values as strings, also true and false")
        plain = _OPTION_PREFIX.sub("", key.lower())
        if plain in _CLIENT_OPTIONS:
            client[plain] = value
        else:
            store[key] = value
    if is_http(url):
        if store:
            near = suggestion(url, min(store))
            remedy = f"Use only {', '.join(sorted(_CLIENT_OPTIONS))}{near}"
            raise InvalidArgumentError("options", sorted(store), remedy)
        if _split(url).scheme == "http":
            client["allow_http"] = "true"
    endpoint = next((value for key, value in store.items() if _OPTION_PREFIX.sub("", key.lower()) in _ENDPOINTS), "")
    if endpoint.startswith("http://") and client.get("allow_http") != "true":
        raise InvalidArgumentError("options", ["endpoint"], "Add allow_http='true' to the options: it is an http url")
    headers = {"default_headers": _NO_CACHE} if past_cache else {}
    retry = {"max_retries": _MAX_RETRIES, "retry_timeout": _RETRY_TIMEOUT}
    return {"client_options": client | headers, "config": store, "retry_config": retry}


def suggestion(url: str, option: str) -> str:
    """Return a sentence that suggests a valid option similar to ``option``; an empty string if there is none."""
    known = _CLIENT_OPTIONS | _BUCKET_OPTIONS.get(_split(url).scheme, frozenset())
    near = difflib.get_close_matches(_OPTION_PREFIX.sub("", option.lower()), known, n=1)
    return f". Did you mean {near[0]} instead of {option}?" if near else ""


def seconds_of(duration: str) -> float:
    """Convert ``duration`` from the format of obstore's options to seconds; infinity for days and longer units."""
    found = re.findall(r"(\d+)\s*(ms|mo|[a-zA-Z])", duration)
    return sum(int(number) * _UNIT_SECONDS.get(unit, math.inf) for number, unit in found)


def check_name(argument: str, name: object) -> None:
    """Raise InvalidArgumentError if ``name`` is not a valid name of an object. The error names ``argument``."""
    if not isinstance(name, str) or not is_name(name):
        remedy = "Pass a relative name such as parts/x, without backslash, #, control, empty, . or .. part"
        raise InvalidArgumentError(argument, name, remedy)


def is_name(name: str) -> bool:
    """Return True if ``name`` is a valid name of an object."""
    return (
        not _FORBIDDEN.search(name)
        and _NO_PARTS.isdisjoint(name.split("/"))
        and len(name.encode(errors="replace")) <= _MAX_NAME_BYTES
    )


def _split(url: object) -> SplitResult:
    if not isinstance(url, str):
        raise InvalidArgumentError("url", url, "Pass a string")
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise InvalidArgumentError("url", url, "Remove the query and the fragment (? and #)")
    if parts.scheme not in SCHEMES:
        remedy = f"Use one of the schemes {', '.join(SCHEMES)}. Write a directory as file:///directory"
        raise InvalidArgumentError("url", url, remedy)
    if parts.scheme != "memory" and not url[len(parts.scheme) :].startswith("://"):
        raise InvalidArgumentError("url", url, f"Write {parts.scheme}:// with two slashes")
    if parts.scheme in ("http", "https") and ("@" in parts.netloc or not parts.hostname):
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        raise InvalidArgumentError("url", shown, "Write a host, without user and password: obstore does not send them")
    if parts.scheme in _BUCKETS and not parts.netloc:
        what = _BUCKETS[parts.scheme]
        raise InvalidArgumentError("url", url, f"Write {parts.scheme}://{what}/prefix, with a {what}")
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise InvalidArgumentError("url", url, "Write an absolute directory as file:///directory")
    return parts
