"""Detect TorchRec modules by the packages that define their classes. Does not import torchrec or fbgemm."""

from torch import nn

# The tables of all other TorchRec modules are nn.Embedding and nn.EmbeddingBag, which do not need fbgemm.
_SHARDED = "torchrec.distributed."
_COLLISIONS = ("torchrec.modules.mc_modules", "torchrec.modules.hash_mc_modules", "torchrec.distributed.mc_modules")

_MAPPINGS = ("_mch_remapped_ids_mapping", "_hash_zch_identities")  # tensors of the classes in these modules


def has_sharded(model: nn.Module) -> bool:
    """Return True if a module of the model is sharded by TorchRec."""
    return _has(model, (_SHARDED,))


def has_fbgemm_tables(model: nn.Module) -> bool:
    """Return True if TorchRec has sharded or quantized a module of the model. FBGEMM stores such tables."""
    return _has(model, (_SHARDED, "torchrec.quant."))


def has_collisions(model: nn.Module) -> bool:
    """Return True if the model contains a managed-collision module of TorchRec, which maps raw ids to table rows."""
    return _has(model, _COLLISIONS)


def traced_collisions(model: nn.Module) -> list[str]:
    """Return the sorted names of the tensors that map raw ids to rows in scripted or traced modules."""
    found = []
    for fqn, module in model.named_modules():
        tensors = (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False))
        own = [name for name, _ in tensors if name in _MAPPINGS]
        if own and not any(kind.__module__.startswith(_COLLISIONS) for kind in type(module).__mro__):
            found += [f"{fqn}.{name}" if fqn else name for name in own]
    return sorted(found)


def _has(model: nn.Module, prefixes: tuple[str, ...]) -> bool:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return any(kind.__module__.startswith(prefixes) for kind in kinds)
