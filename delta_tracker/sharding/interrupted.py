"""Mark a model while a restore writes it or while it follows a stream, so that it raises until it is complete."""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from delta_tracker.errors import FollowingError, InterruptedRestoreError


class _Incomplete:
    """Forward pre-hook of a model that is being written.

    Args:
        version: version that is restored or followed.
        error: class of the error that the hook raises.
    """

    def __init__(self, version: int, error: type[InterruptedRestoreError]) -> None:
        self.version = version
        self.error = error

    def __call__(self, model: nn.Module, inputs: object) -> None:  # noqa: ARG002  torch's signature
        raise self.error(self.version)


def mark(model: nn.Module, version: int) -> RemovableHandle:
    """Make every forward pass of ``model`` raise InterruptedRestoreError until :func:`unmark` or ``handle.remove()``.

    Direct calls of the modules inside the model do not raise.

    Args:
        model: the model that is about to be written.
        version: version that is restored.

    Returns:
        Handle of the hook.
    """
    return model.register_forward_pre_hook(_Incomplete(version, InterruptedRestoreError), prepend=True)


def mark_following(model: nn.Module, version: int) -> None:
    """Make every forward pass of ``model`` raise FollowingError until :func:`unmark`, as :func:`mark` does.

    Args:
        model: the model that is about to be written.
        version: version of a stream that the model follows. It replaces that of an earlier call or restore.
    """
    marks = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, _Incomplete)]  # noqa: SLF001
    for hook in marks:
        hook.version, hook.error = version, FollowingError
    if not marks:
        model.register_forward_pre_hook(_Incomplete(version, FollowingError), prepend=True)


def is_following(model: nn.Module) -> bool:
    """Return True if ``model`` follows a stream, and no restore has written it since, not even in part."""
    hooks = model._forward_pre_hooks.values()  # noqa: SLF001  a hook has no public list
    return {hook.error for hook in hooks if isinstance(hook, _Incomplete)} == {FollowingError}


def unmark(model: nn.Module) -> None:
    """Remove all marks, also those of earlier restores, because the model is complete."""
    for number, hook in list(model._forward_pre_hooks.items()):  # noqa: SLF001  a hook has no public list
        if isinstance(hook, _Incomplete):
            del model._forward_pre_hooks[number]  # noqa: SLF001


def check_complete(model: nn.Module) -> None:
    """Raise an error if the model is marked.

    Raises:
        InterruptedRestoreError: if a restore of the model was interrupted.
        FollowingError: if the model follows a stream.
    """
    for hook in model._forward_pre_hooks.values():  # noqa: SLF001
        if isinstance(hook, _Incomplete):
            raise hook.error(hook.version)
