"""The installed package with PyTorch Lightning: ``pytorch_lightning``, or ``lightning`` with ``lightning.pytorch``."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from delta_tracker.errors import InvalidArgumentError, MissingExtraError

_NAMES = ("pytorch_lightning", "lightning.pytorch")


def lightning_package() -> ModuleType:
    """Return the package that is imported already, or else the first one that is installed.

    The classes of the two are different, and ``Trainer(callbacks=callback)`` without a list takes only its own.

    Raises:
        MissingExtraError: if neither is installed.
    """
    for name in sorted(_NAMES, key=lambda name: sys.modules.get(name) is None):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in {name, name.partition(".")[0]}:
                raise MissingExtraError(error.name or name, "lightning") from error
    raise MissingExtraError(_NAMES[0], "lightning")


def check_only_one(callback: object, trainer: Any, remedy: str) -> None:  # noqa: ANN401  Trainer of either package
    """Check that ``trainer`` has one callback of a class, because their states have the same key in a checkpoint.

    Raises:
        InvalidArgumentError: if there are several; the message ends with ``remedy``.
    """
    alike = [each for each in trainer.callbacks if isinstance(each, type(callback))]
    if len(alike) > 1:
        raise InvalidArgumentError("callbacks", alike, remedy)
