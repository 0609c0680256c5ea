"""Questions about an error that do not depend on its class alone."""

from __future__ import annotations

from delta_tracker.errors.predictors import ModelMismatchError, PartialRowsError
from delta_tracker.errors.ranks import PublishError
from delta_tracker.errors.stores import UnknownOutcomeError
from delta_tracker.errors.streams import CorruptPartError, MalformedError


def kind_of(error: BaseException) -> tuple[object, ...]:
    """Return a key that is the same for each attempt that fails for one reason, to log the failure once.

    The texts of such errors differ: they contain the time of a request, or the name of a part that is written anew at
    each attempt. The key has the type and, if there is one, the table, tensor, rank or kind of object.
    """
    match error:
        case MalformedError() | CorruptPartError():
            return type(error), error.path.partition("/")[0]
        case ModelMismatchError():
            return type(error), error.name
        case PartialRowsError():
            return type(error), error.table
        case PublishError():
            return type(error), error.rank
    return (type(error),)


def is_unknown(error: BaseException) -> bool:
    """Return True if a version may have been published, or may appear later, although publishing it raised ``error``.

    This is so if the answer to the creation of its entry was lost, or if the entry was created, but is not on disk yet.
    """
    match error:
        case PublishError():
            return error.is_unknown
        case UnknownOutcomeError():
            return error.directory in (None, "log")
    return False


def is_panic(error: BaseException) -> bool:
    """Return True if ``error`` is a panic of Rust code in an extension module.

    Each extension module that is written in Rust defines its own panic class. The class derives from ``BaseException``
    and cannot be imported, so it is recognized by its name.
    """
    return type(error).__name__ == "PanicException"
