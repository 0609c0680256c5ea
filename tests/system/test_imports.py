"""Imports of the package, and use without optional packages, in new processes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from delta_tracker.errors import MissingExtraError
from delta_tracker.stream.storage.storage import Storage
from tests.interpreter import Interpreter, interpreter
from tests.stream.streams import FQN, Writer

_ROOT = Path(__file__).parent.parent.parent

_BLOCKED = """
import sys
blocked = {"prometheus_client", "opentelemetry", "tensorboard", "mlflow", "pynvml"}
sys.modules.update(dict.fromkeys(blocked))  # an import of them raises; torch has imported pynvml
"""


@pytest.fixture(scope="module")
def with_torch() -> Iterator[Interpreter]:
    with interpreter("torch", "torch.distributed.tensor") as each:
        yield each


def test_without_any_optional_package(with_torch: Interpreter, tmp_path: Path) -> None:
    """Sinks without dependencies work; the others name their extra in the error."""
    program = (
        _BLOCKED
        + f"""
from delta_tracker.errors import MissingExtraError
from delta_tracker.monitor import Monitor
from delta_tracker.monitor.nvml import NvmlMetrics
from delta_tracker.monitor.sinks.chrome_trace import ChromeTraceSink
from delta_tracker.monitor.sinks.jsonl import JsonlSink
from delta_tracker.monitor.sinks.logs import LoggingSink
from delta_tracker.monitor.sinks.mlflow import MlflowSink
from delta_tracker.monitor.sinks.opentelemetry import OpenTelemetrySink
from delta_tracker.monitor.sinks.prometheus import PrometheusFileSink, PrometheusSink
from delta_tracker.monitor.sinks.tensorboard import TensorBoardSink
from delta_tracker.monitor.sinks.torch_monitor import TorchMonitorSink

refused = {{
    "prometheus": [lambda: PrometheusSink(0), lambda: PrometheusFileSink("x")],
    "opentelemetry": [OpenTelemetrySink],
    "tensorboard": [lambda: TensorBoardSink("x")],
    "mlflow": [lambda: MlflowSink("x")],
    "nvml": [lambda: NvmlMetrics(Monitor().registry)],
}}
for extra, builds in refused.items():
    for build in builds:
        try:
            build()
        except MissingExtraError as error:
            assert error.extra == extra, (extra, error)
        else:
            raise AssertionError(extra)
import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
assert set(refused) <= set(extras)
monitor = Monitor()
folder = {str(tmp_path)!r}
monitor.start([JsonlSink(folder + "/a"), ChromeTraceSink(folder + "/b"), LoggingSink(), TorchMonitorSink()])
monitor.counter("c").add(1)
monitor.log("e")
assert monitor.flush()
assert monitor.stop()
assert not [t for t in monitor.collect().totals if t.definition.name.endswith("outlet_errors")]
"""
    )
    with_torch.run(program)
    assert '"c"' in (tmp_path / "a").read_text()


def test_importing_the_monitor_imports_only_the_standard_library() -> None:
    """The packages above it are stubs, because the rest of the library needs torch."""
    program = """
import os, sys, threading, types
import logging, random  # they register handlers of their own
registered = []
register = os.register_at_fork
os.register_at_fork = lambda **handlers: (registered.append(handlers), register(**handlers))
root = types.ModuleType("delta_tracker")
root.__path__ = ["delta_tracker"]
sys.modules["delta_tracker"] = root
before = set(sys.modules)
import delta_tracker.monitor
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert new - {"delta_tracker"} <= set(sys.stdlib_module_names), new
assert threading.active_count() == 1
assert not registered
delta_tracker.monitor.counter("c").add(1)
assert len(registered) == 1
assert delta_tracker.monitor.collect().totals[0].figures.total == 1
"""
    subprocess.run([sys.executable, "-S", "-c", program], check=True, timeout=240, cwd=_ROOT)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(Storage(f"file://{tmp_path}", create=True))


def test_a_predictor_needs_neither_torchrec_nor_fbgemm(writer: Writer, with_torch: Interpreter, tmp_path: Path) -> None:
    writer.snapshot()
    program = f"""
import sys
assert not {{"torchrec", "fbgemm_gpu"}} & set(sys.modules)
sys.modules["torchrec"] = sys.modules["fbgemm_gpu"] = None  # an import of them raises
import torch
from delta_tracker import Predictor
model = {{"{FQN}": torch.ones(20, 4)}}
assert Predictor(model, "file://{tmp_path}").sync() == 1
assert not model["{FQN}"].any()
from delta_tracker.predictor.served_model import find_targets
assert set(find_targets(torch.nn.ModuleDict({{"user": torch.nn.Embedding(20, 4)}}))) == {{"user"}}
"""
    with_torch.run(program)


def test_the_first_quickstart_needs_torch_alone(with_torch: Interpreter) -> None:
    (program, *_) = re.findall(r"```python\n(.*?)```", (_ROOT / "README.md").read_text(), flags=re.DOTALL)
    with_torch.run(program, [_ROOT / "tests" / "without_torchrec"])


def test_unsharded_collections_do_not_import_our_fbgemm_modules(with_torch: Interpreter) -> None:
    program = """
import sys
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.embedding_configs import EmbeddingConfig
ec = EmbeddingCollection(tables=[EmbeddingConfig(name="t", num_embeddings=20, embedding_dim=4, feature_names=["t"])])
from delta_tracker.predictor.served_model import find_targets
assert set(find_targets(ec)) == {"embeddings.t"}
assert not [name for name in sys.modules if name.startswith("delta_tracker.sharding.inference_tables")]
"""
    with_torch.run(program)


def test_a_missing_package_is_named_when_a_set_is_built(with_torch: Interpreter) -> None:
    program = """
import sys
assert not {"numba", "triton"} & set(sys.modules)
sys.modules["numba"] = sys.modules["triton"] = None
import torch
import delta_tracker.tracker.row_sets.numba
import delta_tracker.tracker.row_sets.triton
from delta_tracker.errors import MissingExtraError
from delta_tracker.tracker.row_sets.engines import choose_engine
for name, kind in (("numba", "cpu"), ("triton", "cuda")):
    device = torch.device(kind)
    engine = choose_engine(name, device)
    try:
        engine(3, device)
    except MissingExtraError as error:
        assert (error.package, error.extra) == (name, name)
    else:
        raise SystemExit("no error")
cpu = torch.device("cpu")
assert choose_engine(None, cpu)(3, cpu).mark_new(torch.tensor([2])).tolist() == [2]
"""
    assert issubclass(MissingExtraError, ImportError)
    with_torch.run(program)


def test_importing_the_package_imports_nothing_heavy_and_starts_nothing(with_torch: Interpreter) -> None:
    """Public names are imported when they are used."""
    program = """
import sys, threading
import delta_tracker
assert not [name for name in sys.modules if name.startswith("delta_tracker.")]
assert delta_tracker.errors.StorageError and delta_tracker.monitor.MONITOR
from delta_tracker import *
assert Predictor is delta_tracker.Predictor
optional = {"torchrec", "fbgemm_gpu", "numba", "matplotlib", "click", "rich", "pyarrow", "safetensors"}
optional.add("delta_tracker.cli")
heavy = optional & set(sys.modules)
assert not heavy, heavy
assert threading.active_count() == 1
"""
    with_torch.run(program)
