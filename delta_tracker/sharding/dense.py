"""Find the dense tensors of a model. These are all parameters and persistent buffers outside sharded modules.

Tensors that are split over the ranks are rejected, because a version would contain only one rank's part of them.
Tensors of sharded managed collisions are left out, because a stream stores the raw ids together with the rows.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeAlias

from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.sharding.discover import has_unknown_rows, walk
from delta_tracker.sharding.torchrec_api import Torchrec, managed_by_fsdp

_PARTS = "Leave it out, because each rank has a part of it: pass the names of whole tensors"


DenseChoice: TypeAlias = nn.Module | Mapping[str, nn.Module] | Iterable[str | nn.Module]


def dense_tensors(
    model: nn.Module, dense: DenseChoice, *, tables: Collection[str] = (), skip_sharded: bool = False
) -> dict[str, Tensor]:
    """Return the dense tensors that ``dense`` selects, without copying them.

    Args:
        model: the model whose tables are tracked.
        dense: a module, a list of modules and of tensor names (keys of the model's ``state_dict``), or a mapping of
            names to modules. A module selects its parameters and persistent buffers outside sharded modules.
        tables: FQNs of the tracked tables. Their weights are left out of the tensors that a module selects.
        skip_sharded: True to leave out tensors that are split over the ranks, and the dense tensors of embedding
            towers. False to raise an error for them.

    Returns:
        Mapping from name to detached tensor. Names are keys of the model's ``state_dict``. The name of a tensor in a
        module outside the model is ``NAME.KEY``: ``NAME`` is the module's name in the mapping ``dense``, and ``KEY`` is
        a key of the module's ``state_dict``. A tensor that has several names is returned under each of them.

    Raises:
        InvalidArgumentError: if ``dense`` is a string, if the model has no dense tensor with a given name, if a
            selected tensor is split over the ranks, if a name belongs to a tracked table or to two tensors, or if a
            selected tensor is sparse, on the meta device, or of a subclass such as ``DTensor``.
    """
    rows = {f"{fqn}.weight" for fqn in tables}
    found: dict[str, Tensor] = {}
    parts = _parts(dense)
    of_model = _tensors(model, model) if any(isinstance(each, str) for _, each in parts) else {}
    for prefix, each in parts:
        if isinstance(each, str):
            chosen = {each: _named(of_model, each, rows)}
        else:
            every = _tensors(model, each, prefix)
            if taken := rows.intersection(every) if not _is_part(model, each) else set():
                raise InvalidArgumentError("dense", sorted(taken), "Pass another name: it is that of a tracked table")
            every = {name: tensor for name, tensor in every.items() if name not in rows}
            sharded = sorted(name for name, tensor in every.items() if tensor is None)
            chosen = {name: tensor for name, tensor in every.items() if tensor is not None}
            if sharded and not skip_sharded:
                raise InvalidArgumentError("dense", sharded, f"{_PARTS}, some of {sorted(chosen)}")
        for name, tensor in chosen.items():
            if found.setdefault(name, tensor) is not tensor:
                remedy = "Pass a mapping of names to modules: two tensors have the name"
                raise InvalidArgumentError("dense", name, remedy)
    for name, tensor in found.items():
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.is_sparse:
            raise InvalidArgumentError("dense", name, f"Leave it out: a {type(tensor).__name__} is not whole here")
    return {name: tensor.detach() for name, tensor in found.items()}


def _is_part(model: nn.Module, part: nn.Module) -> bool:
    """Return True if ``part`` or one of its submodules is a module of ``model``."""
    inside = {id(module) for module in part.modules()}
    return any(id(module) in inside for module in model.modules())


def _parts(dense: DenseChoice) -> list[tuple[str, str | nn.Module]]:
    """Return ``(key, name or module)`` for each item of ``dense``. The key is ``""`` if ``dense`` is not a mapping."""
    if isinstance(dense, nn.Module):
        return [("", dense)]
    if isinstance(dense, Mapping):
        found: list[tuple[str, str | nn.Module]] = list(dense.items())
    else:
        found = [] if isinstance(dense, str) else [("", each) for each in dense]
    wrong = [each for prefix, each in found if not isinstance(each, nn.Module if prefix else str | nn.Module)]
    if wrong or isinstance(dense, str):
        remedy = "Pass a module, a list of names or modules, or a dict of modules"
        raise InvalidArgumentError("dense", wrong or dense, remedy)
    return found


def parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """Return the sorted names of each parameter of a model on this rank, keyed by the parameter's ``id()``."""
    torchrec, found = Torchrec(), dict[int, set[str]]()
    for fqn, module in walk(model, torchrec):
        is_leaf = torchrec.holder(module) is not None or has_unknown_rows(module, torchrec)
        for name, parameter in module.named_parameters(fqn, recurse=is_leaf, remove_duplicate=False):
            found.setdefault(id(parameter), set()).add(name)
    return {address: sorted(names) for address, names in found.items()}


def dense_parameters(model: nn.Module, tables: Collection[str]) -> list[str]:
    """Return the names of trainable parameters that are neither split over ranks nor weights of ``tables``."""
    every = _tensors(model, model)
    weights = {id(every.get(f"{fqn}.weight")) for fqn in tables}
    found = ((name, each) for name, each in every.items() if id(each) not in weights)
    return sorted(name for name, each in found if isinstance(each, nn.Parameter) and each.requires_grad)


def _named(every: Mapping[str, Tensor | None], name: str, rows: Collection[str]) -> Tensor:
    """Return the tensor called ``name``. Raise InvalidArgumentError if it is a table, missing or split over ranks."""
    tensor = every.get(name)
    if name in rows:
        raise InvalidArgumentError("dense", name, "Leave it out: the tracker sends its changed rows")
    if tensor is None:
        whole = {each for each, held in every.items() if held is not None}
        remedy = f"{_PARTS}, some of" if name in every else "Pass some of"
        raise InvalidArgumentError("dense", name, f"{remedy} {sorted(whole.difference(rows))}")
    return tensor


def _tensors(model: nn.Module, root: nn.Module, prefix: str = "") -> dict[str, Tensor | None]:
    """Return the parameters and persistent buffers of ``root`` outside sharded modules, by name.

    The value is None for a tensor that is split over ranks, and for an embedding tower, whose dense tensors exist only
    on the ranks of one host. Names are relative to ``model`` if ``root`` is part of it. Otherwise, they are relative to
    ``root``, and ``prefix`` and a dot are put in front of them.
    """
    torchrec = Torchrec()
    inside = {id(module) for _, module in walk(root, torchrec)}
    top, modules = model, list(walk(model, torchrec))
    if not any(id(module) in inside for _, module in modules):
        top, modules = root, [(f"{prefix}.{fqn}".strip("."), each) for fqn, each in walk(root, torchrec)]
    flattened = managed_by_fsdp(top, torchrec)
    found: dict[str, Tensor | None] = {}
    collisions = [module for _, module in modules if isinstance(module, torchrec.without_rows)]
    left_out = {id(part) for module in collisions for part in module.modules()}
    for fqn, module in modules:
        if id(module) not in inside or id(module) in left_out:
            continue
        if isinstance(module, torchrec.towers):
            found[fqn] = None
        elif torchrec.holder(module) is None and not has_unknown_rows(module, torchrec):
            for name, tensor in _own(module):
                found[f"{fqn}.{name}" if fqn else name] = None if id(tensor) in flattened else tensor
    return found


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:  # noqa: SLF001  also omitted by state_dict
            yield name, buffer
