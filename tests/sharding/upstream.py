"""What becomes of each sharded module, kernel, fused optimizer, wrapper and pipeline of TorchRec and FBGEMM.

``python -m tests.sharding.upstream`` prints the table of ``tests/README.md``. The names are read from the source files
of the installed packages: a new one makes ``test_upstream.py`` fail until it is decided here.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

TRACKED, INSIDE, REFUSED, PRUNED, WITHOUT_ROWS, SERVED = (
    "tracked",
    "tracked as the collection inside",
    "refused",
    "refused, because it prunes",
    "holds no trained rows",
    "serves quantized rows",
)

MODULES: Mapping[str, str] = {
    "BaseShardedManagedCollisionEmbeddingCollection": INSIDE,
    "ShardedEmbeddingBag": REFUSED,
    "ShardedEmbeddingBagCollection": TRACKED,
    "ShardedEmbeddingCollection": TRACKED,
    "ShardedEmbeddingTower": REFUSED,
    "ShardedEmbeddingTowerCollection": REFUSED,
    "ShardedFeatureProcessedEmbeddingBagCollection": INSIDE,
    "ShardedFusedEmbeddingBagCollection": TRACKED,
    "ShardedFusedEmbeddingCollection": TRACKED,
    "ShardedITEPEmbeddingBagCollection": PRUNED,
    "ShardedITEPEmbeddingCollection": PRUNED,
    "ShardedInferenceKeyedJaggedTensorPool": REFUSED,
    "ShardedInferenceTensorPool": REFUSED,
    "ShardedKeyedJaggedTensorPool": REFUSED,
    "ShardedManagedCollisionCollection": WITHOUT_ROWS,
    "ShardedManagedCollisionEmbeddingBagCollection": INSIDE,
    "ShardedManagedCollisionEmbeddingCollection": INSIDE,
    "ShardedObjectPool": REFUSED,
    "ShardedPECEmbeddingCollection": INSIDE,
    "ShardedQuantEmbeddingBagCollection": SERVED,
    "ShardedQuantEmbeddingCollection": SERVED,
    "ShardedQuantEmbeddingModuleState": SERVED,
    "ShardedQuantFeatureProcessedEmbeddingBagCollection": SERVED,
    "ShardedQuantManagedCollisionCollection": SERVED,
    "ShardedQuantManagedCollisionEmbeddingBagCollection": SERVED,
    "ShardedQuantManagedCollisionEmbeddingCollection": SERVED,
    "ShardedTensorPool": REFUSED,
}

KERNELS: Mapping[str, str] = {
    "DENSE": TRACKED,
    "FUSED": TRACKED,
    "FUSED_UVM": TRACKED,
    "FUSED_UVM_CACHING": TRACKED,
    "QUANT": REFUSED,
    "QUANT_UVM": REFUSED,
    "QUANT_UVM_CACHING": REFUSED,
    "KEY_VALUE": REFUSED,
    "CUSTOMIZED_KERNEL": REFUSED,
    "SSD_VIRTUAL_TABLE": REFUSED,
    "DRAM_VIRTUAL_TABLE": REFUSED,
    "DRAM_SSD_VIRTUAL_TABLE": REFUSED,
    "FUSED_TRITON": REFUSED,
    "UNFUSED_TPU": REFUSED,
}

SHARDINGS: Mapping[str, str] = dict.fromkeys(
    (
        "DATA_PARALLEL",
        "TABLE_WISE",
        "COLUMN_WISE",
        "ROW_WISE",
        "TABLE_ROW_WISE",
        "TABLE_COLUMN_WISE",
        "GRID_SHARD",
    ),
    TRACKED,
)

OPTIMIZERS: Mapping[str, str] = {
    "SGD": REFUSED,
    "EXACT_SGD": TRACKED,
    "LAMB": TRACKED,
    "ADAM": TRACKED,
    "EXACT_ADAGRAD": TRACKED,
    "EXACT_ROWWISE_ADAGRAD": TRACKED,
    "LARS_SGD": TRACKED,
    "PARTIAL_ROWWISE_ADAM": TRACKED,
    "PARTIAL_ROWWISE_LAMB": TRACKED,
    "ROWWISE_ADAGRAD": REFUSED,
    "SHAMPOO": REFUSED,
    "SHAMPOO_V2": REFUSED,
    "MADGRAD": REFUSED,
    "EXACT_ROWWISE_WEIGHTED_ADAGRAD": REFUSED,
    "ENSEMBLE_ROWWISE_ADAGRAD": REFUSED,
    "EMAINPLACE_ROWWISE_ADAGRAD": REFUSED,
    "ROWWISE_RMSPROP_AR": REFUSED,  # FBGEMM 1.9
    "NONE": REFUSED,
}

COLLISIONS: Mapping[str, str] = {
    "HashZchManagedCollisionModule": TRACKED,
    "MCHManagedCollisionModule": TRACKED,
}

WRAPPERS: Mapping[str, str] = {
    "DMPCollection": TRACKED,
    "DistributedModelParallel": TRACKED,
    "HybridEvalDMP": WITHOUT_ROWS,  # it evaluates
}

PIPELINES: Mapping[str, str] = {
    "EvalPipelineCPUSparse": WITHOUT_ROWS,
    "EvalPipelineFusedSparseDist": WITHOUT_ROWS,
    "EvalPipelineSparseDist": WITHOUT_ROWS,
    "PrefetchTrainPipelineSparseDist": TRACKED,
    "StagedTrainPipeline": TRACKED,
    "TrainEvalHybridPipelineBase": TRACKED,
    "TrainPipelineBase": TRACKED,
    "TrainPipelineFusedSparseDist": TRACKED,
    "TrainPipelinePEC": TRACKED,
    "TrainPipelinePT2": TRACKED,
    "TrainPipelinePrefetchEMS": REFUSED,  # its tables are stashed
    "TrainPipelineSemiSync": TRACKED,
    "TrainPipelineSparseDist": TRACKED,
    "TrainPipelineSparseDistBwdOpt": TRACKED,
    "TrainPipelineSparseDistCompAutograd": TRACKED,
    "TrainPipelineSparseDistEmbStash": REFUSED,  # its tables are stashed
    "TrainPipelineSparseDistLite": TRACKED,
    "TrainPipelineSparseDistOptStash": TRACKED,
    "TrainPipelineSparseDistT": TRACKED,
}

TABLES: Mapping[str, Mapping[str, str]] = {
    "sharded modules": MODULES,
    "kernels": KERNELS,
    "sharding types": SHARDINGS,
    "fused optimizers": OPTIMIZERS,
    "managed collisions": COLLISIONS,
    "wrappers": WRAPPERS,
    "pipelines": PIPELINES,
}
_ROOTS = {
    "sharded modules": ("ShardedModule", "ShardedEmbeddingModule"),
    "managed collisions": ("ManagedCollisionModule",),
    "wrappers": ("DistributedModelParallel",),
    "pipelines": ("TrainPipeline",),
}
_ENUMS = {
    "kernels": ("torchrec", "distributed/embedding_types.py", "EmbeddingComputeKernel"),
    "sharding types": ("torchrec", "distributed/types.py", "ShardingType"),
    "fused optimizers": ("fbgemm_gpu", "split_embedding_configs.py", "EmbOptimType"),
}


def installed(kind: str) -> set[str]:
    """Return the names of a kind in the installed packages."""
    if kind in _ENUMS:
        package, path, name = _ENUMS[kind]
        tree = ast.parse((_folder(package) / path).read_text())
        (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
        return {
            target.id
            for node in found.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
    roots = set(_ROOTS[kind])
    found_classes, bases = set(roots), _bases()
    while more := {name for name, above in bases.items() if above & found_classes} - found_classes:
        found_classes |= more
    return found_classes - (roots - {"DistributedModelParallel"}) - {"ShardedEmbeddingModule"}


def module_of(name: str) -> str:
    """Return the name of the module of TorchRec that defines a class."""
    return next(module for module, names in _classes().items() if name in names)


def markdown() -> str:
    """Return the table of ``tests/README.md``."""
    lines = [
        "| | tracked | refused by name | holds no trained rows |",
        "|---|---|---|---|",
    ]
    for kind, decided in TABLES.items():
        cells = [
            ", ".join(f"`{name}`" for name, outcome in decided.items() if outcome in outcomes)
            for outcomes in ((TRACKED, INSIDE), (REFUSED, PRUNED), (WITHOUT_ROWS, SERVED))
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.submodule_search_locations, f"{package} is a package"
    return Path(spec.submodule_search_locations[0])


@cache
def _classes() -> Mapping[str, Mapping[str, frozenset[str]]]:
    """Return the names of the bases of each class by the name of its module and its own. Tests are left out."""
    folder, found = _folder("torchrec"), {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        if any("test" in part or "benchmark" in part for part in parts):
            continue
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        found[".".join(parts)] = {each.name: frozenset(map(_name, each.bases)) for each in classes}
    return found


def _bases() -> dict[str, frozenset[str]]:
    return {name: bases for classes in _classes().values() for name, bases in classes.items()}


def _name(base: ast.expr) -> str:
    while isinstance(base, ast.Subscript):
        base = base.value
    return base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""


if __name__ == "__main__":
    print(markdown())
