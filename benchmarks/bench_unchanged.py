"""Bytes that a publisher saves if it leaves out unchanged rows: ``python -m benchmarks.bench_unchanged``.

The model of the demo is trained on MovieLens-100K in time order, and on ratings whose ids are Zipf-distributed. For
each encoding, two publishers follow the same training: one sends all changed rows, the other leaves out those whose
stored bytes did not change. Their predictors are compared bit for bit after each version.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.harness import Report, Sample, parser
from benchmarks.workloads import one_rank, zipf_ids
from delta_tracker import Encoding, ModelDeltaTracker, Predictor, Publisher, Storage
from delta_tracker.publisher.stored_rows import StoredRows, UnchangedChoice
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import encode_rows
from delta_tracker.stream.format.manifest import Block
from delta_tracker.types import TableSpec
from examples.movielens.data import Ratings, load_ratings
from examples.movielens.settings import Settings
from examples.movielens.trainer import sharded_model

_ENCODINGS = (Encoding.F32, Encoding.F16, Encoding.BF16, Encoding.INT8, Encoding.INT4)
_INTERVALS = (1, 4, 32)
_DIM = 64


class _Stream:
    """A publisher with its predictor."""

    def __init__(self, tracker: ModelDeltaTracker, name: str, encoding: Encoding, choice: UnchangedChoice) -> None:
        storage = Storage("memory://")
        self.publisher = Publisher(tracker, storage, name, encoding=encoding, skip_unchanged=choice)
        self.publisher.snapshot()
        self.held = {fqn: torch.zeros(each.num_rows, each.dim) for fqn, each in tracker.tables.items()}
        self._predictor = Predictor(self.held, storage)
        self._predictor.sync()
        self.num_rows = self.num_bytes = 0

    def publish(self) -> None:
        manifest = self.publisher.publish()
        self._predictor.sync()
        self.num_rows += manifest.num_rows
        self.num_bytes += manifest.num_bytes + len(manifest.to_json())


def _ratings(num_ratings: int, num_rows: int) -> Ratings:
    """Return ratings of Zipf-distributed users and movies. A random factor model draws the labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([zipf_ids(num_rows, num_ratings, generator) for _ in range(2)])
    factors = torch.randn(2, num_rows, 8, generator=generator)
    chances = (factors[0][ids[0]] * factors[1][ids[1]]).sum(1).sigmoid()
    labels = (torch.rand(num_ratings, generator=generator) < chances).float()
    return Ratings({"user": num_rows, "movie": num_rows}, ids, labels)


def _run(ratings: Ratings, settings: Settings) -> dict[Encoding, dict[str, Sample]]:
    """Train once, and return bytes and rows of both publishers of each encoding."""
    torch.manual_seed(0)
    model = sharded_model(ratings, settings)
    names = {(encoding, choice): f"{encoding} {choice}" for encoding in _ENCODINGS for choice in (None, "digest")}
    with ModelDeltaTracker(model, ["none", *names.values()]) as tracker:
        streams: dict[Encoding, tuple[_Stream, _Stream]] = {}
        for batch in range(settings.num_batches):
            since = batch - settings.warmup_batches
            if since == 0:
                streams = {
                    each: (
                        _Stream(tracker, names[each, None], each, None),
                        _Stream(tracker, names[each, "digest"], each, "digest"),
                    )
                    for each in _ENCODINGS
                }
            mine = slice(batch * settings.batch, (batch + 1) * settings.batch)
            logits = model(model.module.jagged(ratings.ids[:, mine]))
            loss = nn.functional.binary_cross_entropy_with_logits(logits, ratings.labels[mine])
            loss.backward()  # type: ignore[no-untyped-call]  # the fused optimizer updates the rows here
            tracker.step()
            if since >= 0 and since % settings.every == 0:
                for every, skips in streams.values():
                    every.publish()
                    skips.publish()
                    for fqn, rows in every.held.items():
                        assert torch.equal(rows.view(torch.int32), skips.held[fqn].view(torch.int32)), fqn
        found = {}
        for encoding, (every, skips) in streams.items():
            every.publisher.close()
            skips.publisher.close()
            figures = {
                "rows": every.num_rows,
                "rows sent": skips.num_rows,
                "bytes": every.num_bytes,
                "bytes sent": skips.num_bytes,
                "record bytes": skips.publisher.stored_bytes,
            }
            found[encoding] = {name: Sample((float(value),)) for name, value in figures.items()}
        return found


