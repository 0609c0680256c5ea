"""Mappings of raw ids in the managed-collision modules of a serving model.

TorchRec's modules map raw ids to rows in two ways. ``MCHManagedCollisionModule`` keeps the raw ids sorted, and maps all
unknown ids to the last row of its range. ``HashZchManagedCollisionModule`` searches rows, starting at an id's hash.
With ``disable_fallback=True``, lookups of an unknown id find no row. Hash modules without this option are rejected,
because their lookups of an unknown id may read the row of another id.

A trainer on several ranks has a default row on each rank. If a serving module contains the rows of several ranks, its
``remap`` is replaced by a function that uses the trainer's buckets to find the default row.

Lookups in an unsharded hash module must have exactly one id per sample: TorchRec applies a mask of ids to the lengths.

Hash modules train on CUDA only. Their mapping was tested with raw ids that a test wrote, in evaluation mode on the CPU.
This file has not been tested on a GPU.
"""

import copy
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.modules.mc_modules import MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from delta_tracker.raw_ids import NO_OWNER, RawIdMap, default_rows, defaults_of
from delta_tracker.raw_ids.index import SortedMap
from delta_tracker.rows import copy_from_host, to_device
from delta_tracker.sharding.inference_tables import QUANTIZED, QUANTIZED_SHARDS, walk_names
from delta_tracker.sharding.presence import has_fbgemm_tables
from delta_tracker.sharding.torchrec_api import Torchrec, holder_of
from delta_tracker.types import Bucket, Identity

_EMPTY = -1  # raw id of a row without one in a hash module
_HOLDERS = ("embeddings", "embedding_bags")


def raw_id_maps(model: nn.Module) -> dict[str, tuple[RawIdMap, ...]]:
    """Return the mappings of raw ids to rows in a model's managed-collision modules, by the FQN of the table.

    Does not find modules that were scripted, or traced with ``torch.fx``.
    """
    torchrec = Torchrec()
    modules = walk_names(model, torchrec) if has_fbgemm_tables(model) else _plain_modules(model)
    found: defaultdict[str, list[RawIdMap]] = defaultdict(list)
    for fqn, module in modules:
        collection = getattr(module, "_managed_collision_collection", None)
        if collection is None:
            continue
        path = [fqn]
        holder = holder_of(module, {**QUANTIZED_SHARDS, **QUANTIZED})
        if holder is None:
            embedding = cast(nn.Module, module._embedding_module)  # noqa: SLF001  only quantized collections have none
            path.append("_embedding_module")
            holder = torchrec.holder(embedding) or next(each for each in _HOLDERS if hasattr(embedding, each))
        for table, collision, num_shards in _collision_modules(collection):
            name = ".".join(each for each in (*path, holder, table) if each)
            if isinstance(collision, MCHManagedCollisionModule):
                found[name].append(MchMap(collision, num_shards))
            elif isinstance(collision, torchrec.hashed_collisions):
                found[name].append(HashMap(collision, num_shards))
    return {fqn: tuple(maps) for fqn, maps in found.items()}


