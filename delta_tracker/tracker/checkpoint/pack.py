"""Encode the state of one rank in the format of :mod:`delta_tracker.tracker.checkpoint.rank_header`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.rows import ChangedRows
from delta_tracker.tracker.checkpoint.rank_header import ALIGNMENT, DTYPES, FORMAT_VERSION, HISTORY, digest
from delta_tracker.tracker.cursors import LogState
from delta_tracker.types import ShardSpec

# Mapping from counter name to the counter's fields: a mapping from field name to tensor or JSON value.
Counters = Mapping[str, Mapping[str, Any]]

_DCP_LOAD = "torch.distributed.checkpoint.state_dict_loader"


def pack(
    rank: int,
    world_size: int,
    mode: str,
    shards: Mapping[str, ShardSpec],
    state: LogState,
    counters: Counters,
    kinds: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Encode the state of a rank. Return the CPU tensors to save, by key.

    Args:
        rank: the rank.
        world_size: number of ranks that save.
        mode: value of the tracking mode.
        shards: table FQN to the rank's block.
        state: state of the rank's log, with local ids.
        counters: counter name to the counter's fields, which are tensors or JSON values.
        kinds: counter name to the counter's kind, a JSON object.

    Raises:
        InvalidArgumentError: if a field of a counter is neither a JSON value nor a tensor of a supported dtype.
    """
    sets = {str(place): consumer.rows for place, consumer in enumerate(state.consumers.values())}
    if state.history is not None:
        sets[HISTORY] = state.history
    pieces: dict[str, list[object]] = {}
    rows: dict[str, Tensor] = {}
    for fqn, spec in shards.items():
        found = [
            (row_set, column, tensor)
            for row_set, tables in sets.items()
            if fqn in tables
            for column, tensor in _columns(tables[fqn], spec)
        ]
        if found:
            pieces[fqn] = [[*names, _dtype_name(each.dtype), list(each.shape)] for *names, each in found]
            rows[f"rows/{fqn}"] = torch.cat([_filled_up(tensor) for *_, tensor in found])
    tensors, plain = _split(counters)
    header = {
        "version": FORMAT_VERSION,
        "rank": rank,
        "world_size": world_size,
        "mode": mode,
        "num_batches": state.num_batches,
        "shards": {fqn: _shard_json(spec) for fqn, spec in shards.items()},
        "consumers": [[name, each.batch, each.is_behind] for name, each in state.consumers.items()],
        "has_history": state.history is not None,
        "annotations": {name: each.note for name, each in state.consumers.items() if each.note is not None},
        "pieces": pieces,
        "counter_kinds": dict(kinds),
        "counters": plain,
        "layouts": {name: [_dtype_name(each.dtype), list(each.shape)] for name, each in tensors.items()},
        "digests": {name: digest(each) for name, each in (*rows.items(), *tensors.items())},
    }
    try:
        encoded = json.dumps(header, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        remedy = f"Return only tensors and JSON values from each counter's state_dict: {error}"
        raise InvalidArgumentError("counters", sorted(counters), remedy) from error
    prefix = f"rank{rank}of{world_size}/"
    return {
        f"{prefix}header": torch.frombuffer(bytearray(encoded), dtype=torch.uint8),
        **{prefix + name: tensor for name, tensor in (*rows.items(), *tensors.items())},
    }


def _split(counters: Counters) -> tuple[dict[str, Tensor], dict[str, dict[str, object]]]:
    """Return the tensors of all counters, by key, and their other fields, by counter and name."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, object]] = {name: {} for name in counters}
    for name, fields in counters.items():
        for field, value in fields.items():
            if isinstance(value, Tensor):
                tensors[f"counters/{name}/{field}"] = value.detach().to("cpu", copy=True)
            else:
                plain[name][field] = value
    if strange := sorted(name for name, each in tensors.items() if _dtype_name(each.dtype) not in DTYPES):
        raise InvalidArgumentError("counters", strange, f"Use tensors of the dtypes {sorted(DTYPES)}")
    return tensors, plain


def _filled_up(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a 1-D uint8 tensor, padded with zeros to a multiple of ``ALIGNMENT``."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % ALIGNMENT))


def _columns(rows: ChangedRows, spec: ShardSpec) -> Iterator[tuple[str, Tensor]]:
    if not len(rows):
        return
    ids = rows.ids.cpu() + spec.row_offset
    yield "ids", ids.int() if spec.table.num_rows <= torch.iinfo(torch.int32).max else ids
    if rows.states is not None and rows.known is not None:
        known = rows.known.cpu()
        if not bool(known.all()):
            yield "known", known
        yield "states", rows.states.cpu()[known]
    if rows.ages is not None and bool(rows.ages.any()):
        yield "ages", rows.ages.cpu()
    if rows.former is not None:
        yield "former", rows.former.cpu()


def _shard_json(spec: ShardSpec) -> list[object]:
    table = spec.table
    columns = [list(each) for each in spec.columns]
    return [
        *(table.num_rows, table.dim, _dtype_name(table.dtype)),
        *(spec.row_offset, spec.num_rows, columns, spec.is_replicated),
        *([spec.replica] if spec.replica else []),
    ]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_dcp_load(argument: str, adapter: str) -> None:
    """Refuse ``state_dict()`` inside ``dcp.load``, which needs the keys and sizes of the saved state instead.

    ``dcp.load`` would raise that the sizes differ, or succeed where they are equal by chance.

    Args:
        argument: what the caller saves.
        adapter: text of the object to load it with.

    Raises:
        InvalidArgumentError: if ``dcp.load`` is among the callers.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  the only way to know the caller
    while frame is not None:
        if frame.f_globals.get("__name__") == _DCP_LOAD:
            remedy = f"Pass {adapter} of delta_tracker.integrations.dcp to dcp.load()"
            raise InvalidArgumentError(argument, "an object to load", remedy)
        frame = frame.f_back
