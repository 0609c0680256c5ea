"""Operators who follow the advice of errors: what was refused is not refused again.

Each error of the library has a class of its own and a remedy; the command line prints both sentences. An operation that
was refused is followed by what its remedy says, where a world can do that, and is then repeated. ``FOLLOWED`` and
``IGNORED`` count the advice by call and kind, and are printed with the counts of a run.

To follow another kind of advice, add a line to ``_ADVICE``: the first line applies that fits the call and the text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from delta_tracker.errors import DeltaTrackerError, StreamError
from tests.simulation.history import RuleError
from tests.simulation.values import Operation

FOLLOWED: Counter[str] = Counter()
"""Number of times that advice was followed, by call and kind."""
IGNORED: Counter[str] = Counter()
"""Number of times that an operation was refused whose advice this world cannot follow, or not at that time."""
_PRINTED = re.compile(r"error: .+\. (?P<remedy>[A-Z].+)\.", re.DOTALL)
_ALL = 1  # choice of a repair of all stores
_TWELVE = 2  # choice of an advance of 12 seconds, more than those of a canary
_LONG = 5  # choice of an advance that is longer than the lifetimes of a cache and the pauses of a reader
_ROUNDS = 4  # of a predictor, which skips an object only after several failures


class Refused(NamedTuple):
    """A call that ended with an error.

    Args:
        call: name of the call.
        kind: class of the error; ``command`` if only its text was printed.
        text: the message.
    """

    call: str
    kind: str
    text: str

    @classmethod
    def by(cls, call: str, error: DeltaTrackerError) -> Refused:
        """Return the refusal by an error. Raise RuleError if it has no class of its own or no next step."""
        text = str(error)
        if type(error) in (DeltaTrackerError, StreamError):
            raise RuleError("advice", f"{call} raises an error without a class of its own: {text}")
        if not error.remedy.strip() or not text.endswith(f"{error.remedy}."):
            raise RuleError("advice", f"{call} names no next step: {text}")
        return cls(call, type(error).__name__, text)

    @classmethod
    def printed(cls, call: str, text: str) -> Refused:
        """Return the refusal by a command. Raise RuleError if it names no next step."""
        if not _PRINTED.fullmatch(text):
            raise RuleError("advice", f"{call} prints no next step: {text}")
        return cls(call, "command", text)


Do = Callable[[str, int, int], Sequence[Refused]]
"""Runs an operation, and returns the calls that were refused."""
_Follow = Callable[[Do, Operation], Sequence[Refused]]


def _again(do: Do, refused: Operation) -> Sequence[Refused]:
    return do(*refused)


def _repaired(do: Do, refused: Operation) -> Sequence[Refused]:
    do("repair", 0, _ALL)
    do("grant", 0, 0)
    return _again(do, refused)


def _after(*kinds: str) -> _Follow:
    """Return a function that runs operations, and repeats the refused one."""

    def follow(do: Do, refused: Operation) -> Sequence[Refused]:
        for kind in kinds:
            do(kind, refused.who, refused.choice)
        return _again(do, refused)

    return follow


def _instead(kind: str, choice: int) -> _Follow:
    """Return a function that runs an operation with the same ``who`` instead of the refused one."""
    return lambda do, refused: do(kind, refused.who, choice)


def _replaced(do: Do, refused: Operation) -> Sequence[Refused]:
    """Replace a pin, or release it first, which needs a snapshot."""
    if refused.choice % 2:
        return do(refused.kind, 1, refused.choice)
    do("snapshot", 0, 0)
    do("release_pin", 0, 0)
    return _again(do, refused)


def _read(do: Do, refused: Operation) -> Sequence[Refused]:
    """Let a predictor read until nothing is refused, a few times."""
    left: Sequence[Refused] = ()
    for _ in range(_ROUNDS):
        do("advance", 0, _LONG)
        left = do("sync", refused.who, 0)
        if not left:
            break
    return left


def _read_snapshot(do: Do, refused: Operation) -> Sequence[Refused]:
    """Check the stores, and publish a snapshot, and versions by which a canary allows it."""
    do("repair", 0, _ALL)
    for kind in ("heal", "snapshot", "publish", "advance", "publish"):
        do(kind, refused.who, _TWELVE)
    return _read(do, refused)


def _read_repaired(do: Do, refused: Operation) -> Sequence[Refused]:
    do("repair", 0, _ALL)
    return _read(do, refused)


def _accepted(do: Do, refused: Operation) -> Sequence[Refused]:
    """Accept a held version, which the operation checks. The gate may hold the next one."""
    do("accept_held", refused.who, 0)
    return ()


# Pattern of the call, words of the advice, and what follows them.
_ADVICE: tuple[tuple[str, str, _Follow], ...] = (
    ("publish", "build a new Publisher to claim the stream again", _instead("claim", 0)),
    ("publish|snapshot", "[Tt]ry again|publish again|Publish again|the directory itself", _repaired),
    ("take over", "fence it with force=True", _instead("force", 0)),
    ("rollback", "replace the pin with --replace", _replaced),
    ("release", "Call publisher.snapshot.. in the repaired trainer", _after("snapshot")),
    ("mirror", "Mirror to an empty destination", _after("empty")),
    ("mirror|compact|rollback|release|retain|standby sync", "[Tt]ry again|the directory itself", _repaired),
    ("sync", "Call Publisher.snapshot.. on the trainer, then sync", _read_snapshot),
    ("sync", "then call accept", _accepted),
    ("sync", "Publish a snapshot to the present stream: predictors continue", _read_snapshot),
    ("sync", "The next sync.. or follow.. completes the version|The read is retried", _read),
    ("sync", "[Tt]ry again|the directory itself", _read_repaired),
    ("roll back", "Pass the version of the first snapshot|Pass one of the versions up to", _instead("roll_back", 1)),
)


def _kind(refused: Refused) -> str:
    """Return the call and the advice, without what differs from one to the next."""
    found = _PRINTED.fullmatch(refused.text)
    advice = found["remedy"] if found else refused.text
    return f"{refused.call}: {refused.kind}" if refused.kind != "command" else f"{refused.call}: {advice.split(':')[0]}"


def ignore(refused: Refused) -> None:
    """Count advice that is not followed."""
    IGNORED[_kind(refused)] += 1


def follow(refused: Refused, operation: Operation, do: Do) -> str | None:
    """Follow the advice, and return what was done. Return None if no line of the table fits.

    Raise RuleError if the operation is then refused with the same advice. Another reason has an advice of its own.

    Args:
        refused: the refusal.
        operation: the operation that was refused.
        do: runs an operation.
    """
    for call, words, action in _ADVICE:
        if re.fullmatch(call, refused.call) and re.search(words, refused.text):
            FOLLOWED[_kind(refused)] += 1
            left = action(do, operation)
            if any(_kind(each) == _kind(refused) and re.search(words, each.text) for each in left):
                raise RuleError("advice", f"{refused} was followed, and then {left[-1]}")
            for each in left:
                ignore(each)
            return f"followed {_kind(refused)}, then {[each.text for each in left] or 'nothing'} was refused"
    ignore(refused)
    return None
