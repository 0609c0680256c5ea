"""Detects collectives of background threads, which can hang or corrupt those of training.

If two threads start collectives on one group, their order can differ between ranks. Only the main thread and named
workers may start collectives, each worker on gloo groups that no other thread uses.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

# All functions of torch.distributed, including those for objects and those imported by name, call a method of the
# group.
_METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "barrier", "monitored_barrier", "reduce"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single"),
    *("all_gather_single_coalesced", "gather", "scatter", "send", "recv", "recv_anysource"),
    *("alltoall", "alltoall_base", "all_to_all_single", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("split_group", "merge_remote_group"),
)
# Collectives of compiled code call C++ directly.
_OPERATORS = (
    *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_gather_into_tensor", "all_to_all_single"),
    *("all_gather_into_tensor_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
    *("broadcast", "broadcast_"),
)


class CollectiveThreadError(AssertionError):
    """A thread started a collective that it must not start."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that was started.

    Args:
        thread: name of the thread.
        is_main: True for the main thread.
        function: name of the called function.
        group: name of the group; empty for a new one.
        backend: backend of the group, such as gloo; empty if unknown.
        is_default: True for the default group.
        stack: stack of the call.
    """

    thread: str
    is_main: bool
    function: str
    group: str
    backend: str
    is_default: bool
    stack: str


@contextmanager
def watch_collectives(workers: Sequence[str] = ()) -> Iterator[list[Collective]]:
    """Record which threads of this process start collectives or make groups.

    A collective of a thread that must not start one raises in that thread and is not started, so that it cannot hang.

    Args:
        workers: prefixes of the names of threads that may start collectives, on separate gloo groups.

    Yields:
        The collectives that were started, in order.

    Raises:
        CollectiveThreadError: at the end, if a thread started one that is neither the main one nor a worker; if a
            worker used the default group or one that is not gloo; or if two threads used one group.
    """
    started: list[Collective] = []
    refused: list[Collective] = []

    def record(function: str, group: Any) -> None:
        collective = _collective(function, group)
        started.append(collective)
        if not (collective.is_main or collective.thread.startswith(tuple(workers))):
            refused.append(collective)
            raise CollectiveThreadError(f"{collective.function}: thread {collective.thread} must start no collective")

    def watched(function: str, original: Callable[..., Any], place: int | None) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            group = None if place is None else args[place] if args else kwargs.get("group_name")
            record(function, group)
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner in (c10d.ProcessGroup, c10d.Backend):
            for name in _METHODS:
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, watched(name, getattr(owner, name), 0)))
        for name in _OPERATORS:
            operator = getattr(torch.ops._c10d_functional, name, None)
            if operator is not None:
                stack.enter_context(
                    mock.patch.object(torch.ops._c10d_functional, name, watched(name, operator, -1)),
                )
        make = distributed_c10d._new_process_group_helper
        stack.enter_context(
            mock.patch.object(distributed_c10d, "_new_process_group_helper", watched("new_group", make, None))
        )
        yield started
    check(started, refused)


def check(started: Sequence[Collective], refused: Sequence[Collective] = ()) -> None:
    """Raise :class:`CollectiveThreadError` for collectives that :func:`watch_collectives` does not allow."""
    wrong = [f"thread {each.thread} started {each.function}:\n{each.stack}" for each in refused]
    threads: dict[str, set[str]] = defaultdict(set)
    for each in started:
        if each in refused:
            continue
        threads[each.group].add(each.thread)
        if not each.is_main and (each.is_default or each.backend not in ("gloo", "")):
            wrong.append(f"worker {each.thread} used group {each.group} of {each.backend}:\n{each.stack}")
    wrong += [
        f"threads {sorted(names)} use group {group}" for group, names in threads.items() if group and len(names) > 1
    ]
    if wrong:
        raise CollectiveThreadError("\n".join(wrong))


def _collective(function: str, group: Any) -> Collective:
    thread = threading.current_thread()
    name, backend, is_default = "", "", False
    if isinstance(group, str):
        group = distributed_c10d._resolve_process_group(group)
    if isinstance(group, c10d.ProcessGroup):
        name, backend = group.group_name, dist.get_backend(group)
        is_default = group is distributed_c10d._get_default_group()
    elif isinstance(group, c10d.ProcessGroupGloo):  # made without new_group
        name, backend = group.options.group_name, "gloo"
    stack = "".join(traceback.format_list(traceback.extract_stack()[:-3]))
    return Collective(
        thread=thread.name,
        is_main=thread is threading.main_thread(),
        function=function,
        group=name,
        backend=backend,
        is_default=is_default,
        stack=stack,
    )
