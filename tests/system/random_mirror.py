"""Brute-force mirror of a trainer: full copies of every table at every batch, and what consumers and predictors have.

Copies are read from the kernels of TorchRec, and not through the tracker. Rows are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from delta_tracker import Delta, Encoding, ModelDeltaTracker, ModelTarget, Predictor, TrackingMode
from delta_tracker.errors import NoSnapshotError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.storage.storage import Storage
from tests.system.random_job import Job
from tests.system.random_models import Blocks, Model, every
from tests.system.resumed_trainer import whole_tables

Whole = dict[str, tuple[Tensor, dict[int, list[Tensor]]]]
_BITS = {torch.float32: torch.int32, torch.float16: torch.int16}
_STEPS = {Encoding.F16: 2**-11, Encoding.BF16: 2**-8, Encoding.INT8: 0.51 / 255, Encoding.INT4: 0.51 / 15}


def differing(before: Tensor, now: Tensor) -> Tensor:
    """Return for each row whether a bit differs, ``[R]``."""
    kind = _BITS[now.dtype]
    return (before.contiguous().view(kind) != now.contiguous().view(kind)).any(1)


def gathered(blocks: Blocks) -> Whole:
    """Return the rows and states of whole tables from the blocks of all ranks. A collective."""
    return whole_tables([{"blocks": each} for each in every(_copies(blocks))])


def _copies(blocks: Blocks) -> list[tuple[str, tuple[int, int], Tensor, list[Tensor]]]:
    return [(fqn, first, rows.clone(), [each.clone() for each in states]) for fqn, first, rows, states in blocks]


@dataclass
class Cut:
    """Whole tables and dense tensors after a batch, and by consumer the tables as of its last committed read."""

    tables: Whole
    dense: dict[str, Tensor]
    consumers: dict[str, Whole]


@dataclass
class Mirror:
    """Cuts of all lives of a trainer.

    Args:
        root: directory for the cuts of lives that have ended.
        life: number of this life.
    """

    root: Path
    life: int
    cuts: dict[int, Cut] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)
    _past: dict[int, dict[int, Cut]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.root / "generations.pt").exists():
            self.generations = torch.load(self.root / "generations.pt", weights_only=False)

    def of(self, entry: Manifest) -> Cut:
        """Return the cut of a version."""
        return self.cut(self.generations[entry.generation], entry.batches[1])

    def cut(self, life: int, num_batches: int) -> Cut:
        """Return the cut of a life after some batches."""
        if life == self.life:
            return self.cuts[num_batches]
        if life not in self._past:
            self._past[life] = torch.load(self.root / f"cuts-{life}.pt", weights_only=False)
        return self._past[life][num_batches]

    def save(self) -> None:
        """Save the cuts of this life, on one rank."""
        torch.save(self.cuts, self.root / f"cuts-{self.life}.pt")
        torch.save(self.generations, self.root / "generations.pt")


class Copy:
    """A consumer on one rank: its copy of the rank's blocks, which every committed read updates.

    Args:
        tracker: tracker of the blocks.
        name: name of the consumer.
        blocks: returns the live blocks of this rank.
        whole: tables as the consumer has them; None for those of the blocks.
    """

    def __init__(
        self,
        tracker: ModelDeltaTracker,
        name: str,
        blocks: Callable[[], Blocks],
        whole: Whole | None = None,
    ) -> None:
        self.name = name
        self._tracker = tracker
        self._blocks = blocks
        self._has = _copies(blocks()) if whole is None else [_part(whole, block) for block in blocks()]
        self._touched: dict[str, set[int]] = {}
        self._allows_all = whole is not None
        self.num_rows = 0

    def touch(self, ids: Mapping[str, set[int]]) -> None:
        """Allow rows in the next read, by global ids: an update of them was written."""
        for fqn, each in ids.items():
            self._touched.setdefault(fqn, set()).update(each)

    def allow_all(self) -> None:
        """Allow any row in the next read: a write or a fault marked all rows."""
        self._allows_all = True

    @property
    def blocks(self) -> Blocks:
        """Blocks of this rank as the consumer has them."""
        return self._has

    def reset(self) -> None:
        """Take all rows as they are now."""
        self._has = _copies(self._blocks())
        self._touched, self._allows_all = {}, False

    def check(self, delta: Delta) -> None:
        """Check a delta against a comparison of all rows."""
        changed: dict[str, Tensor] = {}
        now = {(fqn, first): (rows, states) for fqn, first, rows, states in self._blocks()}
        for fqn, first, before, _ in self._has:
            moved = differing(before, now[fqn, first][0])
            changed[fqn] = changed[fqn] | moved if fqn in changed else moved
        for fqn, moved in changed.items():
            rows = delta[fqn]
            left_out = delta.left_out[fqn].ids if fqn in delta.left_out else rows.ids[:0]
            got = torch.zeros(len(moved), dtype=torch.bool)
            got[rows.ids] = got[left_out] = True
            lost = (moved & ~got).nonzero().flatten().tolist()
            assert not lost, f"{self.name} lost rows {lost} of {fqn}"
            self._check_excess(fqn, rows.ids, moved)
            here = sorted((first, has, states) for each, first, has, states in self._has if each == fqn)
            self.num_rows += len(rows.ids)
            live = [now[fqn, first] for first, _, _ in here]
            if rows.values is not None:
                values = torch.cat([each[rows.ids] for each, _ in live], dim=1)
                assert not differing(rows.values, values).any(), f"{self.name} read other values of {fqn}"
            if rows.states is not None:
                self._check_states(fqn, delta, [(has, states) for _, has, states in here], live)

    def _check_excess(self, fqn: str, ids: Tensor, moved: Tensor) -> None:
        if self._allows_all:
            return
        if fqn in self._tracker.live.fused_tables:
            offset = self._tracker.shards[fqn].row_offset
            extra = {row + offset for row in ids.tolist()} - self._touched.get(fqn, set())
        else:
            extra = set(ids.tolist()) - set(moved.nonzero().flatten().tolist())
        assert not extra, f"{self.name} was sent rows {sorted(extra)} of {fqn}, which no update wrote"

    def _check_states(self, fqn: str, delta: Delta, had: list[Any], live: list[Any]) -> None:
        rows = delta[fqn]
        assert rows.states is not None
        ids = rows.ids
        mode = self._tracker.mode
        known = torch.ones(len(ids), dtype=torch.bool) if rows.known is None else rows.known
        if mode is TrackingMode.EMBEDDING:
            expected = torch.cat([has[ids] for has, _ in had], dim=1)[known]
            assert torch.equal(rows.states[known], expected.to(rows.states.dtype)), f"{self.name}: old rows of {fqn}"
        elif mode is TrackingMode.MOMENTUM_LAST:
            norms = torch.cat([states[0][ids].float() for _, states in live], dim=1).norm(dim=1)
            assert torch.allclose(rows.states, norms), f"{self.name}: momentum of {fqn}"
        else:
            assert mode in (TrackingMode.MOMENTUM_DIFF, TrackingMode.ROWWISE_ADAGRAD), "this mode has no check"
            before, now = (torch.cat([states[0][ids].float() for _, states in each], dim=1) for each in (had, live))
            grown = (now - before).sum(1)[known]
            assert torch.allclose(rows.states[known], grown, atol=1e-5), f"{self.name}: growth of {fqn}"

    def commit(self, delta: Delta) -> None:
        """Take the rows of a delta that was read just now."""
        now = {(fqn, first): (rows, states) for fqn, first, rows, states in self._blocks()}
        for fqn, first, has, states in self._has:
            ids = delta[fqn].ids
            has[ids] = now[fqn, first][0][ids]
            for mine, each in zip(states, now[fqn, first][1], strict=True):
                mine[ids] = each[ids]
        if not delta.left_out:
            self._touched, self._allows_all = {}, False


def _part(whole: Whole, block: tuple[str, tuple[int, int], Tensor, list[Tensor]]) -> Any:
    """Return a copy of a block with the rows and states of whole tables; with its own states if they have none."""
    fqn, first, rows, states = block
    values, by_column = whole[fqn]
    place = slice(first[0], first[0] + len(rows))
    saved = [each[place] for each in by_column.get(first[1], [])]
    found = saved if len(saved) == len(states) else states
    columns = slice(first[1], first[1] + rows.shape[1])
    return fqn, first, values[place, columns].clone(), [each.clone() for each in found]


def check_blocks(cut: Cut, blocks: Blocks, *, has_states: bool) -> None:
    """Check that a rank's rows, and the states of the fused optimizers, are those of a cut."""
    for fqn, first, rows, states in blocks:
        values, by_column = cut.tables[fqn]
        place = slice(first[0], first[0] + len(rows))
        found = values[place, first[1] : first[1] + rows.shape[1]]
        assert not differing(found, rows.contiguous()).any(), f"{fqn} was restored with other rows"
        if has_states:
            for saved, each in zip(by_column[first[1]], states, strict=True):
                assert torch.equal(saved[place], each), f"{fqn} was restored with other states"


