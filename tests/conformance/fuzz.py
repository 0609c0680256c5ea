"""Random mutations of manifests and parts: a program must refuse each, or give the result of the second reader.

Mutation ``n`` of a seed does not depend on the others.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.conformance.case import Case, difference
from tests.conformance.golden import golden
from tests.conformance.maker import owned_maker, plain_maker
from tests.conformance.program import Program
from tests.conformance.stream import Stream
from tests.stream.golden import reader as page
from tests.stream.mutations import Draw, mutate_bytes, mutate_entry, mutate_object, mutate_part


@functools.cache
def _streams() -> list[Stream]:
    """Return streams of both formats, without states and training states."""
    plain, owned = plain_maker(), owned_maker()
    plain.merge("snapshot", None, 3)
    owned.merge("delta", 1, 3)
    return [golden(1), golden(2), plain.stream, owned.stream]


@dataclass(frozen=True)
class Mutation:
    """A case with one mutated object, which the program must read to reach the newest version."""

    number: int
    seed: int
    rule: str = "Check everything in this document"

    @property
    def name(self) -> str:
        return f"fuzz mutation {self.number} of seed {self.seed}"

    def fault(self, program: Program, root: Path) -> str:
        stream, version, merged = self._mutated()
        stream.write(root / "stream")
        output = root / "state.safetensors"
        status, errors = program.run([str(root / "stream"), "--out", str(output)])
        if status in (2, 3):
            return "" if not output.exists() else f"ended with status {status}, but wrote a state"
        if status is None:
            return errors
        if status != 0:
            return f"ended with status {status}: {errors[-200:].strip()}"
        faults = []
        for ways in (
            partial(stream.expected, version),
            *(partial(stream.expected_by, name, version) for name in merged),
        ):
            try:
                faults.append(difference(output, ways(), stream.dense_names))
            except Exception as error:  # noqa: BLE001  the second reader checks little
                faults.append(f"accepted what the second reader cannot read: {type(error).__name__}: {error}")
        return "" if "" in faults else faults[-1]

    def _mutated(self) -> tuple[Stream, int, list[str]]:
        """Return a stream with a mutated object, its version, and the merged entry that has the object, if any."""
        draw = Draw(random.Random(f"{self.seed}/{self.number}"))
        whole = draw.choice(_streams())
        names = [version for version in whole.versions if whole.entry(version)["kind"] != "claim"]
        version = draw.choice(names)
        stream = whole.truncate(version)
        merged = [name for name in stream.objects if name.startswith("merged/")]
        entry: int | str = draw.choice(merged) if merged and draw.chance(0.2) else version
        if isinstance(entry, int):
            stream.remove("merged/")
        parts = stream.entry(entry)["parts"]
        if not parts or draw.chance(0.5):
            name = f"log/{entry:020d}.json" if isinstance(entry, int) else entry
            stream.objects[name] = mutate_entry(draw, stream.objects[name])
        else:
            self._mutate_part(draw, stream, entry, draw.below(len(parts)))
        with suppress(
            ValueError, LookupError, TypeError, AttributeError, RecursionError
        ):  # a claim has the state before it
            version -= json.loads(stream.objects[f"log/{version:020d}.json"])["kind"] == "claim"
        return stream, version, [entry] if isinstance(entry, str) else []

    def _mutate_part(self, draw: Draw, stream: Stream, entry: int | str, index: int) -> None:
        data = stream.objects[stream.entry(entry)["parts"][index]["name"]]
        if draw.chance(0.1):
            stream.put_part(entry, index, mutate_bytes(draw, data), is_sealed=False)
        elif stream.entry(entry)["format"] == 1:
            stream.put_part(entry, index, mutate_part(draw, data))
        else:
            mutant, _ = mutate_object(draw, data, page.digests_of)
            stream.put_part(entry, index, mutant)


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Yield the first mutations of a seed."""
    return (Mutation(number, seed) for number in range(count))
