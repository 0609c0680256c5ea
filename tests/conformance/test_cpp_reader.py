"""The reader in C++, written from ``FORMAT.md`` alone, passes the kit, and the kit finds its deliberate faults."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conformance import fuzz
from tests.conformance.__main__ import all_cases, faults
from tests.conformance.case import Case
from tests.conformance.program import Command
from tests.sweeps import SWEEPS_ARE_WHOLE

_PLACE = Path(__file__).parents[2] / "examples" / "cpp_reader"
_INCLUDES = "#include <rapidjson/reader.h>\n#include <xxhash.h>\n#include <zlib.h>\n"

# The number of each deliberate fault in the reader to words of a case that finds it.
_FAULTS: dict[int, list[str]] = {
    1: ["golden format 1 version 6 without"],
    2: ["form F32 in a table of BF16"],
    3: ["log an entry whose generation is lower"],
    4: ["golden format 1 version 3 without"],
    5: ["manifest text a table twice"],
    6: ["part format 2 with digests of zeros"],
    7: ["golden format 2 version 1 without"],
    8: ["log a merged delta of another head"],
    9: ["part header with a gap between tensors"],
    10: ["follow a late claim without a newer snapshot"],
}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def output() -> Path:
    """Return the directory of the readers, which stays: a second run compiles only what changed."""
    reason = _missing()
    if reason and os.environ.get("DELTA_TRACKER_REQUIRE_SERVERS") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return _PLACE / "build" / "tests"


def _missing() -> str:
    """Return what is missing to build the reader, an empty text for nothing."""
    programs = [name for name in ("make", "g++") if shutil.which(name) is None]
    if programs:
        return f"the reader in C++ needs {programs}"
    command = ["g++", "-E", "-x", "c++", "-", "-o", os.devnull]
    found = subprocess.run(command, input=_INCLUDES, capture_output=True, text=True, check=False)
    return f"the reader in C++ needs its headers: {found.stderr[:300]}" if found.returncode else ""


def _built(output: Path, name: str, *options: str) -> Command:
    command = ["make", "--silent", "-j2", "-C", str(_PLACE), f"OUT={output}", *options]
    output.mkdir(parents=True, exist_ok=True)
    with (output / "lock").open("w") as lock:  # another worker may build a reader from the same objects
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return Command([str(output / name)])


def _failed(program: Command, cases: Sequence[Case]) -> list[tuple[str, str]]:
    assert cases
    return [(case.name, fault) for case, fault in faults(program, cases, jobs=2) if fault]


@pytest.mark.sweep("long")
def test_the_reader_passes_the_kit(output: Path) -> None:
    if SWEEPS_ARE_WHOLE:
        reader = _built(output, "reader-sanitized", "SANITIZE=1", "OPTIMIZE=-O1")
        cases = [*all_cases(), *fuzz.cases(600, seed=2)]
    else:
        reader = _built(output, "reader", "OPTIMIZE=-O0")
        cases = [*list(all_cases())[::5], *fuzz.cases(50, seed=2)]
    assert _failed(reader, cases) == []


@pytest.mark.sweep("short")
@pytest.mark.parametrize("number", _FAULTS if SWEEPS_ARE_WHOLE else [8])
def test_the_kit_finds_a_fault_of_the_reader(output: Path, number: int) -> None:
    name = f"reader-fault-{number}"
    reader = _built(output, name, f"FAULT={number}", "OPTIMIZE=-O0")
    cases = [case for case in all_cases() if all(word in case.name for word in _FAULTS[number])]
    assert len(_failed(reader, cases)) == len(cases)
