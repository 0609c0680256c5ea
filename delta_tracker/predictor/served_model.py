"""Find the tensors of a serving model that a version is written to: :class:`ServedModel`."""

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import cast, get_args

import torch
from torch import Tensor, nn

from delta_tracker.arguments import check_count, check_switch, refuses_unknown
from delta_tracker.errors import InvalidArgumentError, ModelMismatchError
from delta_tracker.live_objects import num_announced, trained_memory
from delta_tracker.predictor.identities import check_hidden, check_indexes, check_maps, find_maps
from delta_tracker.predictor.model_fit import MISSING, Fit, OnModelChange, fit, served_specs, spec_texts
from delta_tracker.predictor.placement import Placement, placements
from delta_tracker.raw_ids import RawIdMap
from delta_tracker.raw_ids.index import RawIdIndex
from delta_tracker.row_target import WRITABLE, RowTarget, TensorTarget, obstacle_of
from delta_tracker.rows import copy_from_host, memory_span
from delta_tracker.sharding.presence import has_collisions, has_fbgemm_tables, has_sharded, traced_collisions
from delta_tracker.sinks.row_sink import RowSink
from delta_tracker.stream.format.manifest import DenseSpec, Manifest
from delta_tracker.stream.format.part_reader import Contents
from delta_tracker.stream.format.table_choice import TableChoice
from delta_tracker.types import ShardSpec

_logger = logging.getLogger(__name__)
_MATRIX_DIMS = 2
_COMPILED = "_orig_mod."
_MODEL = "Pass a module, or a mapping of FQN to tensor or RowTarget"
_DENSE = "dense tensor"

Model = nn.Module | Mapping[str, Tensor | RowTarget]
NameChoice = Mapping[str, str] | Callable[[str], str]


