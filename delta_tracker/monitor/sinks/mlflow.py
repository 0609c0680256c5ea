"""Export parameters, metrics and the newest published version to an MLflow run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from delta_tracker.errors import MissingExtraError
from delta_tracker.monitor.batch import Batch, TotalReport, WindowReport
from delta_tracker.monitor.event import Event, Value
from delta_tracker.monitor.library import DEFINITIONS
from delta_tracker.monitor.sinks.sink import Sink
from delta_tracker.monitor.sinks.steps import Steps

START_EVENT = "training.start"
END_EVENT = "training.end"

_MS = 1_000_000
# Limits of one request: https://mlflow.org/docs/latest/rest-api.html#log-batch
_MAX_METRICS, _MAX_PARAMS = 1000, 100


class MlflowSink(Sink):
    """Sink that logs parameters, metrics and tags to one run of an MLflow tracking server.

    The data of the event ``training.start`` is logged as parameters of the run, and the data of ``training.end`` as
    tags. The newest published version is also logged as a tag. The values of each window are logged as metrics at the
    window's step. When the sink is closed, the run ends. Its status is FAILED if ``training.end`` had severity ERROR or
    CRITICAL, and FINISHED otherwise.

    Args:
        experiment: name of the experiment; created if missing.
        run_name: name of the run; None for a name chosen by MLflow.
        parameters: parameters to log immediately.
        tracking_uri: URI of the server; None for MLflow's default.

    Raises:
        MissingExtraError: if neither mlflow nor mlflow-skinny is installed.
    """

    def __init__(
        self,
        experiment: str,
        *,
        run_name: str | None = None,
        parameters: Mapping[str, Value] | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        try:
            from mlflow import MlflowClient, entities  # noqa: PLC0415  optional
        except ModuleNotFoundError as error:
            raise MissingExtraError("mlflow-skinny", "mlflow") from error
        self._entities: Any = entities
        self._client: Any = MlflowClient(tracking_uri)
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self.run_id: str = self._client.create_run(experiment_id, run_name=run_name).info.run_id
        self._status = "FINISHED"
        self._steps = Steps()
        self._log_parameters(parameters or {})

    def deliver(self, batch: Batch) -> None:
        """Log the parameters, metrics and tags of the batch."""
        for event in batch.events:
            self._log_event(event)
        metrics = self._metrics(batch)
        for begin in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[begin : begin + _MAX_METRICS])
        version_name = DEFINITIONS["published_version"].name
        for report in batch.totals:
            if report.definition.name == version_name:
                self._client.set_tag(self.run_id, _key(_series(report)), str(int(report.figures.last)))

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self.run_id, self._status)

    def _metrics(self, batch: Batch) -> list[Any]:
        metrics = []
        for report in batch.windows:
            series = _series(report)
            step = self._steps.of(series, report)
            time_ms = report.window.time_ns // _MS
            metrics += [
                self._entities.Metric(f"{_key(series)}.{name}", value, time_ms, step)
                for name, value in report.values.items()
            ]
        return metrics

    def _log_event(self, event: Event) -> None:
        if event.name == START_EVENT:
            self._log_parameters(event.data)
        elif event.name == END_EVENT:
            for key, value in event.data.items():
                self._client.set_tag(self.run_id, _key(key), str(value))
            if event.severity.name in ("ERROR", "CRITICAL"):
                self._status = "FAILED"

    def _log_parameters(self, parameters: Mapping[str, Value]) -> None:
        made = [self._entities.Param(_key(key), str(value)) for key, value in parameters.items()]
        for begin in range(0, len(made), _MAX_PARAMS):
            self._client.log_batch(self.run_id, params=made[begin : begin + _MAX_PARAMS])


def _series(report: WindowReport | TotalReport) -> str:
    """Return the stat's name followed by one ``<label>_<value>`` per label, joined by dots."""
    return ".".join([report.definition.name, *(f"{key}_{value}" for key, value in report.labels)])


def _key(name: str) -> str:
    """Return ``name`` with underscores in place of the characters that MLflow does not accept."""
    return "".join(each if each.isalnum() or each in "_-. /" else "_" for each in name)
