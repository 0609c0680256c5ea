"""Training state of a rank at each cut: :class:`TrainingCuts`.

The state is a dict with these keys:

- ``library``: state that the library itself restores, a dict with these keys:

  - ``kernels``: scalars of the kernel of each fused table, such as ``iter`` and ``lr``, by FQN.
  - ``shards``: this rank's :class:`~delta_tracker.types.ShardSpec` of each non-fused table, as a dict, by FQN.
  - ``dense``, only on rank 0: dense tensors by name. ``buffers``, only on the other ranks: buffers by name. Tensors
    that the parts of the version contain are omitted.
  - ``publisher``: name of the publisher's consumer.
  - ``consumers``: a dict for each other consumer of the tracker, by name. ``version`` is the newest version up to whose
    cut the consumer has read; None if there is none. ``left_out`` contains the global ids of rows that changed earlier
    but are still pending for the consumer, by FQN. ``place``, if the consumer has a publisher, is the stream position
    of this publisher; see :meth:`~delta_tracker.stream.reading.position.Position.to_dict`.
  - ``collisions``: this rank's state of the module of each table with managed collisions, by FQN; see
    :func:`~delta_tracker.sharding.collision_states.collision_state`.
  - ``batches``: number of calls of ``tracker.step()``.
  - ``parameters``: result of :func:`group_names` for each torch optimizer in ``training`` or ``rank``, by name.

- ``training`` and ``rank``: states of the user's objects, by name. ``training`` is empty on ranks other than rank 0.
- ``data``: state of the :class:`~delta_tracker.DataPosition`; None if there is none.
"""

import logging
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from delta_tracker.arguments import check_seconds, check_type, refuses_unknown
from delta_tracker.errors import InvalidArgumentError, UnfinishedStepError, UnsupportedModelError
from delta_tracker.publisher.host_copies import SelectedRows
from delta_tracker.sharding.collision_states import collision_state
from delta_tracker.sharding.dense import dense_tensors, parameter_names
from delta_tracker.sharding.torchrec_api import Torchrec, await_stashes
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.state_tree import StateTree, flatten
from delta_tracker.stream.heartbeat import BEAT_SECONDS
from delta_tracker.tracker.consumer_handle import ConsumerHandle
from delta_tracker.tracker.hooks import BatchProgress
from delta_tracker.tracker.live_tables import LiveTables
from delta_tracker.tracker.top_k import TopK

_logger = logging.getLogger(__name__)
_OWN_NAME = "data"  # name of the DataPosition among the states of the ranks
_TESTED = frozenset({"EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"})
# Longest waits of training for an update in progress: the first one, and those after a wait that was in vain. A graph
# that the training thread itself holds does not end while it waits.
_UPDATE_SECONDS = 5.0
_AGAIN_SECONDS = 0.05


@runtime_checkable
class Stateful(Protocol):
    """Interface of objects that can save and load a state, such as optimizers, schedulers and gradient scalers."""

    def state_dict(self) -> Any:  # noqa: ANN401  torch's classes return dicts of different types
        """Return the state. :mod:`delta_tracker.stream.format.state_tree` lists the supported types.

        The method must not call a collective.
        """

    def load_state_dict(self, state: Any, /) -> Any:  # noqa: ANN401
        """Load ``state``, a result of :meth:`state_dict`."""