@refuses_unknown()
@dataclass(frozen=True, slots=True, eq=False)
class ModelTarget:
    """Model that a predictor writes to, and options for a model that differs from the trainer's model.

    Args:
        model: module, or mapping of FQN to tensor or :class:`~delta_tracker.row_target.RowTarget`.
        names: mapping of name in the stream to name in the model, for tables and dense tensors whose names differ. A
            key that ends with a dot or is empty is a prefix: ``{"module.": ""}``. A function is also accepted.
        dense: True to also apply the dense parameters and buffers of the stream; the model must have all of them.
        raw_ids: mapping of table name in the stream to :class:`~delta_tracker.raw_ids.index.RawIdIndex`, for tables
            with raw ids that have no collision module in the model. The predictor updates the indexes.
        on_model_change: "stop" to keep the last version that fits the model; "continue" to apply the part of a version
            that fits and to report the differences in the status. ``guide/serve.md`` describes the rules.
        chunk_rows: maximum number of rows in one write. Lookups wait during a write.

    Raises:
        InvalidArgumentError: if an argument is invalid. A predictor also raises this error for unknown names.

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
    on_model_change: OnModelChange = "stop"

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
        if self.on_model_change not in (known := get_args(OnModelChange)):
            raise InvalidArgumentError("on_model_change", self.on_model_change, f"Pass one of {known}")


class NameMap:
    """Mapping from names in the stream to names in the model, built from the ``names`` of a :class:`ModelTarget`.

    A whole name takes precedence over a prefix, and a longer prefix over a shorter prefix. Names without a match are
    not changed. ``known`` lists the tables and dense tensors of the model. ``depends_on_stream`` is False if the result
    of :meth:`of` does not depend on the argument of :meth:`of`.
    """

    def __init__(self, choice: NameChoice, known: Collection[str]) -> None:
        self._choice = dict(choice) if isinstance(choice, Mapping) else choice
        given = choice if isinstance(choice, Mapping) else {}
        for name, own in given.items():
            if not (any(each.startswith(own) for each in known) if _is_prefix(name) else own in known):
                raise InvalidArgumentError("names", own, f"Pass names of the model: {sorted(known)}")
        self._whole = {name: own for name, own in given.items() if not _is_prefix(name)}
        self.depends_on_stream = not isinstance(choice, Mapping) or len(self._whole) < len(given)

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """Map stream names to model names: all whole names, and those of ``names`` that differ in the model."""
        if not self.depends_on_stream:
            return self._whole
        return {name: own for name in names if (own := self._own(name)) != name} | self._whole

    def _own(self, name: str) -> str:
        if isinstance(self._choice, Mapping):
            prefixes = [each for each in self._choice if _is_prefix(each) and name.startswith(each)]
            prefix = max(prefixes, key=len, default="")
            return self._choice.get(prefix, "") + name.removeprefix(prefix)
        own: object = self._choice(name)
        if not isinstance(own, str):
            raise InvalidArgumentError("names", own, f"Return a name in the model for {name!r}")
        return own


def _is_prefix(name: str) -> bool:
    return not name or name.endswith(".")


class ServedModel:
    """Access to the tables, dense tensors and mappings of raw ids of the model in a :class:`ModelTarget`.

    If ``continues`` is True, a version that does not fit is applied in part. ``first_devices`` are the devices of the
    model when this object was created. This object references the tensors that the last version was written to, even if
    the model has replaced them.
    """

    def __init__(self, target: ModelTarget, choice: TableChoice) -> None:
        self._model = model = target.model
        self._choice = choice
        self._takes_dense, self.chunk_rows = target.dense, target.chunk_rows
        self.continues = target.on_model_change == "continue"
        tables, dense = find_targets(model), _tensors(model)
        self._rule = NameMap(target.names, {*tables, *dense})
        self._names = self._rule.of(target.raw_ids)  # of the last resolved version
        self._indexes = check_indexes(target.raw_ids, renamed(tables, self._names)) if target.raw_ids else {}
        self._has_compared = False  # the tables of the model and of the stream
        self._hidden = traced_collisions(model) if isinstance(model, nn.Module) else []
        self._has_raw_ids = bool(self._indexes) or (isinstance(model, nn.Module) and has_collisions(model))
        self.first_devices = Receiver(tables, dense, self.raw_ids() if self._has_raw_ids else {}).devices
        self._found: tuple[object, Receiver] | None = None  # what the last receiver depends on, and it
        self._memory = _memory(model)  # at the last call of notice_move()

    def notice_move(self) -> bool:
        """Return True if a plain tensor of the model was replaced since the last call."""
        before, self._memory = self._memory, _memory(self._model)
        return before != self._memory

    def resolve(self, manifest: Manifest) -> "Receiver":
        """Return the model's current tensors for a version. Raise ModelMismatchError if the version does not fit."""
        memory = None if manifest.identities or self._has_raw_ids else _memory(self._model)
        # A tracker may be newer than the last receiver.
        asked = None if memory is None else (memory, manifest.tables, manifest.dense, num_announced())
        if asked is None or self._found is None or self._found[0] != asked:
            self._found = asked, self._find(manifest)
        return self._found[1]

    def _find(self, manifest: Manifest) -> "Receiver":
        targets = self._targets(manifest)
        maps = self.raw_ids() if manifest.identities or self._has_raw_ids else {}
        found, entry = None, manifest
        if self.continues:
            dense = self._dense_specs(manifest) if self._takes_dense else None
            found = fit(manifest, served_specs(manifest.tables, targets), dense, {fqn for fqn in maps if maps[fqn]})
            entry = found.narrowed(manifest) if found.tables else manifest  # the checks below reject one without any
        check_targets(entry, targets)
        _refuse_trained({fqn: targets[fqn] for fqn in entry.tables}, trained_memory())
        if not self._has_compared and manifest.kind != "claim":
            self._warn_of_others(manifest)
        if maps or manifest.identities:
            check_hidden(entry, self._hidden, self._names)
            check_maps(entry, maps)
        return Receiver(targets, self._dense(entry.dense), maps, found, self.spec_texts(manifest, targets))

    def _targets(self, manifest: Manifest) -> dict[str, RowTarget]:
        tables = find_targets(self._model)
        if self._rule.depends_on_stream:
            self._names = self._rule.of((*manifest.tables, *manifest.dense))
        return renamed(tables, self._names)

    def _dense_specs(self, manifest: Manifest) -> dict[str, DenseSpec]:
        held = _tensors(self._model)
        found = {name: held[own] for name in manifest.dense if (own := self._names.get(name, name)) in held}
        return {name: DenseSpec(each.dtype, tuple(each.shape)) for name, each in found.items()}

    def spec_texts(self, manifest: Manifest, targets: Mapping[str, RowTarget] | None = None) -> dict[str, str]:
        """Return the model's spec of each table and dense tensor of a version, as text; ``missing`` if absent."""
        tables = served_specs(manifest.tables, self._targets(manifest) if targets is None else targets)
        maps = self.raw_ids() if self._has_raw_ids else {}
        found = dict.fromkeys(manifest.tables, MISSING) | spec_texts(tables, {fqn for fqn in maps if maps[fqn]})
        if manifest.dense and (self._takes_dense or self.continues):
            dense = self._dense_specs(manifest) if self._takes_dense else {}
            found |= dict.fromkeys(manifest.dense, MISSING) | spec_texts(dense, ())
        return found

    def kind_of(self, name: str, receiver: "Receiver") -> str:
        """Return "table" or "dense tensor" for a name in the stream, or an empty string if the model has neither."""
        held = _tensors(self._model)
        return "table" if name in receiver.targets else _DENSE if self._names.get(name, name) in held else ""

    def _warn_of_others(self, manifest: Manifest) -> None:
        """Warn of tables and dense parameters that are missing in the stream and therefore keep their values."""
        sent = {self._names.get(name, name).removesuffix(".weight") for name in (*manifest.tables, *manifest.dense)}
        self._has_compared = True
        in_stream = {own: name for name, own in self._names.items()}

        def takes(own: str) -> bool:
            return self._choice.takes(in_stream.get(own, own))

        if others := sorted(filter(takes, _table_names(self._model) - sent)):
            _logger.warning("the stream has no rows for these tables of the model, which keep their values: %s", others)
        if self._takes_dense and isinstance(self._model, nn.Module):
            named = (name.replace(_COMPILED, "") for name, _ in self._model.named_parameters())
            trained = {name.removesuffix(".weight") for name in named} - sent
            held = {name.removesuffix(".weight"): name for name in _tensors(self._model)}
            kept = [held[name] for name in trained & held.keys() - _table_names(self._model)]
            if dense := sorted(filter(takes, kept)):
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

    def _dense(self, specs: Mapping[str, DenseSpec]) -> dict[str, Tensor]:
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
                raise ModelMismatchError(name, spec, obstacle, kind=_DENSE).with_remedy(WRITABLE)
            shared = names.setdefault((tensor.device, tensor.data_ptr()), name) if tensor.numel() else name
            if shared != name:
                raise ModelMismatchError(name, spec, f"in memory shared with {shared!r} (tied weights)", kind=_DENSE)
            found[name] = tensor.detach()
        return found