class Follower:
    """A predictor, compared with the mirror after each version.

    Args:
        model: its tables and dense tensors by name, or a module with them.
        storage: store of the stream.
        encodings: encoding by FQN; tables without one are exact.
        has_dense: whether the stream has dense tensors.
    """

    def __init__(
        self,
        model: dict[str, Tensor] | nn.Module,
        storage: Storage,
        encodings: Mapping[str, Encoding],
        *,
        has_dense: bool,
    ) -> None:
        self._model = model
        self._encodings = encodings
        self._has_dense = has_dense
        self.predictor = Predictor(ModelTarget(model, dense=has_dense), storage)
        self.num_checked = 0

    def sync(self, mirror: Mirror) -> None:
        """Apply version after version and compare."""
        while True:
            version = self.predictor.version
            try:
                self.predictor.sync(limit=1)
            except NoSnapshotError:
                return
            if self.predictor.version == version:
                return
            entry = self.predictor.manifest
            if entry is not None and entry.kind != "claim":
                self._compare(mirror.of(entry), entry)
                self.num_checked += 1

    def held(self) -> dict[str, Tensor]:
        """Return the tables by FQN and the dense tensors by name."""
        if isinstance(self._model, nn.Module):
            return {
                name.removesuffix(".weight") if "embedding" in name else name: each
                for name, each in self._model.state_dict().items()
            }
        return self._model

    def _compare(self, cut: Cut, entry: Manifest) -> None:
        held = self.held()
        what = f"version {entry.version} of generation {entry.generation}"
        num_other = 0
        for fqn, (values, _) in cut.tables.items():
            encoding = self._encodings.get(fqn)
            if encoding is None:
                other = differing(values, held[fqn])
            else:
                error = (held[fqn].float() - values.float()).abs()
                other = (error > _bound(values, encoding)).any(1)
            num_other += int(other.sum())
            rows = other.nonzero().flatten().tolist()
            assert len(rows) <= entry.pending_rows, f"{what} has other rows of {fqn} than the trainer: {rows}"
        assert num_other <= entry.pending_rows, f"{what}: {num_other} rows differ, {entry.pending_rows} are pending"
        if self._has_dense:
            for name, tensor in cut.dense.items():
                assert torch.equal(held[name], tensor), f"{what} has another {name} than the trainer"


