"""Report the rows that ``torch.optim`` optimizers write, for tables of plain modules.

An optimizer writes in its ``step``. Hooks that torch calls before and after the ``step`` of every optimizer therefore
report all writes. The sparse gradient and the optimizer determine which rows a step writes:

- ``SGD`` without momentum, ``Adagrad`` and ``SparseAdam`` write the rows of the gradient and no other rows.
- ``SGD`` with momentum also writes the rows of its momentum buffer, which contains the rows of all earlier gradients.
- Any other optimizer may write any row: all rows count as changed, and a warning is logged once. The same applies to a
  gradient that is not sparse.

A ``step`` with a closure computes the gradients itself. The rows are then reported after the step, with unknown old
states. If another hook or the closure writes to a weight or changes its gradient during a step, all rows of the table
count as changed. Torch calls the optimizer's own hooks between the two hooks of this module. A compiled ``step`` calls
no hook. The version counter of the weight then shows the write, and all rows count as changed. Torch's fused optimizers
do not increment the version counter. Therefore, their parameters are also compared by address.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.named_writers import num_named_writes
from delta_tracker.sharding.plain_tables import PlainModule
from delta_tracker.sharding.watcher import HookContext, OtherUpdates, Watcher, is_capturing, untraced

_logger = logging.getLogger(__name__)

# Exact types: a subclass may write other rows.
_GRADIENT_ROWS = (torch.optim.Adagrad, torch.optim.SparseAdam)


@dataclass(slots=True)
class _Step:
    """One call of an optimizer's ``step``.

    Args:
        key: key of the write.
        optimizer: weak reference to the optimizer. The step ends if the optimizer is deleted.
        is_computed_inside: True if a closure computes the gradients inside the step.
        rows: ids ``[N]`` of the rows that were reported before the step, by FQN; None for all rows.
        gradients: FQN, parameter, gradient and version counter of the gradient when ``rows`` was computed.
        versions: version counter of each table's weight before the step, by FQN.
        may_load: True if another hook may replace the momentum before the step.
        is_counted: True if :attr:`StepHook.num_updates` includes the step.
    """

    key: int
    optimizer: ref[torch.optim.Optimizer]
    is_computed_inside: bool
    may_load: bool
    rows: Mapping[str, Tensor | None] = field(default_factory=dict)
    gradients: list[tuple[str, Tensor, Tensor, int]] = field(default_factory=list)
    versions: Mapping[str, int] = field(default_factory=dict)
    is_counted: bool = False


class StepHook(Watcher):
    """Hook that reports the rows that ``torch.optim`` optimizers write to ``nn.Embedding`` and ``nn.EmbeddingBag``.

    Tables with dense gradients are compared with a copy. A step that updates only such tables is counted in
    :attr:`num_updates`, but not reported.

    Args:
        shards: shards of the tables in these modules, by FQN.
        context: objects that the tracker's hooks share.

    Attributes:
        num_updates: number of optimizer steps with a gradient for at least one table.
        others: counter of steps that update no table, but a tensor with the shape and dtype of a table, such as a copy.
    """

    def __init__(self, shards: Mapping[str, LocalShard], context: HookContext) -> None:
        super().__init__([fqn for fqn, shard in shards.items() if shard.is_stepped], context)
        self._modules = {fqn: shard.holders[0][0].module for fqn, shard in shards.items()}
        self._steps: dict[int, _Step] = {}  # id() of an optimizer to its step
        self._strange: set[str] = set()
        self.num_updates = 0
        self.others = OtherUpdates(lambda: [*map(_weight_version, self._modules.values()), num_named_writes()])
        _STEPS.add(self)
        self._removals.append(partial(_STEPS.remove, self))

    def end_step(self, number: int) -> None:
        """End the unfinished step of the optimizer whose ``id()`` is ``number``. Does nothing if there is none."""
        step = self._steps.pop(number, None)
        if step is not None:
            self._listener.end_write_later(step.key)

    def run(self, optimizer: torch.optim.Optimizer, action: Callable[[], bool]) -> None:
        """Call ``action``. If it returns False or raises an exception, end the unfinished step of ``optimizer``.

        After an exception, the next cut marks all rows. An ``Exception`` is not raised again, but KeyboardInterrupt is.
        """
        try:
            if not self._contained(action, otherwise=False):
                self.end_step(id(optimizer))
        except BaseException:  # interrupted
            self._listener.mark_all_later(self._tables)
            self.end_step(id(optimizer))
            raise

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Report the rows that ``optimizer.step(*args, **kwargs)`` may write. Called by :meth:`run` before the step."""
        number = id(optimizer)
        # An earlier step that is open raised. If it wrote a part of its rows, the version counter reports the write.
        self.end_step(number)
        # Before the step adds its own writes to the version counters.
        if not is_capturing():
            self._listener.notice_writes(self._tables)
        step = _Step(
            next(self._keys),
            ref(optimizer, partial(_deleted, ref(self), number)),
            is_computed_inside=_has_closure(args, kwargs),
            may_load=type(optimizer) is torch.optim.SGD and _has_others(optimizer, "pre"),
        )
        self._steps[number] = step  # before its write begins, so that it ends after any error
        if not step.is_computed_inside:
            step.rows = self._rows(optimizer, step)
            if step.rows:
                self._begin_write(step.key, step.rows)
        step.versions = self._versions()
        return True

    def after(self, optimizer: torch.optim.Optimizer) -> bool:
        """Report the end of a step, after :meth:`before` has reported its start. :meth:`run` calls this method."""
        step = self._steps.get(id(optimizer))
        if step is None:  # its begin was not reported
            self._listener.mark_all_later(self._tables)
            return True
        if step.is_computed_inside:
            late = self._rows(optimizer, step)
            if _has_others(optimizer, "post"):  # they may have changed the gradients since
                held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
                late |= {fqn: None for fqn in self._tables if id(self._modules[fqn].weight) in held}
        else:
            # Another hook may have replaced a gradient after this hook read it.
            late = {fqn: None for fqn, _, gradient, version in step.gradients if gradient._version != version}  # noqa: SLF001
            late |= {fqn: None for fqn, parameter, gradient, _ in step.gradients if parameter.grad is not gradient}
            if late:
                self._warn("a gradient that changed during a step", "change no gradient in a hook of the step")
            if step.may_load:
                late = {**self._rows(optimizer, step), **late}
        # These optimizers write a weight once per step. Any further write is one of another hook, or of the closure.
        now = self._versions()
        skipped = {fqn for fqn, _, gradient, _ in step.gradients if _is_skipped(optimizer, gradient)}
        written = {**step.rows, **late}
        late |= {fqn: None for fqn in written if now[fqn] > step.versions[fqn] + (fqn not in skipped)}
        for fqn, ids in late.items():
            self._listener.mark(fqn, ids, is_written=True)
        if step.rows:
            self._end_write(step.key, step.rows)
        self._count_others(optimizer, step)
        # A table without a gradient after its closure is not acknowledged: the version counter reports the write.
        self._listener.acknowledge_writes(written)
        # This has also acknowledged the writes of other threads since `now` was read.
        after = self._versions()
        for fqn in written:
            if after[fqn] != now[fqn]:
                self._listener.mark(fqn, None, is_written=True)
        del self._steps[id(optimizer)]
        return True

    def after_captured(self, optimizer: torch.optim.Optimizer) -> bool:
        """End a step that was captured in a CUDA graph. Called by :meth:`run` instead of :meth:`after`."""
        step = self._steps.get(id(optimizer))
        if step is None or step.rows or self._rows(optimizer, step):
            self._captured()
        return False  # ends the step

    def _versions(self) -> dict[str, int]:
        """Return a counter for each reported table, by FQN. Each write to the table's weight increments the counter."""
        named = num_named_writes()
        return {fqn: self._modules[fqn].weight._version + named for fqn in self._tables}  # noqa: SLF001

    def _rows(self, optimizer: torch.optim.Optimizer, step: _Step) -> dict[str, Tensor | None]:
        """Return the ids ``[N]`` of the rows that the current gradients may change, by FQN; None for all rows."""
        tables: dict[int, list[str]] = {}
        for fqn, module in self._modules.items():  # a parameter may have several names, and may have been replaced
            tables.setdefault(id(module.weight), []).append(fqn)
        rows: dict[str, Tensor | None] = {}
        has_update = False
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                fqns = tables.get(id(parameter))
                if parameter.grad is None:
                    continue
                if fqns is None and (group.get("fused") or parameter.grad.layout == torch.sparse_coo):
                    fqns = self._aliased(parameter)  # for example a parameter that was built from weight.data
                if not fqns:
                    continue
                has_update = True
                stepped = [fqn for fqn in fqns if fqn in self._tables]
                if stepped:
                    rows |= dict.fromkeys(stepped, self._written(optimizer, parameter))
                    version = parameter.grad._version  # noqa: SLF001
                    step.gradients += [(fqn, parameter, parameter.grad, version) for fqn in stepped]
        self.num_updates += has_update and not step.is_counted
        step.is_counted |= has_update
        return rows

    def _count_others(self, optimizer: torch.optim.Optimizer, step: _Step) -> None:
        """Count a step that updated no table if it updated a tensor with the shape and dtype of a table."""
        if step.is_counted:
            self.others.clear()
            return
        sizes: dict[object, list[str]] = {}
        for fqn, module in self._modules.items():
            if module.weight.requires_grad:
                sizes.setdefault((module.weight.shape, module.weight.dtype), []).append(fqn)
        updated = {
            (parameter.shape, parameter.dtype)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
            and (parameter.shape, parameter.dtype) in sizes
            and not self._aliased(parameter)  # as in functional_call with detached parameters
        }
        if found := [fqn for size in updated for fqn in sizes[size]]:
            self.others.count(found)

    def _aliased(self, parameter: Tensor) -> list[str]:
        """Return the FQNs of the reported tables whose weight shares the storage of ``parameter``."""
        address = parameter.untyped_storage().data_ptr()
        return [fqn for fqn in self._tables if self._modules[fqn].weight.untyped_storage().data_ptr() == address]

    def _written(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
        """Return the rows of a parameter that an optimizer writes, ``[N]`` int64; None if it may write any row."""
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
            self._warn("a gradient that is not sparse", "build the module with sparse=False")
            return None
        ids: Tensor = gradient._indices()[0]  # noqa: SLF001  indices() needs a coalesced tensor
        if type(optimizer) in _GRADIENT_ROWS:
            return ids
        if type(optimizer) is torch.optim.SGD:
            momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
            if momentum is None:
                return ids
            if momentum.layout == torch.sparse_coo and momentum.sparse_dim() == 1:
                return torch.cat([ids, momentum._indices()[0]])  # noqa: SLF001
        self._warn(f"the optimizer {type(optimizer).__name__}", "use SGD, Adagrad or SparseAdam, or sparse=False")
        return None

    def _warn(self, what: str, remedy: str) -> None:
        if what not in self._strange:
            self._strange.add(what)
            text = "all rows count as changed after %s; to send only the changed rows, %s: tables=%s"
            _logger.warning(text, what, remedy, list(self._tables))


def _weight_version(module: PlainModule) -> int | None:
    weight: Tensor | None = module._parameters.get("weight")  # noqa: SLF001  a parametrized module has none
    return None if weight is None else weight._version  # noqa: SLF001


def _is_skipped(optimizer: torch.optim.Optimizer, gradient: Tensor) -> bool:
    """Return True if the optimizer skips the gradient. For example, SparseAdam skips an empty gradient."""
    is_sparse = gradient.layout == torch.sparse_coo
    return type(optimizer) is torch.optim.SparseAdam and is_sparse and not gradient._values().numel()  # noqa: SLF001


class _Steps:
    """Registry of the step hooks of all trackers. One pair of torch hooks calls them and is never removed.

    torch iterates over its dictionary of hooks during each step of an optimizer. The garbage collector may delete a
    tracker during a step. If this removed a torch hook, the step would raise an error.
    """

    def __init__(self) -> None:
        self._hooks: dict[int, StepHook] = {}
        self._before_handle: RemovableHandle | None = None
        self._after_handle: RemovableHandle | None = None

    def add(self, hook: StepHook) -> None:
        self._hooks[id(hook)] = hook
        # One by one: if the first call is interrupted, the next one registers what is missing.
        if self._before_handle is None:
            self._before_handle = register_optimizer_step_pre_hook(untraced(self._before, self._omitted))
        if self._after_handle is None:
            self._after_handle = register_optimizer_step_post_hook(untraced(self._after, self._omitted))

    def remove(self, hook: StepHook) -> None:
        self._hooks.pop(id(hook), None)

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for hook in tuple(self._hooks.values()):
            hook.run(optimizer, partial(hook.before, optimizer, args, kwargs))

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        with ExitStack() as ends:  # all are called, even if one is interrupted
            for hook in tuple(self._hooks.values()):
                after = hook.after_captured if is_capturing() else hook.after
                ends.callback(hook.run, optimizer, partial(after, optimizer))

    def _omitted(self) -> None:
        for hook in tuple(self._hooks.values()):
            hook.omitted()


_STEPS = _Steps()


def _deleted(hook: ref[StepHook], number: int, _: object) -> None:
    """End the unfinished step of a deleted optimizer. The step had raised an error. Lock-free and thread-safe."""
    held = hook()
    if held is not None:
        held.end_step(number)


def _has_others(optimizer: torch.optim.Optimizer, when: str) -> bool:
    """Return True if other hooks are called before (``"pre"``) or after (``"post"``) the step of an optimizer."""
    everywhere = getattr(torch_optimizer, f"_global_optimizer_{when}_hooks", None)  # not part of torch's interface
    return everywhere is None or len(everywhere) > 1 or bool(getattr(optimizer, f"_optimizer_step_{when}_hooks", None))


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(arg is not None for arg in (*args[1:], *kwargs.values()))  # args[0] is the optimizer
