"""Export of parameters, metrics and the newest published version to an MLflow run."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from delta_tracker.errors import import_optional
from delta_tracker.monitor.collection_report import CollectionReport, TotalReport, WindowReport
from delta_tracker.monitor.event import Value
from delta_tracker.monitor.library import DEFINITIONS
from delta_tracker.monitor.sinks.base_sink import Sink

START_EVENT = "training.start"
END_EVENT = "training.end"

_MS = 1_000_000
# Limits of one request: https://mlflow.org/docs/latest/rest-api.html#log-batch
_MAX_ITEMS = {"metrics": 1000, "params": 100, "tags": 100}
_MAX_KEY_LENGTH = 250

_logger = logging.getLogger(__name__)


class MlflowSink(Sink):
    """Sink that logs parameters, metrics and tags to one run of an MLflow tracking server.

    The data of the event ``training.start`` is logged as parameters, and the data of ``training.end`` as tags. The
    newest published version is also logged as a tag. The values of each window are logged as metrics at the window's
    step. Closing the sink ends the run. The run's status is FAILED if ``training.end`` had severity ERROR or CRITICAL,
    and FINISHED otherwise.

    If MLflow rejects an item, for example a parameter whose value has changed, the other items are still logged. A
    warning is logged once per rejected item. Keys longer than 250 characters are truncated and end with a hash.

    Args:
        experiment: name of the experiment; created if it is missing.
        run_name: name of the run; None for a name chosen by MLflow.
        parameters: parameters to log when the sink is created.
        tracking_uri: URI of the server; None for MLflow's default.

    Raises:
        MissingExtraError: if neither ``mlflow`` nor ``mlflow-skinny`` is installed.
    """

    def __init__(
        self,
        experiment: str,
        *,
        run_name: str | None = None,
        parameters: Mapping[str, Value] | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        mlflow = import_optional("mlflow", "mlflow-skinny", "mlflow")
        self._entities, self._error = mlflow.entities, mlflow.exceptions.MlflowException
        self._refused: set[tuple[str, str]] = set()
        self._client: Any = mlflow.MlflowClient(tracking_uri)
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self.run_id: str = self._client.create_run(experiment_id, run_name=run_name).info.run_id
        self._status = "FINISHED"
        self._log_parameters(parameters or {})

    def deliver(self, collection: CollectionReport) -> None:
        """Log a collection to the run. Raise MlflowException if MLflow cannot be reached or the run was deleted."""
        for event in collection.events:
            if event.name == START_EVENT:
                self._log_parameters(event.data)
            elif event.name == END_EVENT:
                self._log_tags(event.data)
                if event.severity.name in ("ERROR", "CRITICAL"):
                    self._status = "FAILED"
        known = [metric for metric in self._metrics(collection) if ("metrics", metric.key) not in self._refused]
        self._log("metrics", known)
        version_name = DEFINITIONS["published_version"].name
        versions = [report for report in collection.totals if report.definition.name == version_name]
        self._log_tags({_series(report): str(int(report.figures.last)) for report in versions})

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self.run_id, self._status)

    def _metrics(self, collection: CollectionReport) -> list[Any]:
        metrics = []
        for report in collection.windows:
            series = _series(report)
            time_ms = report.window.time_ns // _MS
            metrics += [
                self._entities.Metric(_key(f"{series}.{name}"), value, time_ms, report.window.axis_position)
                for name, value in report.values.items()
            ]
        return metrics

    def _log_parameters(self, parameters: Mapping[str, Value]) -> None:
        made = [self._entities.Param(_key(key), str(value)) for key, value in parameters.items()]
        self._log("params", made)

    def _log_tags(self, tags: Mapping[str, Value]) -> None:
        self._log("tags", [self._entities.RunTag(_key(key), str(value)) for key, value in tags.items()])

    def _log(self, kind: str, items: Sequence[Any]) -> None:
        for begin in range(0, len(items), _MAX_ITEMS[kind]):
            self._log_request(kind, items[begin : begin + _MAX_ITEMS[kind]])

    def _log_request(self, kind: str, items: Sequence[Any]) -> None:
        """Log ``items`` in one request. If MLflow rejects the request, split the items into two requests."""
        if len(items) == 1:
            self._log_single(kind, items[0])
            return
        try:
            self._client.log_batch(self.run_id, **{kind: items})
        except self._error:
            # The code of the error does not tell a refusal: for files, MLflow reports both as internal errors.
            if not self._is_active():
                raise
            self._log_request(kind, items[: len(items) // 2])
            self._log_request(kind, items[len(items) // 2 :])

    def _log_single(self, kind: str, item: Any) -> None:  # noqa: ANN401  an entity of MLflow
        try:
            if kind == "metrics":
                self._client.log_metric(self.run_id, item.key, item.value, item.timestamp, item.step)
            elif kind == "params":
                self._client.log_param(self.run_id, item.key, item.value)
            else:
                self._client.set_tag(self.run_id, item.key, item.value)
        except self._error as error:
            if error.error_code not in {"INVALID_PARAMETER_VALUE", "BAD_REQUEST"} or not self._is_active():
                raise
            if (kind, item.key) not in self._refused:
                self._refused.add((kind, item.key))
                _logger.warning("monitor: MLflow refused an item: %s=%r error=%s", kind, item.key, error)

    def _is_active(self) -> bool:
        """Return False if the run was deleted. MLflow rejects all items of a deleted run."""
        return str(self._client.get_run(self.run_id).info.lifecycle_stage) == "active"


def _series(report: WindowReport | TotalReport) -> str:
    """Return the stat's name and ``<label>_<value>`` for each label, joined by dots."""
    return ".".join([report.definition.name, *(f"{key}_{value}" for key, value in report.labels)])


def _key(name: str) -> str:
    """Convert ``name`` to a key of MLflow: replace invalid characters by ``_`` and the end of a long name by a hash."""
    key = "".join(each if each.isalnum() or each in "_-. /" else "_" for each in name)
    if len(key) <= _MAX_KEY_LENGTH:
        return key
    ending = f"-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
    return key[: _MAX_KEY_LENGTH - len(ending)] + ending