def _plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(name, module)`` for each name of each module of a model, without ``_orig_mod`` in the names."""
    for name, module in model.named_modules(remove_duplicate=False):
        yield name.replace("_orig_mod.", "").removesuffix("_orig_mod").removesuffix("."), module


def _collision_modules(collection: Any) -> Iterator[tuple[str, nn.Module, int]]:  # noqa: ANN401  torchrec's
    """Yield the table name, the module, and the number of shards in this process for each module of a collection."""
    ranks = getattr(collection, "_managed_collision_modules_per_rank", None)
    for modules in [collection._managed_collision_modules] if ranks is None else ranks:  # noqa: SLF001
        for table, module in modules.items():
            yield table, module, 1 if ranks is None else len(ranks)


class _Routed:
    """Replacement for ``MCHManagedCollisionModule.remap``. The bucket of an unknown id determines its default row."""

    def __init__(self, owners: "MchMap", identity: Identity) -> None:
        self.identity = identity
        self._owners = owners
        self._default_rows = default_rows(identity).to(owners.memory.device)

    def __call__(
        self,
        features: dict[str, JaggedTensor],
        mutate_miss_lengths: bool = True,  # noqa: ARG002, FBT001, FBT002  the signature of TorchRec's method
        write_weights: Tensor | None = None,  # noqa: ARG002
    ) -> dict[str, JaggedTensor]:
        remapped = {}
        for name, feature in features.items():
            raw_ids = feature.values()
            slots = self._owners.find(raw_ids)
            if self._default_rows.device != raw_ids.device:  # the module was moved
                self._default_rows = self._default_rows.to(raw_ids.device)
            slots = torch.where(slots < 0, defaults_of(self.identity, raw_ids, self._default_rows), slots)
            remapped[name] = JaggedTensor(
                values=slots, lengths=feature.lengths(), offsets=feature.offsets(), weights=feature.weights_or_none()
            )
        return remapped


def _rows(module: MCHManagedCollisionModule) -> tuple[int, int]:
    first = module._output_global_offset  # noqa: SLF001
    return first, first + module.output_size()


class _ModuleMap(RawIdMap):
    """Base class of the mappings of raw ids to rows in managed-collision modules.

    Args:
        module: managed-collision module.
        num_shards: number of shards of a quantized table in this process.
        rows: half-open range of the global row ids of the module.
    """

    def __init__(self, module: Any, num_shards: int, rows: tuple[int, int]) -> None:  # noqa: ANN401  torchrec's
        self._module = module
        self._num_shards = num_shards
        self.rows = rows

    def refusal(self, identity: Identity) -> str:
        """Return the reason why the module cannot serve a stream with the buckets ``identity``, or an empty string."""
        kind = type(self._module).__name__
        if self._module.training:
            return f"mapped by a {kind} in training mode, which admits raw ids itself: call model.eval()"
        return next(self._refusals(identity, kind), "")

    @abstractmethod
    def _refusals(self, identity: Identity, kind: str) -> Iterator[str]:
        """Yield the reasons to refuse the module in evaluation mode. ``kind`` is the name of its class."""


class MchMap(_ModuleMap, SortedMap):
    """Mapping of raw ids to rows in an ``MCHManagedCollisionModule`` for an unsharded table or one shard of a table."""

    def __init__(self, module: MCHManagedCollisionModule, num_shards: int) -> None:
        super().__init__(module, num_shards, _rows(module))

    @property
    def identity(self) -> Identity:
        """Buckets that currently determine the default row of an unknown raw id."""
        routed, end = self._routed(), self.rows[1]
        return Identity(0, (Bucket((0, end), end - 1),)) if routed is None else routed.identity

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return two buffers of the module: the raw ids in ascending order, and the global row ids that they map to."""
        return self._module._mch_sorted_raw_ids, self._module._mch_remapped_ids_mapping  # noqa: SLF001

    def _refusals(self, identity: Identity, kind: str) -> Iterator[str]:
        module = self._module
        if type(module).remap is not MCHManagedCollisionModule.remap or not isinstance(
            module.__dict__.get("remap"), _Routed | None
        ):
            yield f"mapped by a {kind} with another remap()"
        if identity.buckets[0].default is None:
            yield f"mapped by a {kind}, which has default rows, unlike the trainer's module"
        if module.input_size() != identity.hash_size:
            yield f"mapped by a {kind} with input_hash_size={module.input_size()} instead of {identity.hash_size}"
        if self._num_shards > 1:
            yield f"quantized in {self._num_shards} shards, to which TorchRec routes raw ids by rows: use one shard"
        ranges, num_ranks = {bucket.rows for bucket in identity.buckets}, module.buckets()  # TorchRec routes by these
        if self.rows != (0, identity.num_rows) and (self.rows not in ranges or num_ranks != len(ranges)):
            yield (
                f"mapped by the rows {self.rows} on one of {num_ranks} ranks, to which TorchRec does not route raw ids "
                f"as to the trainer's {len(ranges)}: use the trainer's plan, or one rank"
            )

    def routes_by(self, identity: Identity) -> bool:
        """Return True if the buckets of ``identity`` currently determine the default rows of unknown raw ids."""
        routed = self._routed()
        return routed is None if self._is_own_default(identity) else routed is not None and routed.identity == identity

    def set_identity(self, identity: Identity) -> None:
        """Map each unknown raw id to the default row of its bucket in ``identity``."""
        if self.routes_by(identity):
            return
        self.reroute(identity)
        self._module.__dict__.pop("remap", None)
        if not self._is_own_default(identity):
            self._module.remap = _Routed(self, identity)

    def _routed(self) -> _Routed | None:
        return self._module.__dict__.get("remap")

    def _is_own_default(self, identity: Identity) -> bool:
        """Return True if all raw ids that the module receives have the module's own default row as default row."""
        first, end = self.rows
        held = [bucket for bucket in identity.buckets if first < bucket.rows[1] and bucket.rows[0] < end]
        return [bucket.default for bucket in held] == [end - 1]


