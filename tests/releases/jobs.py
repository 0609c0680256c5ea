"""Trainers, standbys and readers whose rows follow a formula, for any release: ``python tests/releases/jobs.py``.

As a program it reads a call from each line of its input, a JSON array of the name and the arguments of a method of
:class:`Jobs`, and answers each with a line: an array of the result, the type of the error and its message. It imports
nothing of the tests, so that the library may be another release.
"""

from __future__ import annotations

import inspect
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import delta_tracker
from delta_tracker import (
    DataPosition,
    ModelDeltaTracker,
    Predictor,
    Publisher,
    Recovery,
    Rollout,
    Standby,
    errors,
    restore,
)
from delta_tracker.cli.commands import commands
from delta_tracker.integrations.dcp import SavedTracker
from delta_tracker.sinks.lmdb import LmdbSink
from delta_tracker.sinks.lmdb_rows import LmdbRows

LARGE = (6000, 64)
"""Rows and columns of ``user``: a part with all rows has 1.5 MiB."""
SMALL = (60, 8)
ITEMS, ITEM_COLUMNS = 40, 4
_RATE = 0.25  # steps are multiples of a quarter, which float32 adds exactly


def initial(num_rows: int, num_columns: int) -> Tensor:
    """Return the rows of a table before the first batch."""
    return ((torch.arange(num_rows * num_columns) * 7) % 129 - 64).view(num_rows, num_columns) / 8


def ids_of(batch: int, num_rows: int) -> Tensor:
    """Return the ids that a batch looks up, some of them twice."""
    return (torch.arange(12) * (batch % 5 + 3) + batch * 11) % min(num_rows, 53)


def expected(size: tuple[int, int], num_batches: int) -> dict[str, Tensor]:
    """Return the tables and the dense tensor after some batches, computed without a model."""
    tables = {"user.weight": initial(*size), "item.weight": initial(ITEMS, ITEM_COLUMNS)}
    for batch in range(num_batches):
        for table in tables.values():
            lookups = torch.bincount(ids_of(batch, len(table)), minlength=len(table))
            table.sub_(_RATE * (batch % 3 + 1) * lookups[:, None])
    steps = sum(batch % 3 + 1 for batch in range(num_batches))
    return {**tables, "bias": torch.arange(8.0) - _RATE * steps}


class Model(nn.Module):
    """Two tables and a dense tensor, as after some batches."""

    def __init__(self, size: tuple[int, int], num_batches: int | None = 0) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(*size, mode="sum", sparse=True)
        self.item = nn.EmbeddingBag(ITEMS, ITEM_COLUMNS, mode="sum", sparse=True)
        self.bias = nn.Parameter(torch.zeros(8))
        for parameter in self.parameters():
            nn.init.constant_(parameter, torch.nan)
        if num_batches is not None:
            self.load_state_dict(expected(size, num_batches))

    def forward(self, batch: int) -> Tensor:
        tables = (each(ids_of(batch, each.num_embeddings)[None]).sum() for each in (self.user, self.item))
        return (sum(tables) + self.bias.sum()) * (batch % 3 + 1)


