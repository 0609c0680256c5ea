"""Find the dense tensors of a model: all parameters and persistent buffers outside sharded modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.sharding.discover import has_unknown_rows, walk
from delta_tracker.sharding.torchrec_api import load_torchrec


def dense_tensors(model: nn.Module, dense: nn.Module | Iterable[str]) -> dict[str, Tensor]:
    """Return the dense tensors that ``dense`` selects, without copying them.

    Args:
        model: the model whose tables are tracked.
        dense: a module, whose parameters and persistent buffers outside sharded modules are selected; or names of
            tensors, as in the model's ``state_dict``.

    Returns:
        Name to detached tensor. Names are those of the model's ``state_dict``, or those of the module's own
        ``state_dict`` if ``dense`` is a module outside the model. A tensor with several names is returned under each
        of them.

    Raises:
        InvalidArgumentError: if ``dense`` is a string, if the model has no dense tensor with a given name, or if a
            selected tensor is sparse, on the meta device, or of a subclass such as ``DTensor``.
    """
    if isinstance(dense, nn.Module):
        found = dict(_tensors(model, dense))
    else:
        if isinstance(dense, str):
            raise InvalidArgumentError("dense", dense, "Pass a module, or a list of names")
        every = dict(_tensors(model, model))
        for name in (names := list(dense)):
            if name not in every:
                raise InvalidArgumentError("dense", name, f"Pass some of {sorted(every)}")
        found = {name: every[name] for name in names}
    for name, tensor in found.items():
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.is_sparse:
            raise InvalidArgumentError("dense", name, f"Leave it out: a {type(tensor).__name__} is not whole here")
    return {name: tensor.detach() for name, tensor in found.items()}


def _tensors(model: nn.Module, root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each parameter and persistent buffer of ``root``, except sharded ones.

    Names are relative to ``model`` if ``root`` is part of it, otherwise to ``root``.
    """
    torchrec = load_torchrec()
    inside = {id(module) for _, module in walk(root, "", torchrec, set())}
    modules = list(walk(model, "", torchrec, set()))
    if not any(id(module) in inside for _, module in modules):
        modules = list(walk(root, "", torchrec, set()))
    for fqn, module in modules:
        is_sharded = torchrec.holder(module) is not None or has_unknown_rows(module, torchrec)
        if id(module) in inside and not is_sharded:
            for name, tensor in _own(module):
                yield f"{fqn}.{name}" if fqn else name, tensor


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:  # noqa: SLF001  also omitted by state_dict
            yield name, buffer