@refuses_unknown()
@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Training state that a publisher writes with each version. A restore or a standby continues from this state.

    Pass the same names to the publisher, the restore and the standby. Besides the states of these objects, a version
    contains the dense tensors, the position in the training data, and the states of fused optimizers for its rows.

    Args:
        training_state: objects by name whose state is the same on all ranks, such as the dense optimizer and the
            learning rate scheduler. The state on rank 0 is published. The publisher logs a warning if a trainable dense
            parameter belongs to no optimizer in ``training_state`` or ``rank_state``.
        rank_state: objects by name whose state differs between ranks. The state on each rank is published. A restore on
            a different number of ranks calls ``load_rank_states(states)`` of the object with the states of all ranks.
        heartbeat_seconds: interval between heartbeats in seconds. A standby can take over when they stop. Rank 0 writes
            them in a background thread, only while methods of the publisher are called. None disables heartbeats.

    Raises:
        InvalidArgumentError: if an argument is invalid, if a name is reserved or used twice, or if an object has no
            ``state_dict`` or no ``load_state_dict``.

    Example:
        >>> optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
        >>> Recovery(training_state={"optimizer": optimizer}).heartbeat_seconds
        5.0
    """

    training_state: Mapping[str, Stateful] = field(default_factory=dict)
    rank_state: Mapping[str, Stateful] = field(default_factory=dict)
    heartbeat_seconds: float | None = BEAT_SECONDS

    def __post_init__(self) -> None:
        arguments: list[tuple[str, Any]] = [("training_state", self.training_state), ("rank_state", self.rank_state)]
        for argument, objects in arguments:
            if not isinstance(objects, Mapping):
                raise InvalidArgumentError(argument, type(objects), "Pass a mapping of name to object")
            for name, each in objects.items():
                if not isinstance(name, str) or name == _OWN_NAME:
                    raise InvalidArgumentError(argument, name, f"Use other strings than {_OWN_NAME!r} as names")
                if not isinstance(each, Stateful):
                    remedy = "Pass an object with state_dict and load_state_dict"
                    raise InvalidArgumentError(f"{argument}[{name!r}]", type(each), remedy)
        if twice := sorted(self.training_state.keys() & self.rank_state.keys()):
            raise InvalidArgumentError("rank_state", twice, "Use other names than in training_state")
        check_seconds("heartbeat_seconds", self.heartbeat_seconds)


def check_recovery(recovery: object) -> None:
    """Raise InvalidArgumentError unless ``recovery`` is a :class:`Recovery` or None."""
    check_type("recovery", recovery, Recovery, 'Recovery(training_state={"optimizer": optimizer})')


@dataclass(frozen=True, slots=True)
class TakenState:
    """Training state at a cut, before its tensors are copied.

    Args:
        tree: structure of the state. To encode it, pass the copies of ``selections`` to :meth:`StateTree.buffers`.
        event_time: event time in seconds of the last batch trained on; None if unknown.
        selections: tensors of the state, which must be copied before training continues.
    """

    tree: StateTree
    event_time: float | None
    selections: list[SelectedRows]


class TrainingCuts:
    """Collector of this rank's training state at each cut.

    The constructor collects the state once, to reject an invalid state before the first version.

    Args:
        progress: progress of training, which includes the position in the training data.
        handle: the publisher's consumer.
        recovery: objects whose states are collected. They must include the non-fused optimizers of all tables.

    Raises:
        InvalidArgumentError: if a state cannot be encoded, or does not contain the parameter groups of its optimizer.
        UnsupportedModelError: if ``recovery`` lacks the non-fused optimizer of a table.
    """

    def __init__(
        self, live: LiveTables, progress: BatchProgress, handle: ConsumerHandle, recovery: Recovery, *, is_first: bool
    ) -> None:
        training_state, rank_state = recovery.training_state, recovery.rank_state
        _check_unfused(live.unfused_storages(), recovery)
        self._live = live
        self._progress = progress
        self._handle = handle
        self._training = dict(training_state) if is_first else {}
        self._rank = dict(rank_state)
        self._is_first = is_first
        self._cuts: list[tuple[int, int]] = []  # log position and version of earlier cuts, ascending
        if is_first:
            _warn_of_unoptimized(live.model, self._dense(), [training_state, rank_state])
        self.take()
        self._watch = live.watch_states()
        self._waited_in_vain = False
        # Updates before the first step, such as a warm-up, belong to the state from which training begins.
        self._start = progress.num_batches, progress.num_unstepped
        if untested := sorted({each.optimizer for each in live.table_states.values()} - _TESTED):
            _logger.warning("the published states of these optimizers have not been tested: %s", ", ".join(untested))

    def begin(self, meanwhile: ConsumerHandle | None) -> None:
        """Prepare a cut: wait for updates in progress, and find tables whose states were written in place.

        All rows of these tables become pending for the publisher's consumer. They also become pending for
        ``meanwhile``, the consumer that tracks changes while a snapshot is copied.

        Raises:
            UnfinishedStepError: if an update is still in progress after the wait, or if rows were updated since the
                last ``tracker.step()``.
            InvalidArgumentError: if the position in the training data does not advance during training.
        """
        progress = self._progress
        seconds = _AGAIN_SECONDS if self._waited_in_vain else _UPDATE_SECONDS
        self._waited_in_vain = True
        self._handle.wait_for_updates(seconds)
        self._waited_in_vain = False
        num_batches, num_before = self._start
        if progress.num_unstepped > (num_before if progress.num_batches == num_batches else 0):
            raise UnfinishedStepError(
                f"they are not those after batch {progress.num_batches}, because they were updated since the last "
                "tracker.step()",
                "Call in each batch, in this order: backward(), optimizer.step(), scheduler.step(), tracker.step(), "
                "publisher.step()",
            )
        if progress.data_position is not None:
            progress.data_position.check()
        for fqn in self._watch.written():
            shard = self._live.shards[fqn]
            every = torch.arange(shard.num_rows, device=self._live.state_views(fqn)[0][0].device)
            for handle in (self._handle, meanwhile):
                if handle is not None:
                    handle.make_pending(fqn, every)

    def take(self, published: Collection[str] = ()) -> TakenState:
        """Return the training state of this rank. Call it in the training thread when the rows of a version are read.

        Dense tensors whose names are in ``published`` are omitted. Raises InvalidArgumentError, which names the value,
        if a value cannot be encoded. Errors of ``state_dict()`` are propagated.
        """
        position = self._progress.data_position
        training, rank = _states("training_state", self._training), _states("rank_state", self._rank)
        names, objects = parameter_names(self._live.model), {**self._training, **self._rank}
        grouped = {name: group_names(objects[name], each, names) for name, each in {**training, **rank}.items()}
        parameters = {name: groups for name, groups in grouped.items() if groups is not None}
        state = {
            "library": {**self._library(published), "parameters": parameters},
            "training": training,
            "rank": rank,
            "data": None if position is None else position.state_dict(),
        }
        tree = flatten(state, "state", paths={"training": "training_state", "rank": "rank_state"})
        # Flat, so that a chunk of a large tensor can be copied on its own.
        selections = [SelectedRows(tensor.reshape(-1)) for tensor in tree.tensors]
        return TakenState(tree, None if position is None else position.event_time, selections)

    def add(self, position: int, version: int) -> None:
        """Record that ``version`` was committed. Its rows were read up to ``position`` in the change log."""
        self._cuts.append((position, version))

    def _consumers(self) -> dict[str, dict[str, object]]:
        """Return the pending rows of the other consumers at this publisher's versions, and their stream positions."""

        def num_cuts(position: int) -> int:
            return bisect_right(self._cuts, position, key=lambda cut: cut[0])

        others = self._handle.others()
        oldest = min((position for position, _ in others.values()), default=self._handle.position)
        del self._cuts[: max(0, num_cuts(oldest) - 1)]
        found: dict[str, dict[str, object]] = {}
        for name, (position, carried) in others.items():
            number = num_cuts(position)
            left_out = {fqn: ids + self._live.shards[fqn].row_offset for fqn, ids in carried.items()}
            found[name] = {"version": self._cuts[number - 1][1] if number else None, "left_out": left_out}
            note = self._handle.note_of(name)
            if isinstance(note, Mapping):
                found[name]["place"] = dict(note)
        return found

    def _dense(self) -> dict[str, Tensor]:
        return dense_tensors(self._live.model, self._live.model, tables=self._live.tables)

    def _library(self, published: Collection[str]) -> dict[str, object]:
        live = self._live
        dense = {name: tensor for name, tensor in self._dense().items() if name not in published}
        if not self._is_first:  # parameters are equal on all ranks
            buffers = _buffers(live.model)
            dense = {name: tensor for name, tensor in dense.items() if tensor.untyped_storage().data_ptr() in buffers}
        return {
            "kernels": live.kernel_scalars(),
            "shards": {fqn: asdict(shard) for fqn, shard in live.shards.items() if fqn not in live.fused_tables},
            "dense" if self._is_first else "buffers": dense,
            "publisher": self._handle.name,
            "consumers": self._consumers(),
            "collisions": {fqn: collision_state(module) for fqn, module in live.collision_modules.items()},
            "batches": self._progress.num_batches,
        }


