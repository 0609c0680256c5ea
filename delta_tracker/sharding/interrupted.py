"""Mark a model while a restore writes it, so that an interrupted restore leaves a model that raises."""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from delta_tracker.errors import InterruptedRestoreError


class _Incomplete:
    """Forward pre-hook of a model that is written by a restore.

    Args:
        version: version that is restored.
    """

    def __init__(self, version: int) -> None:
        self.version = version

    def __call__(self, model: nn.Module, inputs: object) -> None:  # noqa: ARG002  torch's signature
        raise InterruptedRestoreError(self.version)


def mark(model: nn.Module, version: int) -> RemovableHandle:
    """Make every forward pass of ``model`` raise InterruptedRestoreError until :func:`unmark` or ``handle.remove()``.

    Direct calls of the modules inside the model do not raise.

    Args:
        model: the model that is about to be written.
        version: version that is restored.

    Returns:
        Handle of the hook.
    """
    return model.register_forward_pre_hook(_Incomplete(version), prepend=True)


def unmark(model: nn.Module) -> None:
    """Remove all marks, also those of earlier restores, because the model is complete."""
    for number, hook in list(model._forward_pre_hooks.items()):  # noqa: SLF001  a hook has no public list
        if isinstance(hook, _Incomplete):
            del model._forward_pre_hooks[number]  # noqa: SLF001


def check_complete(model: nn.Module) -> None:
    """Raise an error if a restore of the model was interrupted.

    Raises:
        InterruptedRestoreError: if it was.
    """
    for hook in model._forward_pre_hooks.values():  # noqa: SLF001
        if isinstance(hook, _Incomplete):
            raise InterruptedRestoreError(hook.version)
