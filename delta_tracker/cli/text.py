"""Formatting of values for output, and escaping of untrusted text. Depends only on the standard library."""

from datetime import UTC, datetime, tzinfo

from delta_tracker.errors import DeltaTrackerError

_KILO = 1000
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_FEW = 10
_MAX_TEXT = 400


def escaped(text: object) -> str:
    r"""Escape control characters in untrusted text, such as table names and errors in heartbeats.

    Terminal escape codes, line breaks and bidirectional marks are replaced by Python escape sequences.

    Example:
        >>> escaped("red \x1b[31m and\nmore")
        'red \\x1b[31m and\\nmore'
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in str(text))


def error_text(error: DeltaTrackerError) -> str:
    """Format an error as one line: its problem, truncated to 400 characters, and its remedy."""
    rest = " ..." if len(error.problem) > _MAX_TEXT else ""
    return escaped(f"error: {error.problem[:_MAX_TEXT]}{rest}. {error.remedy}.")


def count(number: int) -> str:
    """Format a number with thousands separators.

    Example:
        >>> count(1234567)
        '1,234,567'
    """
    return f"{number:,}"


def plural(number: int, one: str, many: str = "") -> str:
    """Format a number, followed by the singular ``one`` or the plural ``many`` (default: ``one`` and ``s``) of a noun.

    Example:
        >>> plural(1, "entry", "entries"), plural(2000, "part")
        ('1 entry', '2,000 parts')
    """
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def size(num_bytes: float) -> str:
    """Format a number of bytes with a decimal unit, from B to PB.

    Example:
        >>> size(999), size(1500), size(20_000_000)
        ('999 B', '1.5 kB', '20 MB')
    """
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB", "PB"]
    while round(value) >= _KILO and len(units) > 1:
        value /= _KILO
        units.pop(0)
    return f"{value:.1f} {units[0]}" if value < _FEW and units[0] != "B" else f"{value:.0f} {units[0]}"


def duration(seconds: float) -> str:
    """Format a duration in seconds with a suitable unit, from ms to d.

    Example:
        >>> duration(0.0123), duration(4.25), duration(600), duration(100_000)
        ('12 ms', '4.2 s', '10 min', '28 h')
    """
    if abs(seconds) < 1:
        return f"{seconds * 1000:.0f} ms"
    for unit, length in (("d", _DAY), ("h", _HOUR), ("min", _MINUTE)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < _FEW else f"{seconds:.0f} s"


def format_time(seconds: float, form: str = "%Y-%m-%d %H:%M:%S", zone: tzinfo | None = None) -> str:
    """Format a Unix time with a strftime format. ``zone`` defaults to the time zone of the host.

    Times that ``datetime`` cannot represent are formatted as a year.

    Example:
        >>> format_time(1e15)
        'in year 31690708'
    """
    try:
        return datetime.fromtimestamp(seconds, UTC).astimezone(zone).strftime(form)
    except (OverflowError, ValueError, OSError):
        return f"in year {1970 + int(seconds / (365.2425 * _DAY))}"


def short(name: str, most: int = 72) -> str:
    """Shorten a name to at most ``most`` characters by replacing its middle with an ellipsis.

    Example:
        >>> short("ec.embeddings.a_table_with_a_long_name", 20)
        'ec.emb…h_a_long_name'
    """
    return name if len(name) <= most else f"{name[: most // 3]}…{name[most // 3 + 1 - most :]}"