def check_recoverable(live: LiveTables, encodings: Mapping[str, Encoding], top_k: TopK | None) -> None:
    """Raise an error if ``encodings``, ``top_k`` or a table prevents versions from containing the training state."""
    if top_k is not None:
        raise InvalidArgumentError("top_k", top_k, "Pass None: a version with states has all changed rows")
    for fqn, table in live.tables.items():
        if encodings[fqn] is not Encoding.of(table.dtype):
            remedy = f"Leave {fqn!r} out: a version with states has the rows in the table's dtype"
            raise InvalidArgumentError("encoding", str(encodings[fqn]), remedy)
    live.check_recoverable()


def _buffers(model: nn.Module) -> set[int]:
    """Return the storage addresses of all buffers. Buffer names may differ from the keys of ``state_dict``."""
    return {
        buffer.untyped_storage().data_ptr()
        for module in model.modules()
        for buffer in module.buffers(recurse=False)
        if type(buffer) is Tensor and buffer.layout is torch.strided
    }


def _states(argument: str, objects: Mapping[str, Stateful]) -> dict[str, object]:
    """Return the states of objects by name. Raise InvalidArgumentError if an optimizer omits its parameter groups."""
    found: dict[str, object] = {}
    await_stashes()
    for name, value in objects.items():
        state = found[name] = value.state_dict()
        # By default, TorchRec's KeyedOptimizer and its wrappers omit them.
        if getattr(value, "param_groups", None) and not (isinstance(state, dict) and "param_groups" in state):
            remedy = (
                "Call its save_param_groups(True): its state has no param_groups, so its learning rate would be lost"
            )
            raise InvalidArgumentError(f"{argument}[{name!r}]", type(value), remedy)
    return found