@dataclass(slots=True, eq=False)
class Receiver:
    """Tables, dense tensors and mappings of raw ids that one version is written to, by name in the stream.

    ``fit`` is the part of the version to apply; None for the whole version. ``spec_texts`` is the result of
    :meth:`ServedModel.spec_texts`. ``devices`` are the devices of the tables, dense tensors and mappings. A custom
    :class:`RowTarget` may specify its devices in an attribute ``devices``.
    """

    targets: Mapping[str, RowTarget]
    dense: Mapping[str, Tensor]
    raw_ids: Mapping[str, tuple[RawIdMap, ...]]
    fit: Fit | None = None
    spec_texts: Mapping[str, str] = field(default_factory=dict)
    devices: set[torch.device] = field(init=False)

    def __post_init__(self) -> None:
        held = [getattr(target, "devices", ()) for target in self.targets.values()]
        held += [each.devices for maps in self.raw_ids.values() for each in maps]
        self.devices = {tensor.device for tensor in self.dense.values()}.union(*held)

    def placements(self, contents: Contents) -> list[Placement]:
        """Return the placements of the version's rows, in the order in which to write them. Does not write."""
        return [*placements(contents.whole, self.targets), *placements(contents.listed, self.targets)]

    @torch.no_grad()
    def write_dense(self, contents: Contents) -> None:
        """Write the dense tensors of the version. The caller must hold the lock for writing."""
        for name, tensor in self.dense.items():
            copy_from_host(tensor, contents.dense[name])


def _memory(model: Model) -> list[tuple[object, ...]] | None:
    """Return the name, address and layout of each tensor of a model; None if some tables are not plain tensors."""
    if isinstance(model, nn.Module) and has_fbgemm_tables(model):
        return None
    named = _named_tensors(model) if isinstance(model, nn.Module) else model.items()
    found: list[tuple[object, ...]] = []
    for name, each in named:
        if not isinstance(each, Tensor) or type(each) not in (Tensor, nn.Parameter) or each.layout is not torch.strided:
            return None
        found.append((name, each.device, each.data_ptr(), each.dtype, each.shape, each.stride()))
    return found


def _named_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _tensors(model: Model) -> dict[str, Tensor]:
    if not isinstance(model, nn.Module):
        return {name: tensor for name, tensor in model.items() if isinstance(tensor, Tensor)}
    if has_sharded(model):
        from delta_tracker.sharding.dense import dense_tensors  # noqa: PLC0415  it needs torchrec

        return dense_tensors(model, model, skip_sharded=True)
    return {name.replace(_COMPILED, ""): tensor for name, tensor in _named_tensors(model)}


