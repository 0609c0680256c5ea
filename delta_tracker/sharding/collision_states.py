"""Save and restore the training state of TorchRec's ``MCHManagedCollisionModule``.

The module's ``state_dict`` lacks the ids that it has received since the last eviction, and the counters that determine
when the next eviction happens. The functions below also save these ids and counters, so that training continues
bit-identically. They were tested with torchrec 1.8 on the CPU.

Notation: ``Z`` is the number of slots of a module, ``H`` the number of ids received since the last eviction.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from delta_tracker.errors import RestoreMismatchError
from delta_tracker.raw_ids.raw_id_map import NO_OWNER, bucket_of
from delta_tracker.types import Identity

_COUNTERS = ("current_iter", "last_eviction_iter")
_NUMBERS = ("offset", "zch_size", "hash_size", "eviction_interval", "buffer_size", *_COUNTERS)

# Key of a state to the attribute of a module.
_ATTRIBUTES = {
    "offset": "_output_global_offset",
    "zch_size": "_zch_size",
    "hash_size": "_input_hash_size",
    "eviction_interval": "_eviction_interval",
    "sorted": "_mch_sorted_raw_ids",
    "mapping": "_mch_remapped_ids_mapping",
    "iter": "_current_iter_tensor",
    "current_iter": "_current_iter",
    "last_eviction_iter": "_last_eviction_iter",
    "buffer_size": "_input_history_buffer_size",
}


def collision_obstacle(module: Any) -> str:  # noqa: ANN401  a class of torchrec's
    """Check whether the state of a managed-collision module can be saved. Return the reason if not, otherwise ``""``.

    Subclasses and custom eviction policies are rejected, because they may have additional state.
    """
    torchrec = import_module("torchrec.modules.mc_modules")
    if type(module) is not torchrec.MCHManagedCollisionModule:
        return f"a {type(module).__name__}, whose training state is unknown"
    policies = (torchrec.LFU_EvictionPolicy, torchrec.LRU_EvictionPolicy, torchrec.DistanceLFU_EvictionPolicy)
    policy = type(module._eviction_policy)  # noqa: SLF001
    return "" if policy in policies else f"a module with a {policy.__name__}, whose training state is unknown"


def collision_state(module: Any) -> dict[str, Any]:  # noqa: ANN401  a class of torchrec's
    """Return the training state of a managed-collision module. The tensors share the module's memory.

    Returns:
        A dict with the keys ``class`` (name), ``policy`` (class and settings), ``offset`` (first slot),
        ``zch_size`` (``Z``), ``hash_size``, ``eviction_interval``, ``sorted`` and ``mapping`` (``[Z]`` raw ids in
        ascending order, and their slots), ``metadata`` (name to ``[Z]`` counters), ``iter`` (``[1]``),
        ``current_iter``, ``last_eviction_iter``, ``evicted`` (slots that are not reset yet; None if there are none),
        ``buffer_size``, ``history`` (``[H]`` raw ids) and ``history_metadata`` (name to ``[H]`` counters).
    """
    state = {name: getattr(module, attribute) for name, attribute in _ATTRIBUTES.items()}
    length, is_new = module._current_history_buffer_offset, state["buffer_size"] == -1  # noqa: SLF001
    return {
        "class": type(module).__name__,
        "policy": _policy_text(module._eviction_policy),  # noqa: SLF001
        **state,
        "metadata": dict(module._mch_metadata),  # noqa: SLF001
        "evicted": module._evicted_emb_indices if module._evicted else None,  # noqa: SLF001
        "history": state["sorted"][:0] if is_new else module._history_accumulator[:length],  # noqa: SLF001
        "history_metadata": {name: _seen(module, name) for name in _history_names(module)},
    }


def collision_fault(state: Mapping[str, Any]) -> str:
    """Return the name of the first invalid value in a state from a stream, or an empty string if all are valid."""
    return next(_faults(state), "")


def check_collision_slots(fqn: str, module: Any, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:  # noqa: ANN401
    """Return the saved slot ``ranges`` that overlap the slots of a module, in ascending order.

    Raises RestoreMismatchError if the returned ranges do not cover exactly the slots of the module.
    """
    first, end = _rows(module)
    saved = sorted(ranges)
    found = [(begin, stop) for begin, stop in saved if first < stop and begin < end]
    edges = [edge for each in found for edge in each]
    if edges[:1] + edges[-1:] != [first, end] or edges[1:-1:2] != edges[2::2]:
        own = f"in the slots {first} to {end}, which are not those of one or several ranks"
        slots = ", ".join(f"{begin} to {stop}" for begin, stop in saved)
        raise RestoreMismatchError(f"the collision module of {fqn!r}", f"in the slots {slots}", own)
    return found


def check_collision_states(
    fqn: str,
    module: Any,  # noqa: ANN401  a class of torchrec's
    states: Sequence[Mapping[str, Any]],
    identity: Identity,
) -> None:
    """Raise RestoreMismatchError if :func:`load_collision_states` cannot restore ``states``. Writes nothing.

    ``states`` contains one state for each rank that published the version, in any order. First check each state with
    :func:`collision_fault`. The states must cover the slots of the module and have the same settings. Each saved raw id
    must belong to the bucket of ``identity`` that contains its slot.
    """
    own = collision_state(module)
    what = f"the collision module of {fqn!r}"
    check_collision_slots(fqn, module, map(_slots, states))
    parts = _parts(module, states)
    for state in parts:
        for key in ("class", "policy", "hash_size", "eviction_interval"):
            _same(f"{key} of {what}", state[key], own[key])
        for key in ("metadata", "history_metadata"):
            _same(f"{key} of {what}", sorted(state[key]), sorted(own[key]))
    numbers = {(int(state["iter"]), *(state[key] for key in _COUNTERS)) for state in parts}
    if len(numbers) > 1:
        raise RestoreMismatchError(f"the iteration of {what}", f"{sorted(numbers)} on its ranks", "one number")
    _check_routes(what, parts, identity)


def _policy_text(policy: Any) -> str:  # noqa: ANN401  a class of torchrec's
    """Return the class and the settings of an eviction policy of torchrec."""
    settings = []
    if hasattr(policy, "_decay_exponent"):
        settings.append(f"decay_exponent={policy._decay_exponent}")  # noqa: SLF001
    if (function := policy._threshold_filtering_func) is not None:  # noqa: SLF001
        settings.append(f"threshold_filtering_func={getattr(function, '__qualname__', type(function).__name__)}")
    return f"{type(policy).__name__}({', '.join(settings)})"


def load_collision_states(module: Any, states: Sequence[Mapping[str, Any]]) -> int:  # noqa: ANN401
    """Restore a module from ``states``. Return the number of states used. Call :func:`check_collision_states` first."""
    parts = _parts(module, states)
    device = module._mch_sorted_raw_ids.device  # noqa: SLF001
    with torch.no_grad():
        module._mch_sorted_raw_ids.copy_(torch.cat([state["sorted"] for state in parts]))  # noqa: SLF001
        module._mch_remapped_ids_mapping.copy_(torch.cat([state["mapping"] for state in parts]))  # noqa: SLF001
        for name, memory in module._mch_metadata.items():  # noqa: SLF001
            memory.copy_(torch.cat([state["metadata"][name] for state in parts]))
        module._current_iter_tensor.copy_(parts[0]["iter"])  # noqa: SLF001
    if len(parts) > 1:
        module._sort_mch_buffers()  # noqa: SLF001
    module._current_iter = parts[0]["current_iter"]  # noqa: SLF001
    module._last_eviction_iter = parts[0]["last_eviction_iter"]  # noqa: SLF001
    evicted = [state["evicted"] for state in parts if state["evicted"] is not None]
    module._evicted = bool(evicted)  # noqa: SLF001
    if evicted:
        module._evicted_emb_indices = torch.cat(evicted).to(device)  # noqa: SLF001
    _load_history(module, parts, device)
    return len(parts)


def _load_history(module: Any, parts: Sequence[Mapping[str, Any]], device: torch.device) -> None:  # noqa: ANN401
    history = torch.cat([state["history"] for state in parts])
    size = sum(max(0, state["buffer_size"]) for state in parts)
    is_new = all(state["buffer_size"] == -1 for state in parts)
    module._input_history_buffer_size = -1 if is_new else size  # noqa: SLF001  -1: the next batch determines the size
    module._current_history_buffer_offset = len(history)  # noqa: SLF001
    module._history_accumulator = torch.empty(size, dtype=torch.int64, device=device)  # noqa: SLF001
    module._history_accumulator[: len(history)] = history  # noqa: SLF001
    for name in _history_names(module):
        memory = torch.zeros(size, dtype=torch.int64, device=device)
        if len(history):
            held = [state["history_metadata"][name] for state in parts if len(state["history"])]
            memory[: len(history)] = torch.cat(held)
        module.register_buffer(f"_history_{name}", memory, persistent=False)
        module._history_metadata[name] = memory  # noqa: SLF001


def _parts(module: Any, states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:  # noqa: ANN401
    """Return the saved states that overlap with the slots of a module, ordered by slot."""
    first, end = _rows(module)
    return sorted((each for each in states if first < _slots(each)[1] and _slots(each)[0] < end), key=_slots)


def _rows(module: Any) -> tuple[int, int]:  # noqa: ANN401  a class of torchrec's
    return module._output_global_offset, module._output_global_offset + module._zch_size  # noqa: SLF001


def _slots(state: Mapping[str, Any]) -> tuple[int, int]:
    return state["offset"], state["offset"] + state["zch_size"]


def _seen(module: Any, name: str) -> Tensor:  # noqa: ANN401  a class of torchrec's
    """Return the counter ``name`` of each id that was received since the last eviction, ``[H]``."""
    found: Tensor = module._history_metadata.get(name, module._mch_sorted_raw_ids)  # noqa: SLF001
    return found[: module._current_history_buffer_offset]  # noqa: SLF001


def _history_names(module: Any) -> list[str]:  # noqa: ANN401  a class of torchrec's
    """Return the names of the counters of the ids that were received since the last eviction."""
    return [each.metadata_name for each in module._eviction_policy.metadata_info if each.is_history_metadata]  # noqa: SLF001


def _check_routes(what: str, parts: Sequence[Mapping[str, Any]], identity: Identity) -> None:
    """Raise RestoreMismatchError if the buckets of ``identity`` route an id to a rank that did not save this id."""
    ends = torch.tensor([bucket.rows[1] for bucket in identity.buckets], device="cpu")
    for state in parts:
        is_owned = state["sorted"] != NO_OWNER
        known = torch.cat([state["sorted"][is_owned], state["history"]])
        slots = torch.cat([state["mapping"][is_owned], torch.full_like(state["history"], state["offset"])])
        other = (bucket_of(identity, known) != torch.bucketize(slots, ends, right=True)).nonzero().flatten()
        if len(other):
            saved, found = f"on one rank with the id {int(known[other[0]])}", f"on {len(ends)} ranks without it"
            raise RestoreMismatchError(f"a part of {what}", saved, found)


def _same(what: str, saved: object, found: object) -> None:
    if saved != found:
        raise RestoreMismatchError(what, saved, found)


def _faults(state: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in (("class", str), ("policy", str), ("metadata", dict), ("history_metadata", dict)):
        if not isinstance(state.get(name), kind):
            yield name
    for name in _NUMBERS:
        if type(state.get(name)) is not int or not -1 <= state[name] <= NO_OWNER:
            yield name
    for name in ("sorted", "mapping", "iter", "history"):
        if not _is_ids(state.get(name)):
            yield name
    yield from _tensor_faults(state)


def _tensor_faults(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the tensors of a state that have invalid contents. Their types must be valid."""
    num_slots, length = state["zch_size"], len(state["history"])
    for names, size in ((("sorted", "mapping"), num_slots), (("iter",), 1)):
        yield from (name for name in names if len(state[name]) != size)
    for key, size in (("metadata", num_slots), ("history_metadata", length)):
        yield from (f"{key} {name}" for name, each in state[key].items() if not _is_ids(each) or len(each) != size)
    if length > max(0, state["buffer_size"]):
        yield "history"
    first, end = _slots(state)
    if not torch.equal(state["mapping"].sort().values, torch.arange(first, end, device="cpu")):
        yield "mapping"
    ids = state["sorted"]
    if bool(((ids[1:] <= ids[:-1]) & (ids[1:] != NO_OWNER)).any()):
        yield "sorted"
    evicted = state.get("evicted")
    if evicted is not None and not (_is_ids(evicted) and bool(((evicted >= first) & (evicted < end)).all())):
        yield "evicted"


def _is_ids(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == 1
