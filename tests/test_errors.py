"""The classes of errors."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import subprocess
import sys
import threading
import tomllib
import weakref
from collections import abc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from delta_tracker.errors import (
    CorruptPartError,
    DeltaTrackerError,
    FencedError,
    FollowEndedError,
    InvalidArgumentError,
    MalformedError,
    MissingExtraError,
    MissingVersionError,
    NewerFormatError,
    StorageError,
    StreamError,
    without_traceback,
)
from tests.raise_sites import ERRORS

_ROOT = Path(__file__).parent.parent


def test_every_error_of_a_stream_is_a_stream_error() -> None:
    for kind in (CorruptPartError, FencedError, MalformedError, MissingVersionError, StorageError):
        assert issubclass(kind, StreamError)


def _value(hint: Any) -> Any:
    """Return a value of the type of an argument."""
    if hint in (object, str):
        return "text"
    if hint in (int, float, bool):
        return hint(7)
    if hint in (Exception, BaseException):
        return FollowEndedError(SystemExit("inner"))
    if get_origin(hint) is Literal:
        return get_args(hint)[0]
    arguments = [_value(each) for each in get_args(hint) if each is not type(None)]
    kind = get_origin(hint)
    if kind is abc.Mapping:
        return dict([arguments])
    return tuple(arguments) if kind is tuple else arguments if kind is abc.Iterable else arguments[0]


def _made(kind: type[DeltaTrackerError]) -> DeltaTrackerError:
    """Return an error of a class with a value for each argument."""
    signature, hints = inspect.signature(kind), get_type_hints(kind.__init__)
    values = {name: _value(hints[name]) for name in signature.parameters}
    keywords = {name: values.pop(name) for name, each in signature.parameters.items() if each.kind is each.KEYWORD_ONLY}
    return kind(*values.values(), **keywords)


@pytest.mark.parametrize("error", list(map(_made, ERRORS.values())), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("send", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_errors_can_be_sent_to_another_process(
    error: DeltaTrackerError, send: Callable[[BaseException], BaseException]
) -> None:
    received = send(error)
    assert received is not error
    assert (type(received), str(received), vars(received)) == (type(error), str(error), vars(error))


def test_a_newer_format_is_handled_like_a_malformed_object_with_another_remedy() -> None:
    error = NewerFormatError("log/3", "3", "formats 1 and 2")
    assert isinstance(error, MalformedError)
    assert (error.path, error.found, error.known) == ("log/3", "3", "formats 1 and 2")
    assert str(error).endswith("Upgrade delta_tracker on this host.")
    assert str(MalformedError("log/3", "its kind is 3")).endswith("start a new stream at another url.")


def test_a_message_names_a_class_of_tensors_and_the_shape_of_a_large_tensor() -> None:
    assert "state=<class 'torch.Tensor'> cannot" in str(InvalidArgumentError("state", torch.Tensor, "Convert it"))
    assert "ids=<Tensor [4, 5] of float32> cannot" in str(InvalidArgumentError("ids", torch.ones(4, 5), "Pass ids"))


class _Unsendable(BaseException):
    """An error that pickle and copy cannot build again, because its constructor takes other arguments."""

    def __init__(self, number: int, *, reason: str) -> None:
        super().__init__(f"{number}: {reason}")


class _Local(BaseException):
    """An error that holds an object that pickle refuses."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())


@pytest.mark.parametrize("cause", [_Unsendable(1, reason="x"), _Local()], ids=lambda cause: type(cause).__name__)
def test_an_error_can_be_sent_if_its_cause_cannot(cause: BaseException) -> None:
    error = FollowEndedError(cause)
    received = pickle.loads(pickle.dumps(error))
    assert (type(received), str(received), received.__cause__) == (FollowEndedError, str(error), None)


class _Rows:
    """An object that a traceback may keep alive."""


def _raised(alive: list[weakref.ref[_Rows]]) -> Exception:
    """Return an error whose traceback keeps an object alive, and which has a raised cause."""
    rows = _Rows()
    alive.append(weakref.ref(rows))
    try:
        try:
            raise ValueError("inner")  # noqa: TRY301
        except ValueError as error:
            raise KeyError("outer") from error
    except KeyError as error:
        return error


def _of_itself(error: Exception) -> Exception:
    error.args = (error, [error])
    return error


@pytest.mark.parametrize(
    "held",
    [
        lambda error: ExceptionGroup("several", [ExceptionGroup("two", [error]), OSError("x")]),
        lambda error: RuntimeError("failed", error),
        lambda error: RuntimeError("failed", {"errors": [(error,)]}),
        lambda error: RuntimeError(ValueError(error)),
        _of_itself,
    ],
    ids=["group", "argument", "containers", "nested", "cycle"],
)
def test_an_error_that_is_kept_keeps_no_rows(held: Callable[[Exception], Exception]) -> None:
    alive: list[weakref.ref[_Rows]] = []
    kept = without_traceback(held(_raised(alive)))
    gc.collect()
    assert kept is not None
    assert [reference() for reference in alive] == [None]


_CHECKOUT = "Install it in a checkout of delta_tracker with: pip install '.[redis]'."
_SCRIPT = "[console_scripts]\ndelta-tracker = {}\n"
_OWN = _SCRIPT.format("delta_tracker.cli.main:main")


def _advice(folder: Path, scripts: dict[str, str]) -> str:
    """Return the advice for a missing package, where only some distributions with these scripts are installed."""
    for name, script in scripts.items():
        metadata = folder / f"{name.replace('-', '_')}-0.2.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.2\n")
        (metadata / "top_level.txt").write_text("delta_tracker\n")
        (metadata / "entry_points.txt").write_text(script)
    program = "from delta_tracker.errors import MissingExtraError; print(MissingExtraError('redis', 'redis'))"
    done = subprocess.run(
        [sys.executable, "-S", "-W", "error", "-c", program],  # -S leaves out what is installed here
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (_ROOT, folder)))},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip().removeprefix("the package 'redis' is not installed. ")


@pytest.mark.promise("refused")
def test_a_missing_extra_is_of_the_distribution_that_is_installed(tmp_path: Path) -> None:
    assert _advice(tmp_path, {"renamed-by-a-fork": _OWN}) == "Install it with: pip install 'renamed-by-a-fork[redis]'."


@pytest.mark.parametrize(
    "scripts",
    [
        {},
        {"delta-tracker": ""},  # another project of the package index
        {"delta-tracker": _SCRIPT.format("audit:main")},
        {"delta-tracker": _OWN, "embedding-delta-tracker": _OWN},  # which of them it is is unknown
        {"embedding-delta-tracker": "[console_scripts]\ndelta-tracker\n"},
    ],
)
def test_without_its_own_metadata_no_distribution_is_named(tmp_path: Path, scripts: dict[str, str]) -> None:
    assert _advice(tmp_path, scripts) == _CHECKOUT


def test_an_editable_install_has_the_name_of_the_project() -> None:
    name = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["name"]
    assert MissingExtraError("redis", "redis").command == f"pip install '{name}[redis]'"
    assert MissingExtraError("torch", None).command == "pip install torch"
