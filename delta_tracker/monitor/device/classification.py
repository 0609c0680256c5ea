"""Accuracy, precision, recall and F1 of a classifier, computed from counts that accumulate on the device.

Notation: ``B`` is the number of predictions in one call, ``C`` the number of classes.
"""

from typing import Literal

import torch
from torch import Tensor

from delta_tracker.arguments import check_count
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.device.device_state import DeviceState, EpochEnd, sum_dtype
from delta_tracker.monitor.device.metrics import reader_of
from delta_tracker.monitor.monitor import MONITOR, Monitor

Average = Literal["macro", "micro"]
FIGURES = ("accuracy", "precision", "recall", "f1")


class DeviceClassification(DeviceState):
    """Accuracy, precision, recall and F1 of single-label classification in the current epoch, counted on the device.

    Each collection records the gauges ``<name>.accuracy``, ``<name>.precision``, ``<name>.recall`` and ``<name>.f1``.
    Their values equal those of the multiclass metrics of torchmetrics. With ``average="macro"``, they are means over
    the classes that occur in predictions or targets, and the accuracy equals the recall. With ``"micro"``, each gauge
    is the fraction of correct predictions. The counter ``<name>.rejected`` counts the predictions that were rejected
    because the predicted class index or the target is invalid.

    Args:
        name: prefix of the names of the gauges and the counter; dots separate namespaces.
        num_classes: number of classes ``C``, at least 2.
        average: ``"macro"`` to average over classes, ``"micro"`` to average over predictions.
        monitor: monitor that records the gauges and the counter.

    Raises:
        InvalidArgumentError: for fewer than 2 classes or an unknown average.
    """

    def __init__(self, name: str, num_classes: int, *, average: Average = "macro", monitor: Monitor = MONITOR) -> None:
        check_count("num_classes", num_classes, least=2)
        if average not in ("macro", "micro"):
            raise InvalidArgumentError("average", average, "Pass 'macro' or 'micro'")
        self._average = average
        self._num_classes = num_classes
        self._gauges = {each: monitor.gauge(f"{name}.{each}", f"{each.capitalize()}, {average}.") for each in FIGURES}
        for gauge in self._gauges.values():
            gauge.cell().is_remote = True
        self._rejected = monitor.counter(f"{name}.rejected", "Predictions rejected because of an invalid class.")
        self._sums = [0.0] * (3 * num_classes + 2)
        self.num_sums = len(self._sums)
        super().__init__(reader_of(monitor))

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Count pairs of predictions and targets. Pairs with an invalid class index are rejected.

        Args:
            predictions: ``[B]`` class indices, or ``[B, C]`` scores, whose maximum selects the predicted class.
            targets: ``[B]`` class indices.

        Raises:
            InvalidArgumentError: if a tensor does not have one of these shapes.
        """
        if predictions.dim() == 2:  # noqa: PLR2004
            predictions = predictions.detach().argmax(dim=1)
        if predictions.shape != targets.shape or targets.dim() != 1:
            shapes = (tuple(predictions.shape), tuple(targets.shape))
            raise InvalidArgumentError("targets", shapes, "Pass [B] or [B, C] predictions and [B] targets")
        size = self._num_classes
        wrong, rejected = 3 * size, 3 * size + 1  # the latter counts each rejected pair three times
        is_class = (predictions >= 0) & (predictions < size) & (targets >= 0) & (targets < size)
        right = torch.where(predictions == targets, predictions, wrong)
        indices = torch.stack((right, predictions + size, targets + 2 * size))
        indices = torch.where(is_class, indices, rejected).reshape(-1)
        self._add(indices.device, torch.ones_like(indices, dtype=sum_dtype(indices.device)), indices)

    def record_growth(self, growth: list[float], epoch_end: EpochEnd | None) -> None:
        """Add ``growth`` to the counts and set the gauges. If ``epoch_end`` is not None, then reset the counts."""
        self._sums = [old + new for old, new in zip(self._sums, growth, strict=True)]
        if growth[-1]:
            self._rejected.add(round(growth[-1]) // 3)
        for name, value in self.figures().items():
            self._gauges[name].set(value)
        if epoch_end is not None:
            self._sums = [0.0] * len(self._sums)
            for gauge in self._gauges.values():
                gauge.cell().end_epoch(epoch_end)

    def figures(self) -> dict[str, float]:
        """Return accuracy, precision, recall and F1 of the current epoch by name; an empty dict without predictions."""
        size = self._num_classes
        right, predicted, actual = (self._sums[index * size : (index + 1) * size] for index in range(3))
        num_seen = sum(actual)
        if not num_seen:
            return {}
        if self._average == "micro":
            return dict.fromkeys(FIGURES, sum(right) / num_seen)
        rows = [each for each in zip(right, predicted, actual, strict=True) if each[1] + each[2]]
        precision = sum(hit / said if said else 0.0 for hit, said, _ in rows) / len(rows)
        recall = sum(hit / there if there else 0.0 for hit, _, there in rows) / len(rows)
        f1 = sum(2 * hit / (said + there) for hit, said, there in rows) / len(rows)
        return {"accuracy": recall, "precision": precision, "recall": recall, "f1": f1}

    def after_fork(self) -> None:
        """Reset all counts to 0. Called in a forked child."""
        super().after_fork()
        self._sums = [0.0] * len(self._sums)
