"""Cases for streams of models with managed collisions: encodings, hash functions, bags and other plans.

Each case runs on every rank. The expected answer to a raw id is always that of the trainer's own evaluation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher
from delta_tracker.errors import UnsupportedModelError
from delta_tracker.predictor.model_writer import ModelWriter
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.raw_ids.index import RawIdIndex
from delta_tracker.stream.format.encoding import Encoding
from tests.publisher.collision_models import NUM_IDS, NUM_ROWS, Model, answers, batch, hashed, quantized, sharded

IDS = torch.arange(-4, 75)
_STEP = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "INT8": 0.51 / 255, "INT4": 0.51 / 15}  # see _bound()


def _trained(world_size: int, sizes: list[int] | None = None, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return sharded(Model(**kwargs), world_size, sizes)


def _bound(rows: Tensor, encoding: str) -> Tensor:
    """Return the largest error of ``[N, 4]`` rows: of their largest value, or of their range if they are integers."""
    largest = rows.abs().amax(1, keepdim=True)
    span = rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)
    # Scale and bias of a row in a quantized model are float16.
    return (1.25 * span + largest / 4 if encoding.startswith("INT") else largest) * _STEP[encoding] + 1e-7


class _Served:
    """Predictors of one stream on one rank: models of several dtypes, and tensors with an index of raw ids."""

    def __init__(self, tracker: ModelDeltaTracker, url: str, *, is_hashed: bool, **kwargs: Any) -> None:
        self.models = {
            "F32": Model(is_hashed=is_hashed, **kwargs).eval(),
            "INT8": quantized(Model(is_hashed=is_hashed, **kwargs), torch.qint8),
            "F16": quantized(Model(is_hashed=is_hashed, **kwargs), torch.float16),
        }
        self.tables = {fqn: torch.full((spec.num_rows, spec.dim), -1.0) for fqn, spec in tracker.tables.items()}
        self.index = {fqn: RawIdIndex(spec.num_rows) for fqn, spec in tracker.tables.items()}
        self.raw_ids = hashed(IDS, NUM_IDS) if is_hashed else IDS
        self.predictors = [Predictor(ModelTarget(self.tables, raw_ids=self.index), url)]
        for name, model in self.models.items():
            names = {} if name == "F32" else {fqn: fqn.replace("_embedding_module.", "") for fqn in tracker.tables}
            self.predictors.append(Predictor(ModelTarget(model, names=names, dense=False), url))

    def check(self, expected: dict[str, Tensor], owners: dict[str, Tensor], encoding: str) -> None:
        """Check the mapping, and the answer of each predictor to each raw id within the error of its encodings."""
        assert len({each.sync() for each in self.predictors}) == 1
        found = {name: answers(model, IDS) for name, model in self.models.items()}
        found["index"] = {
            fqn.rpartition(".")[2]: table[self.index[fqn].rows_of(self.raw_ids)] for fqn, table in self.tables.items()
        }
        for name, rows in found.items():
            for table, each in expected.items():
                bound = _bound(each, encoding) + (_bound(each, name) if name in _STEP else 0)
                error = (rows[table] - each).abs()
                assert bool((error <= bound).all()), (name, table, float((error - bound).max()))
        for fqn, each in owners.items():
            mappings = [self.index[fqn]]
            for predictor in self.predictors[1:]:
                writer = predictor._destination
                assert isinstance(writer, ModelWriter)
                mappings += writer.model.raw_ids()[fqn]
            assert len(mappings) == 4
            for mapping in mappings:
                assert torch.equal(mapping.owners(), each), fqn


def _owners(tracker: ModelDeltaTracker) -> dict[str, Tensor]:
    """Return the raw ids of all rows, by FQN. A collective."""
    found = {}
    for fqn, own in tracker.live.owner_views().items():
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own.tolist())
        found[fqn] = torch.tensor([raw_id for each in ranks for raw_id in each])
    return found


def served(rank: int, world_size: int, root: str, encoding: str, is_bag: bool, is_hashed: bool) -> dict[str, Any]:
    """After each version, each predictor has the trainer's mapping, and its answers within the encoding's error."""
    url = f"file://{root}"
    kwargs: Any = {"is_bag": is_bag, "is_hashed": is_hashed}
    model = _trained(world_size, **kwargs)
    generator = torch.Generator().manual_seed(rank)
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url, encoding=Encoding(encoding))
    readers = _Served(tracker, url, **kwargs) if rank == 0 else None
    evicted = 0
    before = {fqn: torch.full((NUM_ROWS,), NO_OWNER) for fqn in tracker.tables}
    for number in range(5):
        for _ in range(4):
            model(batch(generator)).backward()
            tracker.step()
        _ = publisher.snapshot() if number == 3 else publisher.publish()
        expected, owners = answers(model, IDS), _owners(tracker)
        for fqn, each in owners.items():
            evicted += int(((before[fqn] != each) & (before[fqn] != NO_OWNER)).sum())
        before = owners
        if readers is not None:
            readers.check(expected, owners, encoding)
    publisher.close()
    assert tracker.num_hook_errors == 0
    tracker.detach()
    known = torch.cat([each[each != NO_OWNER] for each in before.values()])
    return {"evicted": evicted, "known": sorted(known.tolist())}


def unapplied_hash(rank: int, world_size: int) -> str:
    """Return the error for a hash function that the sharded module does not call, unlike an unsharded one."""
    try:
        ModelDeltaTracker(_trained(world_size, is_hashed=True, need_preprocess=False))
    except UnsupportedModelError as error:
        return str(error)
    ModelDeltaTracker(_trained(world_size, need_preprocess=False)).detach()
    return ""


def reattached(rank: int, world_size: int, root: str) -> list[Any]:
    """A trainer whose rows are divided in another way publishes a snapshot next, and predictors follow."""
    url = f"file://{root}"
    model = _trained(world_size)
    generator = torch.Generator().manual_seed(rank)
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url)
    readers = _Served(tracker, url, is_hashed=False) if rank == 0 else None
    found = []
    for number in range(8):
        for _ in range(3):
            model(batch(generator)).backward()
            tracker.step()
        if number in (3, 6):
            model.module.mc = _trained(world_size, [12, 4] if number == 3 else [8, 8]).module.mc
            tracker.reattach()
            model(batch(generator)).backward()
            tracker.step()
        manifest = publisher.publish()
        found.append([manifest.kind, [bucket.rows for bucket in next(iter(manifest.identities.values())).buckets]])
        expected, owners = answers(model, IDS), _owners(tracker)
        if readers is not None:
            readers.check(expected, owners, "F32")
    publisher.close()
    tracker.detach()
    return found


def sharded_served(rank: int, world_size: int, root: str) -> int:
    """Predictors of a model that is sharded as in the trainer; return the number of known raw ids at the end."""
    url = f"file://{root}"
    model, serving = _trained(world_size), _trained(world_size).eval()
    generator = torch.Generator().manual_seed(rank)
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url)
    predictor = Predictor(serving, url)
    for number in range(6):
        for _ in range(3):
            model(batch(generator)).backward()
            tracker.step()
        manifest = publisher.snapshot() if number == 3 else publisher.publish()
        expected = answers(model, IDS)
        dist.barrier()
        assert predictor.sync() == manifest.version
        found = answers(serving, IDS)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    publisher.close()
    num_known = sum(int((owners != NO_OWNER).sum()) for owners in tracker.live.owner_views().values())
    tracker.detach()
    return num_known
