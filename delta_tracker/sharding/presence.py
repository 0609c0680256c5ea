"""Detect TorchRec modules by the packages that define their classes, without importing torchrec or fbgemm."""

from __future__ import annotations

from torch import nn

# The tables of all other TorchRec modules are nn.Embedding and nn.EmbeddingBag, which do not need fbgemm.
_SHARDED = "torchrec.distributed."
_QUANTISED = "torchrec.quant."
_COLLISIONS = ("torchrec.modules.mc_modules", "torchrec.modules.hash_mc_modules", "torchrec.distributed.mc_modules")


def has_sharded(model: nn.Module) -> bool:
    """Return True if a module of the model is sharded by TorchRec."""
    return _has(model, (_SHARDED,))


def has_fbgemm_tables(model: nn.Module) -> bool:
    """Return True if a module of the model is sharded or quantized by TorchRec, so that FBGEMM holds its tables."""
    return _has(model, (_SHARDED, _QUANTISED))


def has_collisions(model: nn.Module) -> bool:
    """Return True if a module of the model maps raw ids to the rows of a table."""
    return _has(model, _COLLISIONS)


def _has(model: nn.Module, prefixes: tuple[str, ...]) -> bool:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return any(kind.__module__.startswith(prefixes) for kind in kinds)
