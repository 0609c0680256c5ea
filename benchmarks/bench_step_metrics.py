"""Cost of metrics in a training step: ``python -m benchmarks.bench_step_metrics``.

A small vision model is trained with mean loss, accuracy, precision, recall and F1 over all classes, once with
torchmetrics as in its documentation, and once with the monitor's device metrics. The benchmark counts the device syncs
of the metrics per step, on a GPU with ``torch.cuda.set_sync_debug_mode``, otherwise on a simulated device
(:mod:`tests.syncs`). Both must return the same values. On a GPU the steps are timed, too.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn

from delta_tracker.monitor import Monitor
from delta_tracker.monitor.device.classification import FIGURES, DeviceClassification
from delta_tracker.monitor.device.metrics import DeviceMean
from tests.syncs import SIMULATED, find_syncs, held, on_device

Update = Callable[[Tensor, Tensor, Tensor], None]
"""Takes loss ``[]``, scores ``[B, C]`` and targets ``[B]``."""

_TOLERANCE = 1e-5


def vision_model(num_classes: int) -> nn.Module:
    """Return a model of three convolutions and a linear layer for 32 x 32 images."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


def naive(num_classes: int, device: torch.device) -> tuple[Update, Callable[[], dict[str, float]]]:
    """Return the update of a step and the final figures, with the defaults of torchmetrics."""
    kinds = ("Accuracy", "Precision", "Recall", "F1Score")
    made = [getattr(torchmetrics, kind)(task="multiclass", num_classes=num_classes, average="macro") for kind in kinds]
    metrics: list[Any] = [torchmetrics.MeanMetric().to(device), *(metric.to(device) for metric in made)]

    def update(loss: Tensor, scores: Tensor, targets: Tensor) -> None:
        metrics[0].update(loss)
        for metric in metrics[1:]:
            metric.update(scores, targets)

    def figures() -> dict[str, float]:
        return {name: float(held(metric.compute())) for name, metric in zip(("loss", *FIGURES), metrics, strict=True)}

    return update, figures


def monitored(num_classes: int) -> tuple[Update, Callable[[], dict[str, float]]]:
    """Return the update of a step and the final figures, with the monitor's device metrics."""
    monitor = Monitor()
    mean = DeviceMean("loss", monitor=monitor)
    classes = DeviceClassification("classes", num_classes, monitor=monitor)

    def update(loss: Tensor, scores: Tensor, targets: Tensor) -> None:
        mean.update(loss)
        classes.update(scores, targets)

    def figures() -> dict[str, float]:
        reports = {each.definition.name: each.values for each in monitor._collector.collect(is_last=True).windows}  # noqa: SLF001
        return {"loss": reports["loss"]["mean"], **classes.figures()}

    return update, figures


@contextmanager
def counted(device: torch.device) -> Iterator[Sequence[object]]:
    """Collect the device syncs of the body."""
    if device.type != "cuda":
        with find_syncs() as found:
            yield found
        return
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")


def train(device: torch.device, num_classes: int, num_steps: int, update: Update | None) -> tuple[float, float]:
    """Train and record with ``update``. Return syncs of the metrics per step, and seconds per step."""
    torch.manual_seed(0)
    where = device if device.type == "cuda" else torch.device("cpu")
    model = vision_model(num_classes).to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_syncs, begin = 0, time.perf_counter()
    for step in range(num_steps):
        if step == 1:
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()  # the first step warms up
        pictures = torch.randn(32, 3, 32, 32, device=where)
        scores = model(pictures)
        # A third of the targets agree with the model, so that the metrics differ from those of random targets.
        targets = torch.where(
            torch.rand(32, device=where) < 1 / 3,
            scores.detach().argmax(dim=1),
            torch.randint(0, num_classes, (32,), device=where),
        )
        loss = nn.functional.cross_entropy(scores, targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if update is not None:
            shown = (loss, scores, targets)
            claim = shown if device.type == "cuda" else tuple(on_device(each) for each in shown)
            with counted(device) as found:
                update(claim[0].detach(), claim[1].detach(), claim[2])
            num_syncs += len(found)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return num_syncs / num_steps, (time.perf_counter() - begin) / max(num_steps - 1, 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args(argv)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else SIMULATED
    with find_syncs():  # enables the simulated device
        theirs = naive(chosen.classes, device)
    ours = monitored(chosen.classes)
    without = train(device, chosen.classes, chosen.steps, None)
    rows = {"no metrics": without}
    rows["torchmetrics"] = train(device, chosen.classes, chosen.steps, theirs[0])
    rows["monitor"] = train(device, chosen.classes, chosen.steps, ours[0])
    with find_syncs():
        expected = theirs[1]()
    found = ours[1]()
    for name, value in expected.items():
        assert abs(found[name] - value) <= _TOLERANCE * max(1.0, abs(value)), (name, found[name], value)
    where = torch.cuda.get_device_name(0) if device.type == "cuda" else "simulated device: no times"
    print(f"{chosen.classes} classes, {chosen.steps} steps, {where}\n")  # noqa: T201
    print("| metrics | syncs per step | ms per step |\n|---|---|---|")  # noqa: T201
    for name, (num_syncs, seconds) in rows.items():
        shown = f"{seconds * 1e3:.2f}" if device.type == "cuda" else "-"
        print(f"| {name} | {num_syncs:.1f} | {shown} |")  # noqa: T201
    print("\nthe same at the end: " + ", ".join(f"{name} {value:.6f}" for name, value in found.items()))  # noqa: T201
    assert rows["monitor"][0] == 0, "the monitor waited for the device"
    return 0


if __name__ == "__main__":
    sys.exit(main())