class _Batches:
    """Endless numbers of batches."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def __iter__(self) -> Iterator[int]:
        while True:
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]


class Trainer:
    """A model in training, whose batches continue after a restore."""

    def __init__(self, size: tuple[int, int], *, is_recoverable: bool) -> None:
        self.model = Model(size)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_RATE)
        self.tracker = ModelDeltaTracker(self.model)
        self.data = DataPosition(_Batches())
        self.recovery = Recovery(training_state={"optimizer": self.optimizer}, heartbeat_seconds=0.1)
        self.is_recoverable = is_recoverable
        self.publisher: Publisher | None = None

    def publish_to(self, url: Any) -> None:
        """Build the publisher."""
        recovery = self.recovery if self.is_recoverable else None
        self.publisher = Publisher(self.tracker, url, dense=True, recovery=recovery)

    def train(self, num_batches: int) -> None:
        """Train, and publish after each batch."""
        assert self.publisher is not None
        for _, batch in zip(range(num_batches), self.data, strict=False):
            self.train_on(batch)
            self.publisher.publish()

    def train_on(self, batch: int) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        self.model(batch).backward()
        self.optimizer.step()
        self.tracker.step()


class _Tables(nn.Module):
    """Tables by their sizes, and a dense layer."""

    def __init__(self, sizes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.sizes = {name: (num_rows, width) for name, (num_rows, width) in sizes.items()}
        for name, size in self.sizes.items():
            self.add_module(name, nn.EmbeddingBag(*size, mode="sum", sparse=True))
        self.over = nn.Linear(sum(width for _, width in self.sizes.values()), 1)

    def forward(self, source: torch.Generator) -> Tensor:
        """Look two samples of random ids up."""
        ids = {name: torch.randint(size[0], (2, 2), generator=source) for name, size in self.sizes.items()}
        return self.over(torch.cat([self.get_submodule(name)(each) for name, each in ids.items()], 1))


class TablesTrainer:
    """Trainer of tables of any size, whose batches are random."""

    def __init__(self, url: str, sizes: Mapping[str, Sequence[int]], *, is_recoverable: bool) -> None:
        self.model = _Tables(sizes)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.tracker = ModelDeltaTracker(self.model)
        recovery = Recovery(training_state={"optimizer": self.optimizer}, heartbeat_seconds=None)
        self.publisher = Publisher(self.tracker, url, dense=True, recovery=recovery if is_recoverable else None)

    def publish(self, seed: int) -> dict[str, Any]:
        """Train a batch and publish; return the bits of the tensors and of the states of the optimizer."""
        self.optimizer.zero_grad()
        self.model(torch.Generator().manual_seed(seed)).sum().backward()
        self.optimizer.step()
        self.tracker.step()
        self.publisher.publish()
        names = [name for name, _ in self.model.named_parameters()]
        states = self.optimizer.state_dict()["state"].items()
        found = {f"{names[number]} {kind}": each for number, held in states for kind, each in held.items()}
        return {"tensors": bits(dict(self.model.named_parameters())), "states": bits(found)}


class Jobs:
    """Jobs of one process. Each method has a result that JSON can hold."""

    def __init__(self) -> None:
        self._trainers: dict[str, Trainer] = {}
        self._standbys: dict[str, tuple[Standby, Trainer]] = {}
        self._followers: dict[str, Predictor] = {}

    # Trainers

    def start(self, url: str, size: tuple[int, int], *, is_recoverable: bool = False) -> int:
        """Start a trainer, and publish a snapshot; return its version."""
        trainer = self._trainers[url] = Trainer(tuple(size), is_recoverable=is_recoverable)
        trainer.tracker.attach_data(trainer.data)
        trainer.publish_to(url)
        return trainer.publisher.snapshot().version

    def train(self, url: str, num_batches: int) -> int:
        """Train and publish; return the version."""
        self._trainers[url].train(num_batches)
        return self._trainers[url].publisher.version

    def snapshot(self, url: str) -> int:
        """Publish a snapshot; return its version."""
        return self._trainers[url].publisher.snapshot().version

    def close(self, url: str) -> None:
        """End a trainer."""
        trainer = self._trainers.pop(url)
        trainer.publisher.close()
        trainer.tracker.detach()

    def restore(self, url: str, size: tuple[int, int]) -> list[int]:
        """Restore a job and start to publish; return the number of wrong values and of batches."""
        trainer = self._trainers[url] = Trainer(tuple(size), is_recoverable=True)
        restore(trainer.model, url, tracker=trainer.tracker, recovery=trainer.recovery, data=trainer.data)
        trainer.publish_to(url)
        return self._state(trainer, size)

    def _state(self, trainer: Trainer, size: tuple[int, int]) -> list[int]:
        num_batches = trainer.tracker.num_batches
        return [num_wrong(trainer.model.state_dict(), tuple(size), num_batches), num_batches]

    def save(self, url: str, path: str) -> None:
        """Train one batch without publishing it, save a checkpoint, and end the trainer.

        ``tracker.safetensors`` in it has the tracker's state once more, without DCP.
        """
        trainer = self._trainers[url]
        trainer.train_on(next(iter(trainer.data)))
        dcp.save({"model": trainer.model.state_dict(), "tracker": trainer.tracker}, checkpoint_id=path, no_dist=True)
        save_file(trainer.tracker.state_dict(), f"{path}/tracker.safetensors")
        self.close(url)

    def load(self, path: str, size: tuple[int, int], *, url: str | None = None) -> list[Any]:
        """Load a checkpoint and publish; return the number of wrong values and of batches, and the kind of the version.

        Without a url, load only the state of the tracker; return the number of tables with wrong pending rows, and of
        batches.
        """
        trainer = Trainer(tuple(size), is_recoverable=False)
        tracker, weights = trainer.tracker, trainer.model.state_dict()
        if url is None:
            tracker.load_state_dict(load_file(f"{path}/tracker.safetensors"))
        else:
            dcp.load({"model": weights, "tracker": SavedTracker(tracker, path)}, checkpoint_id=path, no_dist=True)
        num_batches = tracker.num_batches
        pending = {name: ids_of(num_batches - 1, spec.num_rows).unique() for name, spec in tracker.tables.items()}
        if url is None:
            found = tracker.get_delta_ids()
            tracker.detach()
            return [sum(not torch.equal(found[name], ids) for name, ids in pending.items()), num_batches]
        wrong = num_wrong(weights, tuple(size), num_batches)
        assert tracker.num_pending() == {name: len(ids) for name, ids in pending.items()}
        trainer.data = DataPosition(_Batches(num_batches))
        tracker.attach_data(trainer.data)
        trainer.publish_to(url)
        self._trainers[url] = trainer
        kind = trainer.publisher.publish().kind
        return [wrong, num_batches, kind]

    def publish_tables(
        self, url: str, sizes: Mapping[str, Sequence[int]], seeds: Sequence[int], *, is_recoverable: bool
    ) -> list[dict[str, Any]]:
        """Publish a version after each batch of a new trainer; return what the trainer had at each."""
        trainer = TablesTrainer(url, sizes, is_recoverable=is_recoverable)
        found = [trainer.publish(seed) for seed in seeds]
        trainer.publisher.close()
        trainer.tracker.detach()
        return found

    # Standbys

    def stand_by(self, url: str, size: tuple[int, int]) -> int | None:
        """Follow a trainer once; return the version of the standby."""
        if url not in self._standbys:
            trainer = Trainer(tuple(size), is_recoverable=True)
            standby = Standby(
                trainer.model, url, tracker=trainer.tracker, recovery=trainer.recovery, data=trainer.data, name="spare"
            )
            self._standbys[url] = standby, trainer
        return self._standbys[url][0].sync()

    def take_over(self, url: str, size: tuple[int, int]) -> list[int]:
        """Replace the trainer once it is silent; return the number of wrong values and of batches."""
        standby, trainer = self._standbys.pop(url)
        taken = standby.follow(silence=0.5)
        standby.close()
        trainer.publish_to(taken.recovery)
        self._trainers[url] = trainer
        return self._state(trainer, size)

    # Readers

    def read(
        self,
        url: str,
        size: tuple[int, int],
        state: Mapping[str, Any] | None = None,
        held: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Read a stream once, from a saved position of tables as after ``held`` batches if there is one."""
        follows_pins = options.pop("follows_pins", False)
        model = Model(tuple(size), held)
        predictor = Predictor(model, url, rollout=Rollout(follows_pins=follows_pins), **options)
        if state is not None:
            predictor.load_state_dict(state)
        version = predictor.sync()
        return {"version": version, "resyncs": predictor.status().resyncs, "state": predictor.state_dict()} | _served(
            predictor, model, tuple(size)
        )

    def serve(self, url: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Read a stream once into tensors of these shapes; return its id, the version, and the bits of each tensor."""
        target = {name: torch.zeros(*shape) for name, shape in shapes.items()}
        predictor = Predictor(target, url)
        version = predictor.sync()
        return {"stream": predictor.status().stream, "version": version, "tensors": bits(target)}

    def follow(self, url: str, size: tuple[int, int], name: str) -> int:
        """Follow a stream in a thread, with heartbeats; return the first version."""
        predictor = self._followers[url] = Predictor(Model(tuple(size), None), url, name=name)
        predictor.follow(poll_seconds=0.02)
        return predictor.wait(timeout=60)

    def reach(self, url: str, version: int) -> int:
        """Wait until a follower has applied a version; return its version."""
        return self._followers[url].wait(version, timeout=60)

    def leave(self, url: str) -> None:
        """End a follower."""
        self._followers.pop(url).stop()

    def fill(self, url: str, directory: str) -> int:
        """Write a stream to a row store; return the version."""
        sink = LmdbSink(directory)
        version = Predictor(sink, url).sync()
        sink.close()
        return version

    def look_up(self, directory: str, size: tuple[int, int], num_batches: int) -> list[int]:
        """Look all rows of a row store up; return the number of wrong values and the version."""
        rows = LmdbRows(directory)
        sizes = {"user": size[0], "item": ITEMS}
        found = {f"{name}.weight": rows.rows(name, torch.arange(sizes[name])).values for name in sizes}
        version = rows.state().version
        rows.close()
        return [num_wrong(found, tuple(size), num_batches), version]

    # Names and operators

    def names(self) -> list[str]:
        """Return the public names with their attributes and parameters, the errors, and the options of commands."""
        found = {f"errors.{name}" for name, each in vars(errors).items() if isinstance(each, type)}
        for name in delta_tracker.__all__:
            public = getattr(delta_tracker, name)
            members = {name: public, **{f"{name}.{each}": getattr(public, each) for each in _public(public)}}
            found |= members.keys()
            for path, member in members.items():
                if inspect.isroutine(member) or isinstance(member, type):
                    with suppress(ValueError):
                        found |= {f"{path}({each})" for each in inspect.signature(member).parameters}
        context = click.Context(commands)
        for command in commands.list_commands(context):
            each = commands.get_command(context, command)
            found |= {f"delta-tracker {command} {option}" for parameter in each.params for option in parameter.opts}
        return sorted(found)

    def command(self, *arguments: str) -> Any:
        """Run a command; return its exit code and the JSON that it prints with ``--json``, otherwise its text."""
        done = CliRunner().invoke(commands, [*arguments])
        return [done.exit_code, json.loads(done.stdout) if "--json" in arguments else done.output]


def bits(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return tensors of float32 as lists of int32 with the same bits, NaN too."""
    return {name: each.detach().view(torch.int32).tolist() for name, each in tensors.items()}


def _public(owner: object) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]


