"""Errors of calls and of the installation, which the caller can fix at once."""

from __future__ import annotations

from typing import Self

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
    """A required package is not installed, or was not built for the installed release of another one.

    ``package`` is the name of the package. ``extra`` is the extra of this library that installs it, or None if every
    installation of the library does. ``other`` is the other package with its release, or None if ``package`` is not
    installed. ``command`` installs what is missing.
    """

    def __init__(self, package: str, extra: str | None) -> None:
        self.package, self.extra = package, extra
        self.other: str | None = None
        self.command = "pip install " + (package if extra is None else f"'delta_tracker[{extra}]'")
        super().__init__(f"the package {package!r} is not installed", f"Install it with: {self.command}")

    @classmethod
    def unmatched(cls, package: str, other: str, command: str) -> MissingExtraError:
        """Return the error for a package that was not built for ``other``, which ``command`` replaces."""
        error = cls(package, None)
        error.other, error.command = other, command
        error.problem = f"{package} was not built for {other} and cannot be loaded"
        return error.advising(f"Install its match: {command}")

    def advising(self, remedy: str) -> Self:
        """Replace the remedy, and return the error."""
        super().advising(remedy)
        self.msg = self.args[0]  # what an ImportError prints
        return self