def _bound(rows: Tensor, encoding: Encoding) -> Tensor:
    """Return the largest error of the values of ``[R, D]`` rows."""
    largest = rows.float().abs().amax(1, keepdim=True)
    span = rows.float().amax(1, keepdim=True) - rows.float().amin(1, keepdim=True)
    scale = (
        1.02 * span
        if encoding is Encoding.INT8
        else 1.25 * span + largest / 4
        if encoding is Encoding.INT4
        else largest
    )
    rounded = largest * 2**-11 if rows.dtype == torch.float16 else 0.0  # the predictor's table
    return scale * _STEPS[encoding] + rounded + 1e-6


class Followers:
    """Predictors of a stream on one rank: one with a saved state, which lives through all lives, and a new one.

    Args:
        job: the trainer.
        root: directory for the state.
        storage: store of the stream.
        empty: tables and dense tensors of a predictor without a version.
    """

    def __init__(self, job: Job, root: Path, storage: Storage, empty: Callable[[], dict[str, Tensor]]) -> None:
        self._job, self._storage, self._empty = job, storage, empty
        self._saved = root / "predictor.pt"
        self._first = self._follower(empty())
        if self._saved.exists():
            held, state = torch.load(self._saved, weights_only=False)
            self._first = self._follower(held)
            self._first.predictor.load_state_dict(state)
        self._second = self._new()
        self._num_checked = 0

    @property
    def num_checked(self) -> int:
        """Number of versions that were compared."""
        return self._num_checked + self._first.num_checked + self._second.num_checked

    def sync(self, mirror: Mirror) -> None:
        """Apply all versions, and compare each."""
        for follower in (self._first, self._second):
            follower.sync(mirror)

    def replace(self) -> None:
        """Replace the second predictor by a new one."""
        self._num_checked += self._second.num_checked
        self._second = self._new()

    def save(self) -> None:
        """Save the state and the tables of the first predictor."""
        torch.save((self._first.held(), self._first.predictor.state_dict()), self._saved)

    def _new(self) -> Follower:
        if self._job.seed % 3 != 1:
            return self._follower(self._empty())
        served = Model(self._job.collections, "cpu").eval()
        for tensor in served.state_dict().values():
            tensor.fill_(-1.0)
        return self._follower(served)

    def _follower(self, model: dict[str, Tensor] | nn.Module) -> Follower:
        return Follower(model, self._storage, self._job.encodings, has_dense=self._job.has_dense)