def _served(predictor: Predictor, model: Model, size: tuple[int, int]) -> dict[str, Any]:
    if predictor.manifest is None:  # nothing was applied after the position
        return {}
    num_batches = predictor.manifest.batches[1]
    applied = {f"{name}.weight" for name in predictor.manifest.tables} | set(predictor.manifest.dense)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name in applied}
    return {"wrong": num_wrong(tensors, size, num_batches), "batches": num_batches, "applied": sorted(applied)}


def num_wrong(tensors: Mapping[str, Tensor], size: tuple[int, int], num_batches: int) -> int:
    """Return the number of values whose bits are not those after some batches."""
    right = expected(size, num_batches)
    return sum(int((each.view(torch.int32) != right[name].view(torch.int32)).sum()) for name, each in tensors.items())


def answer(jobs: Jobs, line: str) -> str:
    """Make a call, and return the line that answers it."""
    name, arguments, options = json.loads(line)
    method: Callable[..., Any] = getattr(jobs, name)
    try:
        return json.dumps([method(*arguments, **options), None, None])
    except Exception as error:  # noqa: BLE001  the caller gets its type
        return json.dumps([None, type(error).__name__, str(error)])


def main() -> None:
    """Answer calls until the input ends, and delete the folder that is named. Print that of the library first."""
    warnings.simplefilter("ignore")
    out, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(str(Path(delta_tracker.__file__).parent)), file=out, flush=True)
    jobs = Jobs()
    for line in sys.stdin:
        print(answer(jobs, line), file=out, flush=True)
    for temporary in sys.argv[1:]:
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    main()
