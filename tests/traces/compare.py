"""Comparison of traces."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

_LEFT_OUT = {"complete": r"(?!)", "no control": r"\w+ control/", "no requests": r"(?!version )"}
FORMS = (*_LEFT_OUT, "versions", "unstable")
"""Forms of what is kept of a reader, each with less than the one before. Times decide when control/ is read."""

Trace = Mapping[str, Mapping[str, Any]]
_NO_CALL: Mapping[str, Any] = {"call": None}
_NEVER: Mapping[str, Any] = {"versions": ["missing"], "calls": [], "form": FORMS[0]}


class Difference(NamedTuple):
    """What differs, in which call of which reader, and how."""

    kind: str
    place: str
    before: object
    after: object


def stable(runs: Sequence[Trace]) -> Trace:
    """Return each reader in the first form that is the same in all runs."""
    found = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        first, *others = (run.get(name, _NEVER) for run in runs)
        form = next(form for form in FORMS if not any(any(_of_reader(name, first, each, form)) for each in others))
        found[name] = {"form": form, **_reduced(first, form)}
    return found


def _reduced(reader: Mapping[str, Any], form: str) -> dict[str, Any]:
    calls = [dict(call) for call in reader["calls"] if form in _LEFT_OUT]
    for call in calls:
        call["events"] = [event for event in call["events"] if not re.match(_LEFT_OUT[form], event)]
    return {"versions": [] if form == "unstable" else reader["versions"], "calls": calls}


def differences(before: Trace, after: Trace) -> Iterator[Difference]:
    """Yield the differences of two traces, of each reader in the form that both have."""
    for name in dict.fromkeys([*before, *after]):
        pair = before.get(name, _NEVER), after.get(name, _NEVER)
        yield from _of_reader(name, *pair, _form(pair))


def _form(readers: Sequence[Mapping[str, Any]]) -> str:
    return max((each["form"] for each in readers), key=FORMS.index)


def _of_reader(name: str, before: Mapping[str, Any], after: Mapping[str, Any], form: str) -> Iterator[Difference]:
    old, new = _reduced(before, form), _reduced(after, form)
    for number, (had, has) in enumerate(zip_longest(old["calls"], new["calls"], fillvalue=_NO_CALL), start=1):
        place = f"{name}, call {number}, {had['call']}"
        if had["call"] != has["call"]:
            yield Difference("calls", place, had["call"], has["call"])
            return
        yield from _of_call(place, had, has)
    if old["versions"] != new["versions"]:
        yield Difference("versions", name, old["versions"], new["versions"])


def _of_call(place: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    had, has = old.get("status", {}), new.get("status", {})
    fields = [key for key in had if key in has and had[key] != has[key]]
    pairs = {
        "raises": (old.get("raises"), new.get("raises")),
        "result": (old.get("result"), new.get("result")),
        "versions": (_events(old, are_versions=True), _events(new, are_versions=True)),
        "status": ({key: had[key] for key in fields}, {key: has[key] for key in fields}),
    }
    yield from (Difference(kind, place, *pair) for kind, pair in pairs.items() if pair[0] != pair[1])
    counted, counts = (Counter(_events(call, are_versions=False)) for call in (old, new))
    less, more = counted - counts, counts - counted
    if less or more:
        change = (more.total() > less.total()) - (more.total() < less.total())
        kind = ("other requests", "more requests", "fewer requests")[change]
        yield Difference(kind, place, _listed(less.elements()), _listed(more.elements()))
    elif old["events"] != new["events"]:
        yield Difference("order of requests", place, _listed(old["events"]), _listed(new["events"]))


def _events(call: Mapping[str, Any], *, are_versions: bool) -> list[str]:
    return [event for event in call["events"] if _is_version(event) == are_versions]


def _is_version(event: str) -> bool:
    return event.startswith("version ")


def _listed(events: Iterable[str]) -> str:
    texts = list(events)
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} others" if len(texts) > 4 else "")


def report(old: Mapping[str, Trace], new: Mapping[str, Trace]) -> Iterator[str]:
    """Yield the first difference of each trace, then a summary of two recordings."""
    kinds, forms, requests = Counter[str](), Counter[str](), (Counter[str](), Counter[str]())
    for name in (each for each in old if each in new):
        found = list(differences(old[name], new[name]))
        kinds.update({each.kind for each in found} or {"equal"})
        if found:
            kind, place, before, after = found[0]
            yield f"{name}\n  {kind}: {place}\n  before: {before}\n  after:  {after}"
        for reader in old[name].keys() & new[name].keys():
            pair = old[name][reader], new[name][reader]
            forms[f"{pair[0]['form']} before, {pair[1]['form']} now"] += 1
            for counts, each in zip(requests, pair, strict=True) if _form(pair) == FORMS[0] else []:
                events = (_events(call, are_versions=False) for call in each["calls"])
                counts.update(event.split()[0] for event in chain.from_iterable(events))
    kinds["only in the old file"], kinds["only in the new file"] = len(old.keys() - new), len(new.keys() - old)
    yield from (f"{count} traces: {kind}" for kind, count in kinds.most_common() if count)
    yield from (f"{count} readers: {form}" for form, count in forms.most_common())
    changes = [f"{kind} {requests[0][kind]} to {requests[1][kind]}" for kind in sorted(requests[0] | requests[1])]
    yield f"requests of complete readers: {', '.join(changes)}"
