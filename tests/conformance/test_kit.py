"""The library passes the conformance kit, and the kit finds faults of programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from delta_tracker.predictor import identities
from delta_tracker.stream.format import block_rows, object_reader, parse, part_reader
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.position import Written
from tests.conformance import fuzz, reference
from tests.conformance.__main__ import all_cases, faults, main
from tests.conformance.program import InProcess, Main
from tests.sweeps import SWEEPS_ARE_WHOLE

_FORMAT = Path(parse.__file__).parent.parent / "FORMAT.md"


def _failed(program: Main, words: Sequence[str]) -> list[str]:
    """Return the names of the cases with these words that a program fails."""
    cases = [case for case in all_cases() if all(word in case.name for word in words)]
    assert cases
    return [case.name for case, fault in faults(InProcess(program), cases) if fault]


@pytest.mark.sweep("short")
def test_the_library_passes_every_case() -> None:
    cases = list(all_cases())
    assert len({case.name for case in cases}) == len(cases) > 1000
    some = cases if SWEEPS_ARE_WHOLE else cases[::15]
    assert [(case.name, fault) for case, fault in faults(InProcess(reference.main), some) if fault] == []


@pytest.mark.sweep("short")
def test_the_library_passes_random_mutations() -> None:
    cases = fuzz.cases(300 if SWEEPS_ARE_WHOLE else 30, seed=1)
    assert [(case.name, fault) for case, fault in faults(InProcess(reference.main), cases) if fault] == []


def test_every_case_names_a_rule_of_the_format() -> None:
    text = " ".join(_FORMAT.read_text().split())
    assert [case.name for case in all_cases() if case.rule not in text] == []


_DECODE = block_rows.decode_rows


_AT = Written.at


def _forgets_generation(written: Written, entry: Manifest) -> Written:
    return replace(_AT(written, entry), generation=0)


def _truncates(stored: Tensor, encoding: Encoding, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Decode rows, and cast them to bfloat16 by cutting the lower bits."""
    values = _DECODE(stored, encoding, num_columns, torch.float32)
    return (values.view(torch.int32) >> 16).to(torch.int16).view(dtype) if dtype == torch.bfloat16 else values.to(dtype)


def _listed_first(rows: Iterable[BlockRows]) -> tuple[list[BlockRows], list[BlockRows]]:
    """Return the listed rows in the place of the whole blocks, which are written first."""
    every = list(rows)
    return [each for each in every if each.ids is not None], [each for each in every if each.ids is None]


# Faults of a reader: what is replaced, by what, and words of cases that must fail.
_FAULTS: dict[str, tuple[Any, str, Any, list[str]]] = {
    "it does not check hashes": (object_reader, "_check_hash", lambda *_: None, ["part format 1", "flipped"]),
    "it does not check digests": (object_reader, "_check_piece", lambda *_: None, ["part format 2", "flipped"]),
    "it accepts a name twice": (parse, "_check_names", lambda _: None, ["manifest text", "twice"]),
    "it accepts blocks that overlap": (parse, "_check_overlaps", lambda _: None, ["form", "overlap"]),
    "it accepts bytes in BOOL": (part_reader, "_check_flags", lambda *_: None, ["BOOL of"]),
    "it does not check owners": (part_reader, "check_owners", lambda *_, **__: None, ["raw ids an owner"]),
    "it accepts a raw id with two rows": (identities, "check_owners", lambda *_: None, ["raw ids a raw id with"]),
    "it writes listed rows first": (part_reader, "newest", _listed_first, ["listed rows"]),
    "it cuts the lower bits": (block_rows, "decode_rows", _truncates, ["form F32 in a table of BF16"]),
    "it ignores merged entries": (StreamLog, "merged", lambda *_, **__: [], ["log a merged snapshot"]),
    "it accepts a lower generation": (Written, "at", _forgets_generation, ["generation is"]),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_the_kit_finds_a_fault_of_a_reader(fault: str) -> None:
    where, name, replacement, words = _FAULTS[fault]
    with mock.patch.object(where, name, replacement):
        assert _failed(reference.main, words)


def _changed(change: Callable[[int, Path], int]) -> Main:
    """Return a program that changes the exit status or the file of the library's."""

    def run(argv: Sequence[str], stdin: IO[str], stdout: IO[str], stderr: IO[str]) -> int:
        return change(reference.main(argv, stdin, stdout, stderr), Path(argv[argv.index("--out") + 1]))

    return run


def _without_a_tensor(status: int, output: Path) -> int:
    if output.exists():
        output.write_bytes(output.read_bytes().replace(b'"flags"', b'"flagX"'))
    return status


def _with_a_file(status: int, output: Path) -> int:
    output.write_bytes(b"\2\0\0\0\0\0\0\0{}") if status else None
    return status


_WRONG_ENDS: dict[str, tuple[Callable[[int, Path], int], list[str]]] = {
    "its status is always 0": (lambda *_: 0, ["part with", "ids"]),
    "its status is 1": (lambda status, _: status and 1, ["part with", "ids"]),
    "a newer format is malformed": (lambda status, _: min(status, 2), ["manifest format 3"]),
    "it writes a file, but refuses": (_with_a_file, ["part with", "ids"]),
    "a tensor has another name": (_without_a_tensor, ["part with", "zlib"]),
}


@pytest.mark.parametrize("fault", _WRONG_ENDS)
def test_the_kit_finds_a_wrong_end(fault: str) -> None:
    change, words = _WRONG_ENDS[fault]
    assert _failed(_changed(change), words)


def test_the_runner_reports_failures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "part with", "--only", "BOOL", "--jobs", "2", "sh", "-c", "echo because >&2; exit 4"]) == 1
    output = capsys.readouterr().out
    assert "FAILED part with a BOOL of 2: ended with status 4, must be refused: because\n" in output
    assert "0 of 2 cases passed" in output
    assert main(["--only", "BOOL", "sh", "-c", "echo because >&2; exit 2"]) == 0
    assert main(["--only", "follow a fork", "sh", "-c", "exit 2"]) == 1
    assert "did not write the line 3" in capsys.readouterr().out
    assert main(["--only", "BOOL of 2", "--list"]) == 0
    assert capsys.readouterr().out.startswith("part with a BOOL of 2: a BOOL is a byte 0 or 1\n")
    with pytest.raises(SystemExit):
        main(["--only", "no such case", "true"])


def test_the_library_passes_as_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.conformance.reference"]
    assert main(["--only", "follow raw ids", *command]) == 0, capsys.readouterr().out