def find_targets(model: Model) -> dict[str, RowTarget]:
    """Return the tables of a model by FQN, as targets that write to the memory that lookups read.

    The tables of a module are its two-dimensional parameters and buffers, for example ``<fqn>.weight`` of
    ``nn.Embedding`` and of TorchRec collections. The module may be quantized, compiled or sharded; if sharded, each
    target covers the rows and columns of this rank. The keys of a mapping are FQNs, optionally followed by ``.weight``.
    The values are ``[rows, columns]`` tensors or targets.
    """
    given: object = model
    if not isinstance(given, nn.Module | Mapping):
        raise InvalidArgumentError("model", type(model).__name__, _MODEL)
    targets: dict[str, RowTarget] = {}
    for name, table in _modules_tables(given) if isinstance(given, nn.Module) else given.items():
        fqn = str(name).replace(_COMPILED, "").removesuffix(".weight")
        if isinstance(table, Tensor):
            if table.dim() != _MATRIX_DIMS:
                continue
            table = TensorTarget.of(table)  # noqa: PLW2901
        elif not isinstance(table, RowTarget):
            raise InvalidArgumentError("model", type(model).__name__, _MODEL)
        if fqn in targets:
            raise InvalidArgumentError("model", fqn, f"Pass one of {fqn!r} and {fqn + '.weight'!r}, not both")
        targets[fqn] = table
    if not targets:
        raise InvalidArgumentError("model", type(model).__name__, "Pass a module or mapping with embedding tables")
    return targets


def _modules_tables(model: nn.Module) -> Iterable[tuple[str, Tensor | RowTarget]]:
    if has_fbgemm_tables(model):
        from delta_tracker.sharding.inference_tables import model_tables  # noqa: PLC0415  it needs torchrec

        return model_tables(model)
    return _named_tensors(model)


def _table_names(model: Model) -> set[str]:
    """Return the FQNs of a model's embedding tables, without tables of sharded and quantized modules."""
    if not isinstance(model, nn.Module):
        return {str(name).removesuffix(".weight") for name in model}
    tables = nn.Embedding, nn.EmbeddingBag
    return {name.replace(_COMPILED, "") for name, module in model.named_modules() if isinstance(module, tables)}


def renamed(targets: dict[str, RowTarget], names: Mapping[str, str]) -> dict[str, RowTarget]:
    """Return ``targets`` by name in the stream. ``names`` maps stream names to model names, where they differ."""
    if not names:
        return targets
    own = {fqn: name for fqn, name in names.items() if name in targets}
    if len(set(own.values())) < len(own):
        raise InvalidArgumentError("names", own, "Map each table of the model once")
    kept = {fqn: target for fqn, target in targets.items() if fqn not in own.values()}
    return kept | {fqn: targets[name] for fqn, name in own.items()}


def check_targets(manifest: Manifest, targets: Mapping[str, RowTarget]) -> None:
    """Raise ModelMismatchError for the first table of a version that does not fit the model.

    A table does not fit if it is missing, has a different shape or dtype, cannot be written in place, or shares memory
    with another table of the stream. Raises InvalidArgumentError for a target whose block lies outside its table.
    """
    for fqn, table in manifest.tables.items():
        target = targets.get(fqn)
        if target is None:
            raise ModelMismatchError(fqn, str(table), MISSING, sorted(targets))
        if (own := served_specs({fqn: table}, targets)[fqn]) != table:
            raise ModelMismatchError(fqn, str(table), str(own))
        ShardSpec(table, target.rows[0], target.rows[1] - target.rows[0], target.columns)
        if isinstance(target, TensorTarget) and target.obstacle:
            raise ModelMismatchError(fqn, str(table), target.obstacle).with_remedy(target.remedy)
    _refuse_shared_memory(manifest, targets)


def _refuse_trained(targets: Mapping[str, RowTarget], trained: Collection[tuple[str, int, int]]) -> None:
    """Raise InvalidArgumentError if a tracker of this process tracks the memory of one of ``targets``."""
    found = {
        fqn
        for fqn, target in targets.items()
        if isinstance(target, TensorTarget)
        for device, begin, end in map(memory_span, (region.memory for region in target.regions))
        if any(device == other and begin < last and first < end for other, first, last in trained)
    }
    if found:
        remedy = "Pass a copy of the model, or detach the tracker: versions would overwrite what training writes"
        raise InvalidArgumentError("model", sorted(found), remedy)


def _refuse_shared_memory(manifest: Manifest, targets: Mapping[str, RowTarget]) -> None:
    memories = [
        (fqn, region.memory)
        for fqn in manifest.tables
        if isinstance(target := targets[fqn], TensorTarget)
        for region in target.regions
        if region.memory.numel()
    ]
    spans = sorted((*memory_span(memory), fqn) for fqn, memory in memories) if len(memories) > 1 else []
    for (device, _, end, fqn), (other_device, begin, _, other) in itertools.pairwise(spans):
        if begin < end and device == other_device:
            remedy = f"Name {other!r} or {fqn!r} in fqns_to_skip of the trainer's tracker, or give each its own memory"
            shared = f"in memory shared with {fqn!r} (tied weights)"
            raise ModelMismatchError(other, str(manifest.tables[other]), shared).with_remedy(remedy)
