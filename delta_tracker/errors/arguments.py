"""Errors of calls and of the installation, which the caller can fix at once."""

from __future__ import annotations

from delta_tracker.errors.base import DeltaTrackerError

_MAX_REPR = 500  # characters of a value in a message


def _brief(value: object) -> str:
    """Return the ``repr`` of a value in one line of at most 500 characters."""
    text = " ".join(line.strip() for line in repr(value).splitlines())
    return text if len(text) <= _MAX_REPR else f"{text[:_MAX_REPR]}..."


class InvalidArgumentError(DeltaTrackerError, ValueError):
    """An argument is invalid, or the call is invalid in the current state.

    ``argument`` names the invalid argument or object, and ``value`` is its value or state.
    """

    def __init__(self, argument: str, value: object, remedy: str) -> None:
        is_state = argument.endswith("()") and isinstance(value, str)
        problem = f"{argument} cannot be called: {value}" if is_state else f"{argument}={_brief(value)} cannot be used"
        super().__init__(problem, remedy)
        self.argument, self.value = argument, value


class UncopyableError(DeltaTrackerError, TypeError):
    """An object with hooks, locks or threads cannot be pickled or copied; ``kind`` is the name of its class."""

    def __init__(self, kind: str, remedy: str) -> None:
        super().__init__(f"a {kind} cannot be pickled or copied, because it has hooks, locks or threads", remedy)
        self.kind = kind


class MissingExtraError(DeltaTrackerError, ImportError):
    """A required package is not installed, or was not built for the installed release of another one, ``other``.

    ``package`` is its name, and ``extra`` the extra of this library that installs the package, None if each
    installation of the library does. ``command`` installs what is missing.
    """

    def __init__(self, package: str, extra: str | None, *, other: str | None = None, command: str = "") -> None:
        if other is None:
            what = package if extra is None else f"'delta_tracker[{extra}]'"
            command = f"pip install {what}"
            super().__init__(f"the package {package!r} is not installed", f"Install it with: {command}")
        else:
            problem = f"{package} was not built for {other} and cannot be loaded"
            super().__init__(problem, f"Install its match: {command}")
        self.package, self.extra, self.other, self.command = package, extra, other, command