def group_names(
    optimizer: object, state: object, names: Mapping[int, Sequence[str]]
) -> list[list[Sequence[str]]] | None:
    """Return the names of an optimizer's parameters by group, in the order in which ``state`` numbers the parameters.

    ``names`` is the result of :func:`~delta_tracker.sharding.dense.parameter_names`. For a parameter outside the model,
    the only name is the one in ``param_names`` of its group, if there is one. Returns None if ``state`` identifies
    parameters by name, like the states of TorchRec's optimizers.
    """
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", None) or []
    numbered = state.get("param_groups") if isinstance(state, Mapping) else None
    numbers = [each.get("params", ()) for each in numbered or ()]
    if not groups or [len(group["params"]) for group in groups] != [len(each) for each in numbers]:
        return None
    if not all(isinstance(number, int) for each in numbers for number in each):
        return None
    named = [zip_longest(group["params"], group.get("param_names", ())) for group in groups]
    return [[names.get(id(each), [f"{name} (param_names)"] if name else []) for each, name in group] for group in named]


def _check_unfused(unfused: Mapping[str, tuple[AbstractSet[int], bool]], recovery: Recovery) -> None:
    """Raise UnsupportedModelError if the optimizer of an ``unfused`` table is not among the published objects."""
    if not unfused:
        return
    of_ranks = set(_storages(recovery.rank_state))
    whole = of_ranks.union(_storages(recovery.training_state))
    for fqn, (storages, is_replicated) in unfused.items():
        if not storages <= (whole if is_replicated else of_ranks):
            argument = "training_state" if is_replicated else "rank_state, because each rank has a part of it"
            reason = f"its optimizer is not fused, and is not in {argument}"
            remedy, problem = "Pass the optimizer that has its parameter", "a table whose states cannot be published"
            raise UnsupportedModelError({fqn: reason}, remedy, problem=problem)


def _warn_of_unoptimized(model: nn.Module, dense: dict[str, Tensor], objects: Iterable[Mapping[str, Stateful]]) -> None:
    """Log a warning about trainable dense parameters that belong to no optimizer whose state is saved."""
    optimized = {address for each in objects for address in _storages(each)}
    trained = {
        parameter.untyped_storage().data_ptr()
        for parameter in model.parameters()
        if type(parameter) is nn.Parameter and parameter.requires_grad and parameter.numel()
    }
    addresses = {name: tensor.untyped_storage().data_ptr() for name, tensor in dense.items()}
    if names := sorted(name for name, each in addresses.items() if each in trained - optimized):
        _logger.warning(
            "no optimizer in training_state or rank_state has these dense parameters; if they are trained, the state "
            "of their optimizer is not saved: %s",
            ", ".join(names),
        )


def _storages(objects: Mapping[str, Stateful]) -> Iterator[int]:
    sharded = Torchrec().sharded_tensors
    for value in objects.values():
        for group in getattr(value, "param_groups", ()):
            for parameter in group["params"]:
                if isinstance(parameter, Tensor) and not isinstance(parameter, sharded):
                    yield parameter.untyped_storage().data_ptr()
