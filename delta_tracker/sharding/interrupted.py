"""Make the forward passes of a model raise an error while the model is being restored or follows a stream."""

from dataclasses import dataclass

from torch import nn

from delta_tracker.errors import IncompleteModelError


@dataclass(eq=False)
class _Incomplete:
    """Forward pre-hook of an incomplete model. It raises IncompleteModelError.

    Args:
        version: version that is being restored, or that the model has reached in the stream.
        is_following: True if the model follows a stream, False if a restore writes to it.
    """

    version: int
    is_following: bool

    def __call__(self, model: nn.Module, inputs: object) -> None:  # noqa: ARG002  torch's signature
        raise IncompleteModelError(self.version, is_following=self.is_following)


def mark_incomplete(model: nn.Module, version: int, *, is_following: bool = False) -> None:
    """Make every forward pass of ``model`` raise IncompleteModelError until :func:`mark_complete` is called.

    Direct calls of submodules do not raise the error. ``version`` is the version that is being restored or, if
    ``is_following`` is True, the version that the model has reached in the stream.
    """
    held = _mark_of(model)
    if held is None:
        model.register_forward_pre_hook(_Incomplete(version, is_following), prepend=True)
    else:
        held.version, held.is_following = version, is_following


def is_following(model: nn.Module) -> bool:
    """Return True if ``model`` follows a stream and has not been restored since then."""
    held = _mark_of(model)
    return held is not None and held.is_following


def mark_complete(model: nn.Module) -> None:
    """Undo :func:`mark_incomplete`. Call this function when the model is complete."""
    for number, hook in list(model._forward_pre_hooks.items()):  # noqa: SLF001  a hook has no public list
        if isinstance(hook, _Incomplete):
            del model._forward_pre_hooks[number]  # noqa: SLF001


def check_complete(model: nn.Module) -> None:
    """Raise IncompleteModelError if a restore of ``model`` was interrupted or ``model`` follows a stream."""
    held = _mark_of(model)
    if held is not None:
        held(model, ())


def _mark_of(model: nn.Module) -> _Incomplete | None:
    hooks = model._forward_pre_hooks.values()  # noqa: SLF001
    return next((hook for hook in hooks if isinstance(hook, _Incomplete)), None)
