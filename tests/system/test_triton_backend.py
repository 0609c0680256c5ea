"""The example for Triton's Python backend, run against a stub of ``triton_python_backend_utils``.

The stub has the classes that NVIDIA documents for the backend and that the example uses. Nothing here ran in Triton.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from delta_tracker import Storage
from tests.stream.streams import FQN, Writer

_FOLDER = Path(__file__).parent.parent.parent / "examples" / "triton" / "ranker"


class _Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        assert isinstance(array, np.ndarray)
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class _TritonError(Exception):
    def message(self) -> str:
        return str(self)


class _TritonModelException(Exception):  # noqa: N818  Triton's name
    """Raised by ``initialize`` to report that a model cannot be loaded."""


class _Response:
    def __init__(self, output_tensors: list[_Tensor], error: _TritonError | None = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class _Request(dict[str, np.ndarray]):
    """Inputs of a request, by name."""


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    stub = ModuleType("triton_python_backend_utils")
    stub.Tensor, stub.TritonError, stub.TritonModelException = _Tensor, _TritonError, _TritonModelException  # type: ignore[attr-defined]
    stub.InferenceResponse = _Response  # type: ignore[attr-defined]
    stub.get_input_tensor_by_name = lambda request, name: _Tensor(name, request[name])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub)
    spec = importlib.util.spec_from_file_location("triton_ranker", _FOLDER / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonPythonModel()


def _args(**parameters: str) -> dict[str, str]:
    config = {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    return {"model_config": json.dumps(config), "model_instance_name": "ranker_0_0"}


def test_requests_are_answered_with_the_rows_of_a_version(backend: Any, tmp_path: Path) -> None:
    writer = Writer(Storage(tmp_path.as_uri()), num_rows=1000, dim=16)
    writer.snapshot()
    backend.initialize(_args(url=tmp_path.as_uri(), table=FQN, num_rows="1000", start_seconds="30"))
    wrong, right = backend.execute(
        [_Request(ids=np.array([0, 1000])), _Request(ids=np.array([7, 42, 7], dtype=np.int64))]
    )
    backend.finalize()
    assert "from 0 to 999" in wrong.error.message()
    assert right.error is None
    assert right.tensors["version"].tolist() == [writer.claim.head.version]
    assert torch.equal(torch.from_numpy(right.tensors["rows"]), writer.table[[7, 42, 7]])
    assert backend.predictor.status().poll_seconds is None, "the thread has ended"


def test_a_model_without_a_stream_or_a_parameter_is_not_loaded(backend: Any, tmp_path: Path) -> None:
    with pytest.raises(_TritonModelException, match="parameter 'url' is missing"):
        backend.initialize(_args(table="t"))
    with pytest.raises(_TritonModelException, match="no version of"):
        backend.initialize(_args(url=tmp_path.as_uri(), table="t", num_rows="10", start_seconds="0.1"))


def test_the_configuration_has_the_parameters_and_tensors_of_the_model() -> None:
    config, model = (_FOLDER / "config.pbtxt").read_text(), (_FOLDER / "1" / "model.py").read_text()
    assert set(re.findall(r'key: "(\w+)"', config)) == {"url", "table", "num_rows", "start_seconds"}
    for name in re.findall(r'^    name: "(\w+)"', config, flags=re.MULTILINE):
        assert f'"{name}"' in model
