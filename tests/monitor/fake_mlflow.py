"""Client of MLflow that keeps one run in memory and refuses what MLflow refuses."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

_MAX_KEY, _MAX_PARAM, _MAX_METRICS = 250, 6000, 1000


class MlflowException(Exception):  # noqa: N818  MLflow's name
    """Error with one of MLflow's codes."""

    def __init__(self, message: str, error_code: str) -> None:
        super().__init__(message)
        self.error_code = error_code


@dataclass(frozen=True)
class Metric:
    key: str
    value: float
    timestamp: int
    step: int


@dataclass(frozen=True)
class Param:
    key: str
    value: str


class MlflowClient:
    """Client of the only run. A refused batch is refused whole, as on a server with a database."""

    runs: SimpleNamespace
    history: dict[str, list[Metric]]
    num_requests = 0
    is_reachable = True
    refused_key = ""
    """Key that is refused although it follows all rules."""

    def __init__(self, tracking_uri: str | None = None) -> None:
        del tracking_uri

    def get_experiment_by_name(self, name: str) -> None:
        del name

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment_id: str, run_name: str | None) -> SimpleNamespace:
        del run_name
        info = SimpleNamespace(run_id=f"run of {experiment_id}", status="RUNNING", lifecycle_stage="active")
        type(self).runs = SimpleNamespace(info=info, data=SimpleNamespace(params={}, tags={}))
        type(self).history = defaultdict(list)
        type(self).num_requests, type(self).is_reachable, type(self).refused_key = 0, True, ""
        return self.runs

    def get_run(self, run_id: str) -> SimpleNamespace:
        assert run_id == self.runs.info.run_id
        type(self).num_requests += 1
        if not self.is_reachable:
            raise MlflowException("no answer", "INTERNAL_ERROR")
        return self.runs

    def log_batch(
        self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = (), tags: Sequence[Param] = ()
    ) -> None:
        run = self.get_run(run_id)
        is_refused = run.info.lifecycle_stage != "active" or len(metrics) > _MAX_METRICS
        is_refused |= any(self._is_bad(each.key) for each in [*metrics, *params, *tags])
        is_refused |= any(
            len(each.value) > _MAX_PARAM or run.data.params.get(each.key, each.value) != each.value for each in params
        )
        if is_refused:  # MLflow's store of files reports refused batches as internal errors
            is_single = len(metrics) + len(params) + len(tags) == 1
            raise MlflowException("refused", "INVALID_PARAMETER_VALUE" if is_single else "INTERNAL_ERROR")
        for metric in metrics:
            self.history[metric.key].append(metric)
        run.data.params.update({each.key: each.value for each in params})
        run.data.tags.update({each.key: each.value for each in tags})

    def log_metric(self, run_id: str, key: str, value: float, timestamp: int, step: int) -> None:
        self.log_batch(run_id, metrics=[Metric(key, value, timestamp, step)])

    def log_param(self, run_id: str, key: str, value: str) -> None:
        self.log_batch(run_id, params=[Param(key, value)])

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.log_batch(run_id, tags=[Param(key, value)])

    def _is_bad(self, key: str) -> bool:
        return key == self.refused_key or len(key) > _MAX_KEY or key != posixpath.normpath(key)

    def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
        assert run_id == self.runs.info.run_id
        return self.history[key]

    def set_terminated(self, run_id: str, status: str) -> None:
        self.get_run(run_id).info.status = status


def modules() -> dict[str, ModuleType]:
    """Return the modules to put into ``sys.modules``."""
    mlflow, exceptions = ModuleType("mlflow"), ModuleType("mlflow.exceptions")
    entities = SimpleNamespace(Metric=Metric, Param=Param, RunTag=Param)
    mlflow.__dict__.update(MlflowClient=MlflowClient, entities=entities, exceptions=exceptions)
    exceptions.__dict__.update(MlflowException=MlflowException)
    return {"mlflow": mlflow, "mlflow.exceptions": exceptions}
