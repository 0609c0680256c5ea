"""Find what a version is written to in a serving model: :class:`ServedModel`."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from delta_tracker.arguments import check_count, check_switch
from delta_tracker.errors import InvalidArgumentError, ModelMismatchError
from delta_tracker.predictor.identities import OwnerChange
from delta_tracker.predictor.placement import Chunk, Placement, place
from delta_tracker.predictor.targets import (
    check_hidden,
    check_indexes,
    check_maps,
    check_targets,
    find_maps,
    find_targets,
    renamed,
    table_names,
)
from delta_tracker.raw_ids import NO_OWNER, RawIdMap, check_owners
from delta_tracker.raw_ids.index import RawIdIndex
from delta_tracker.row_target import WRITABLE, RowTarget, obstacle_of
from delta_tracker.rows import copy_from_host
from delta_tracker.sharding.presence import has_collisions, has_sharded, traced_collisions
from delta_tracker.sinks.row_sink import RowSink
from delta_tracker.stream.format.manifest import DenseSpec, Manifest
from delta_tracker.stream.format.part_reader import Contents
from delta_tracker.types import Identity

_logger = logging.getLogger(__name__)

_DENSE = "dense tensor"

Model = nn.Module | Mapping[str, Tensor | RowTarget]
NameChoice = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True, slots=True, eq=False)
class ModelTarget:
    """Model that a predictor writes to, and how it differs from the trainer's.

    Args:
        model: module, or mapping of FQN to tensor or target, as for a predictor.
        names: name in the stream to name in the model, for tables and dense tensors whose names differ. A key that ends
            with a dot, or is empty, is a prefix: ``{"module.": ""}``. Or a function from name to name.
        dense: True to apply the dense parameters and buffers of the stream too; the model must have all of them.
        raw_ids: table name in the stream to :class:`~delta_tracker.raw_ids.index.RawIdIndex`, for tables whose raw ids
            no collision module of the model maps. The predictor changes the indexes.
        chunk_rows: maximum number of rows that are written while lookups wait.

    Raises:
        InvalidArgumentError: if an argument is invalid. A predictor compares the names with those of the model.

    Example:
        >>> ModelTarget({"user": torch.zeros(10, 4)}, names={"ec.embeddings.user": "user"}).dense
        True
    """

    model: Model
    _: KW_ONLY
    names: NameChoice = field(default_factory=dict)
    dense: bool = True
    raw_ids: Mapping[str, RawIdIndex] = field(default_factory=dict)
    chunk_rows: int = 4096

    def __post_init__(self) -> None:
        names, raw_ids = cast("object", self.names), cast("object", self.raw_ids)
        if isinstance(self.model, RowSink):
            text = (
                "Pass it to the Predictor itself: a row store has the stream's names and raw ids, and no dense tensors"
            )
            raise InvalidArgumentError("model", self.model, text)
        if isinstance(names, Mapping):
            for name, own in names.items():
                if not (isinstance(name, str) and isinstance(own, str)):
                    raise InvalidArgumentError("names", {name: own}, "Pass strings")
        elif not callable(names):
            text = "Pass a mapping of name in the stream to name in the model, or a function"
            raise InvalidArgumentError("names", names, text)
        check_switch("dense", self.dense)
        if not isinstance(raw_ids, Mapping) or not all(isinstance(each, RawIdIndex) for each in raw_ids.values()):
            raise InvalidArgumentError("raw_ids", raw_ids, "Pass a mapping of table name in the stream to RawIdIndex")
        check_count("chunk_rows", self.chunk_rows)


class Names:
    """Rule that gives the name in the model for a name in the stream, by the ``names`` of a :class:`ModelTarget`.

    A whole name wins over a prefix, a longer prefix over a shorter one, and all other names are equal on both sides.
    ``known`` has the names of the tables and tensors of the model. ``depends_on_stream`` is False if :meth:`of` returns
    the same names for every stream.
    """

    def __init__(self, choice: NameChoice, known: Collection[str]) -> None:
        self._function: Callable[[str], str] | None = None
        self._whole: dict[str, str] = {}
        self._prefixes: list[tuple[str, str]] = []
        if not isinstance(choice, Mapping):
            self._function, self.depends_on_stream = choice, True
            return
        for name, own in choice.items():
            is_prefix = not name or name.endswith(".")
            if not (any(each.startswith(own) for each in known) if is_prefix else own in known):
                raise InvalidArgumentError("names", own, f"Pass names of the model: {sorted(known)}")
            if is_prefix:
                self._prefixes.append((name, own))
            else:
                self._whole[name] = own
        self._prefixes.sort(key=lambda pair: len(pair[0]), reverse=True)
        self.depends_on_stream = bool(self._prefixes)

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """Return name in the stream to name in the model, for those of ``names`` that differ and all whole names."""
        if not self.depends_on_stream:
            return self._whole
        return {name: own for name in names if (own := self._own(name)) != name} | self._whole

    def _own(self, name: str) -> str:
        if self._function is not None:
            own: object = self._function(name)
            if not isinstance(own, str):
                raise InvalidArgumentError("names", own, f"Return a name in the model for {name!r}")
            return own
        for prefix, replacement in self._prefixes:
            if name.startswith(prefix):
                return replacement + name[len(prefix) :]
        return name


class ServedModel:
    """Tables, dense tensors and mappings of raw ids of a model, found for each version that is written to them.

    ``first_devices`` are the devices of the model at the construction.
    """

    def __init__(self, target: ModelTarget) -> None:
        self._model = model = target.model
        self._takes_dense = target.dense
        tables, dense = find_targets(model), _tensors(model)
        self._rule = Names(target.names, {*tables, *dense})
        self._names = self._rule.of(target.raw_ids)  # of the last resolved version
        self._indexes = check_indexes(target.raw_ids, renamed(tables, self._names))
        self._has_compared = False  # the tables of the model and of the stream
        self._hidden = traced_collisions(model) if isinstance(model, nn.Module) else []
        self._has_raw_ids = bool(self._indexes) or (isinstance(model, nn.Module) and has_collisions(model))
        self.first_devices = Receiver(tables, dense, self.raw_ids()).devices

    def resolve(self, manifest: Manifest) -> Receiver:
        """Return the tables and dense tensors of the model that a version is written to. Raise if it does not fit."""
        tables = find_targets(self._model)
        if self._rule.depends_on_stream:
            self._names = self._rule.of((*manifest.tables, *manifest.dense))
        targets = renamed(tables, self._names)
        check_targets(manifest, targets)
        if not self._has_compared and manifest.kind != "claim":
            self._warn_of_others(manifest)
        maps: dict[str, tuple[RawIdMap, ...]] = {}
        if manifest.identities or self._has_raw_ids:
            maps = self.raw_ids()
            check_hidden(manifest, self._hidden, self._names)
            check_maps(manifest, maps)
        return Receiver(targets, self._dense(manifest.dense), maps)

    def _warn_of_others(self, manifest: Manifest) -> None:
        """Warn of tables and dense parameters that the stream does not have, and that therefore keep their values."""
        sent = {self._names.get(name, name).removesuffix(".weight") for name in (*manifest.tables, *manifest.dense)}
        self._has_compared = True
        if others := sorted(table_names(self._model) - sent):
            _logger.warning("the stream has no rows for these tables of the model, which keep their values: %s", others)
        if self._takes_dense and isinstance(self._model, nn.Module):
            trained = {name.removesuffix(".weight") for name, _ in self._model.named_parameters()} - sent
            held = {name.removesuffix(".weight"): name for name in _tensors(self._model)}
            if dense := sorted(held[name] for name in trained & held.keys() - table_names(self._model)):
                _logger.warning(
                    "the stream has no values for these dense parameters of the model, which keep their own: %s. "
                    "Publish them with Publisher(dense=True), or pass ModelTarget(model, dense=False) if they are set "
                    "elsewhere",
                    dense,
                )

    def raw_ids(self) -> dict[str, tuple[RawIdMap, ...]]:
        """Return the live mappings of raw ids, by table FQN in the stream."""
        found = find_maps(self._model, self._names)
        for fqn, index in self._indexes.items():
            found[fqn] = (*found.get(fqn, ()), index)
        return found

    def adopt(self, identities: Mapping[str, Identity]) -> None:
        """Route unknown raw ids by the buckets of saved tables. The caller must hold the lock for writing."""
        found = [
            (fqn, raw_ids, identity) for fqn, identity in identities.items() for raw_ids in self.raw_ids().get(fqn, ())
        ]
        for fqn, raw_ids, identity in found:
            refusal = raw_ids.refusal(identity)
            if refusal:
                raise InvalidArgumentError("state", fqn, f"Load it with the model that it was saved with: {refusal}")
            if isinstance(raw_ids, RawIdIndex) and raw_ids.identity != identity:
                text = "Load the state of its RawIdIndex first that was saved with the position"
                raise InvalidArgumentError("state", fqn, text)
            first, end = raw_ids.rows
            owners = raw_ids.owners()
            try:
                check_owners(identity, torch.arange(first, end), owners)
            except ValueError as error:
                text = f"Load the mapping of raw ids that was saved with the position: {error}"
                raise InvalidArgumentError("state", fqn, text) from error
            if bool((owners == NO_OWNER).all()):
                _logger.warning("no row of %s has a raw id: load the mapping before the position", fqn)
        for _, raw_ids, identity in found:
            raw_ids.adopt(identity)

    def _dense(self, specs: Mapping[str, DenseSpec]) -> dict[str, Tensor]:
        """Return the tensors of the model for dense tensors, by name in the stream; empty if none are written."""
        if not specs or not self._takes_dense:
            return {}
        held = _tensors(self._model)
        found: dict[str, Tensor] = {}
        names: dict[tuple[torch.device, int], str] = {}  # (device, address) to the first tensor name
        for name, spec in specs.items():
            tensor = held.get(self._names.get(name, name))
            if tensor is None:
                raise ModelMismatchError(name, spec, "missing", sorted(held), kind=_DENSE)
            if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
                raise ModelMismatchError(name, spec, str(DenseSpec(tensor.dtype, tuple(tensor.shape))), kind=_DENSE)
            obstacle = obstacle_of(tensor)
            if obstacle:
                raise ModelMismatchError(name, spec, obstacle, kind=_DENSE).advising(WRITABLE)
            shared = names.setdefault((tensor.device, tensor.data_ptr()), name) if tensor.numel() else name
            if shared != name:
                raise ModelMismatchError(name, spec, f"in memory shared with {shared!r} (tied weights)", kind=_DENSE)
            found[name] = tensor.detach()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Receiver:
    """Tables, dense tensors and mappings of raw ids that one version is written to, by name in the stream."""

    targets: Mapping[str, RowTarget]
    dense: Mapping[str, Tensor]
    raw_ids: Mapping[str, tuple[RawIdMap, ...]]

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the tables, dense tensors and mappings. Of targets that are not tensors, their ``devices``."""
        held = [getattr(target, "devices", ()) for target in self.targets.values()]
        held += [each.devices for maps in self.raw_ids.values() for each in maps]
        return {tensor.device for tensor in self.dense.values()}.union(*held)

    def place(self, contents: Contents) -> list[Placement]:
        """Return the placements of the version's rows, in the order of writing. Nothing is written."""
        return [*place(contents.whole, self.targets), *place(contents.listed, self.targets)]

    def default_rows(self, contents: Contents, changes: Iterable[OwnerChange]) -> list[Chunk]:
        """Return chunks with the default rows that must be written before the changes are adopted."""
        chunks: list[Chunk] = []
        for change in changes:
            for slot in change.default_rows:
                rows = [
                    each.within((slot, slot + 1), each.block.columns)
                    for each in (*contents.whole, *contents.listed)
                    if each.block.table == change.fqn and each.block.rows[0] <= slot < each.block.rows[1]
                ]
                for placement in place(rows, self.targets):
                    chunks += placement.chunks(1)
        return chunks

    @torch.no_grad()
    def write_dense(self, contents: Contents) -> None:
        """Write the dense tensors of the version. The caller must hold the lock for writing."""
        for name, tensor in self.dense.items():
            copy_from_host(tensor, contents.dense[name])


def _tensors(model: Model) -> dict[str, Tensor]:
    """Return the tensors of a model to which dense tensors of a stream can be written, by name."""
    if not isinstance(model, nn.Module):
        return {name: tensor for name, tensor in model.items() if isinstance(tensor, Tensor)}
    if has_sharded(model):
        from delta_tracker.sharding.dense import dense_tensors  # noqa: PLC0415  it needs torchrec

        return dense_tensors(model, model, skip_sharded=True)
    named = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in named}
