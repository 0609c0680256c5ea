"""Mark a model while a restore writes it or while it follows a stream, so that it raises until it is complete."""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from delta_tracker.errors import IncompleteModelError


class _Incomplete:
    """Forward pre-hook of a model that is being written.

    Args:
        version: version that is restored or followed.
        is_following: True if the model follows a stream, and False if a restore writes it.
    """

    def __init__(self, version: int, *, is_following: bool) -> None:
        self.version = version
        self.is_following = is_following

    def __call__(self, model: nn.Module, inputs: object) -> None:  # noqa: ARG002  torch's signature
        raise IncompleteModelError(self.version, is_following=self.is_following)


def mark(model: nn.Module, version: int) -> RemovableHandle:
    """Make every forward pass of ``model`` raise IncompleteModelError until :func:`unmark` or ``handle.remove()``.

    Direct calls of the modules inside the model do not raise.

    Args:
        model: the model that is about to be written.
        version: version that is restored.

    Returns:
        Handle of the hook.
    """
    return model.register_forward_pre_hook(_Incomplete(version, is_following=False), prepend=True)


def mark_following(model: nn.Module, version: int) -> None:
    """Make every forward pass of ``model`` raise IncompleteModelError until :func:`unmark`, as :func:`mark` does.

    Args:
        model: the model that is about to be written.
        version: version of a stream that the model follows. It replaces that of an earlier call or restore.
    """
    marks = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, _Incomplete)]  # noqa: SLF001
    for hook in marks:
        hook.version, hook.is_following = version, True
    if not marks:
        model.register_forward_pre_hook(_Incomplete(version, is_following=True), prepend=True)


def is_following(model: nn.Module) -> bool:
    """Return True if ``model`` follows a stream, and no restore has written it since, not even in part."""
    hooks = model._forward_pre_hooks.values()  # noqa: SLF001  a hook has no public list
    return {hook.is_following for hook in hooks if isinstance(hook, _Incomplete)} == {True}


def unmark(model: nn.Module) -> None:
    """Remove all marks, also those of earlier restores, because the model is complete."""
    for number, hook in list(model._forward_pre_hooks.items()):  # noqa: SLF001  a hook has no public list
        if isinstance(hook, _Incomplete):
            del model._forward_pre_hooks[number]  # noqa: SLF001


def check_complete(model: nn.Module) -> None:
    """Raise an error if the model is marked.

    Raises:
        IncompleteModelError: if a restore of the model was interrupted, or the model follows a stream.
    """
    for hook in model._forward_pre_hooks.values():  # noqa: SLF001
        if isinstance(hook, _Incomplete):
            hook(model, ())