def _time(num_rows: int, encoding: Encoding, choice: UnchangedChoice, repeats: int) -> dict[str, Sample]:
    """Measure the worker's time for the rows of a delta, none or all of which are unchanged, in nanoseconds per row."""
    table = TableSpec("t", num_rows, _DIM, torch.float32)
    values = torch.rand(num_rows, _DIM, generator=torch.Generator().manual_seed(0))
    block = Block("t", (0, num_rows), (0, _DIM), num_rows, "list", encoding)
    ids = torch.arange(num_rows)

    def rows(held: Tensor) -> BlockRows:
        return BlockRows(block, ids, lambda begin, end: encode_rows(held[begin:end], encoding))

    stored = StoredRows(choice)
    found: dict[str, list[float]] = {"encode": [], "changed": [], "unchanged": []}
    for _ in range(-1, repeats):
        values += 0.5
        begin = time.perf_counter()
        for _chunk in rows(values).chunks():
            pass
        found["encode"].append(time.perf_counter() - begin)
        for name, expected in (("changed", 1), ("unchanged", 0)):
            begin = time.perf_counter()
            kept = stored.delta_rows([rows(values)], tables={"t": table}, layout=0)
            found[name].append(time.perf_counter() - begin)
            assert len(kept) == expected
            stored.commit()
    return {name: Sample(tuple(value / num_rows * 1e9 for value in values[1:])) for name, values in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, check the predictors, and write the results."""
    arguments = parser("bench_unchanged", __doc__ or "")
    options = arguments.parse_args(argv)
    torch.set_num_threads(1)
    movielens = Settings(out=Path(), ratings=1024 if options.tiny else 100_000)
    zipf_rows = 500 if options.tiny else 100_000
    num_rows, repeats = (2000, 2) if options.tiny else (500_000, options.repeats or 5)
    report = Report(
        name="bench_unchanged",
        settings={
            "ratings": movielens.ratings,
            "ratings of a batch": movielens.batch,
            "columns": movielens.dim,
            "Zipf rows of a table": zipf_rows,
            "timed rows": f"{num_rows} x {_DIM}",
            "repeats": repeats,
        },
        columns=("data, batches of a version, encoding", "changed rows", "sent, %", "MB", "sent, MB", "saved, %"),
    )
    with one_rank():
        for data, ratings in (
            ("MovieLens", load_ratings(movielens.ratings)),
            ("Zipf", _ratings(movielens.ratings, zipf_rows)),
        ):
            for every in _INTERVALS[:1] if options.tiny else _INTERVALS:
                for encoding, found in _run(ratings, replace(movielens, every=every)).items():
                    name = f"{data}, {every}, {encoding}"
                    report.add(name, found)
                    report.lines.append((name, *_cells({key: sample.median for key, sample in found.items()})))
    report.notes += _notes(report, num_rows, repeats)
    report.finish(options.out)
    return 0


def _cells(found: dict[str, float]) -> list[str]:
    return [
        f"{found['rows']:.0f}",
        f"{100 * found['rows sent'] / found['rows']:.1f}",
        f"{found['bytes'] / 1e6:.2f}",
        f"{found['bytes sent'] / 1e6:.2f}",
        f"{100 - 100 * found['bytes sent'] / found['bytes']:.1f}",
    ]


def _notes(report: Report, num_rows: int, repeats: int) -> list[str]:
    """Measure the time for a row, and return the notes."""
    notes = [
        (
            "All versions after the first snapshot, with headers, ids and entries. Both predictors of an encoding were"
            " equal bit for bit after each version. Row-wise Adagrad; the first fifth of the batches is trained before."
        )
    ]
    for encoding in (Encoding.F32, Encoding.INT8):
        for choice in ("bytes", "digest"):
            found = _time(num_rows, encoding, choice, repeats)
            report.add(f"time, {encoding}, {choice}", found)
            notes.append(
                f"{encoding}, {choice}: {found['changed'].text(1, 0)} ns for a row that changed and"
                f" {found['unchanged'].text(1, 0)} ns for one that did not, in the background thread. Encoding the rows"
                f" alone takes {found['encode'].text(1, 0)} ns of it."
            )
    return notes


if __name__ == "__main__":
    raise SystemExit(main())