class HashMap(_ModuleMap):
    """Mapping of raw ids to rows in an unsharded ``HashZchManagedCollisionModule``."""

    def __init__(self, module: Any, num_shards: int) -> None:  # noqa: ANN401  imported only if the model has one
        segments = module._output_segments  # noqa: SLF001
        super().__init__(module, num_shards, (segments[module._start_bucket], segments[module._end_bucket]))  # noqa: SLF001

    @property
    def memory(self) -> Tensor:
        """Raw id of each row, ``[R, 1]`` int64; -1 for a row without a raw id."""
        return cast(Tensor, self._module._hash_zch_identities.data)  # noqa: SLF001

    def _refusals(self, identity: Identity, kind: str) -> Iterator[str]:
        module = self._module
        if identity.buckets[0].default is not None:
            yield f"mapped by a {kind}, which has no default rows, unlike the trainer's module"
        if not getattr(module, "_disable_fallback", False) or module._no_bag or module._opt_in_prob != -1:  # noqa: SLF001
            what = "disable_fallback=True, and without no_bag and opt_in_prob"
            yield f"mapped by a {kind} that gives unknown raw ids the rows of others: build it with {what}"
        if self._num_shards > 1 or self.rows != (0, identity.num_rows):
            yield f"mapped by a {kind} in several shards: use one shard"
        if module._output_segments != [0, *(bucket.rows[1] for bucket in identity.buckets)]:  # noqa: SLF001
            yield f"mapped by a {kind} with other buckets"
        if module._input_hash_size != identity.hash_size:  # noqa: SLF001
            yield f"mapped by a {kind} with input_hash_size={module._input_hash_size} instead of {identity.hash_size}"  # noqa: SLF001

    def routes_by(self, identity: Identity) -> bool:  # noqa: ARG002
        """Return True, because this module has no default rows."""
        return True

    def set_identity(self, identity: Identity) -> None:
        """Do nothing, because :meth:`refusal` rejects a stream that has different buckets."""

    def owners(self) -> Tensor:
        """Return the raw id of each row, ``[R]`` int64 on the CPU; ``NO_OWNER`` for a row without a raw id."""
        raw_ids = self.memory[:, 0].cpu()
        return torch.where(raw_ids == _EMPTY, NO_OWNER, raw_ids)

    def slots_of(self, raw_ids: Tensor) -> Tensor:
        """Return the global row id of each raw id, ``[N]`` int64 on the CPU; -1 for an unknown raw id."""
        wanted, indices = torch.unique(raw_ids, return_inverse=True)
        slots = torch.full_like(wanted, _EMPTY)
        if len(wanted):
            # Sorting the owners takes much longer. Few of them have the low bits of an id.
            owners, low = self.owners(), (1 << (8 * len(wanted)).bit_length()) - 1
            may_be = torch.zeros(low + 1, dtype=torch.bool, device="cpu")
            may_be[wanted & low] = True
            rows = (may_be[owners & low] & (owners != NO_OWNER)).nonzero().flatten()
            at = torch.searchsorted(wanted[:-1], owners[rows])
            is_found = wanted[at] == owners[rows]
            slots[at[is_found]] = rows[is_found] + self.rows[0]
        return slots[indices]

    def conflict(self, slots: Tensor, owners: Tensor) -> str:
        """Return the reason why lookups of ``owners`` would not find the rows ``slots``, or an empty string."""
        if bool((owners == _EMPTY).any()):
            return f"mapped by a {type(self._module).__name__}, which reserves the raw id {_EMPTY} of a row"
        hash_size, num_buckets = self._module._input_hash_size, len(self._module._output_segments) - 1  # noqa: SLF001
        end = -(-hash_size // num_buckets) * num_buckets  # TorchRec's division of the ids among the buckets
        if hash_size and bool(((owners < 0) | (owners >= end)).any()):
            return f"mapped by a {type(self._module).__name__}, which does not look up raw ids outside 0 to {end}"
        module, device = copy.copy(self._module), self.memory.device
        raw_ids = torch.full_like(self.memory, _EMPTY)  # the module's probe passes empty rows
        raw_ids[to_device(slots - self.rows[0], device), 0] = to_device(owners, device)
        module._evicted_indices, name = [], module.IDENTITY_BUFFER  # noqa: SLF001
        module._parameters = {**module._parameters, name: nn.Parameter(raw_ids, requires_grad=False)}  # noqa: SLF001
        lengths = torch.ones(len(owners), dtype=torch.int64, device=device)
        found = module.remap({"ids": JaggedTensor(to_device(owners, device), lengths=lengths)})["ids"]
        if bool((found.lengths() == 0).any()) or not torch.equal(found.values().cpu(), slots):
            kind, most = type(module).__name__, module._max_probe  # noqa: SLF001
            return f"mapped by a {kind} that probes other rows, with max_probe={most}: use the trainer's"
        return ""

    def unmap(self, slots: Tensor, owners: Tensor) -> None:  # noqa: ARG002
        """Remove the raw ids ``owners`` from the rows ``slots``. Lookups of these raw ids then find no row."""
        self.memory[to_device(slots - self.rows[0], self.memory.device)] = _EMPTY

    def prepare(self, owners: Tensor) -> object:
        """Convert the new ``owners``, ``[R]`` int64, to the argument of :meth:`map`."""
        return torch.where(owners == NO_OWNER, _EMPTY, owners)[:, None]

    def map(self, ready: object) -> None:
        """Replace the raw ids of all rows. ``ready`` is the result of :meth:`prepare`."""
        copy_from_host(self.memory, cast(Tensor, ready))
