"""Compare models and kernels in each process that has this folder on its path, once their modules are imported."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# What compares an object is imported once the first one is built, because it needs the modules that are imported now.


def _compare_models(module: Any) -> None:
    construct = module.DistributedModelParallel.__init__

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        from tests.comparing.compared import Compared  # noqa: PLC0415

        construct(self, *args, **kwargs)
        self._compared = Compared(self)  # from the end of the constructor on

    module.DistributedModelParallel.__init__ = constructed


def _compare_kernels(module: Any) -> None:
    kind = module.SplitTableBatchedEmbeddingBagsCodegen
    construct, forward = kind.__init__, kind.forward

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if not sys._getframe(1).f_globals["__name__"].startswith("torchrec."):
            from tests.comparing.kernels import ComparedKernel  # noqa: PLC0415

            self.__dict__["_compared"] = ComparedKernel(self)

    @functools.wraps(forward)
    def looked_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        look_up = functools.partial(forward, self, *args, **kwargs)
        compared = self.__dict__.get("_compared")
        return look_up() if compared is None else compared.look_up(look_up)

    kind.__init__, kind.forward = constructed, looked_up


_WRAPPED: dict[str, Callable[[Any], None]] = {
    "torchrec.distributed.model_parallel": _compare_models,
    "fbgemm_gpu.split_table_batched_embeddings_ops_training": _compare_kernels,
}


class _Wrapping(Loader):
    """Loader that runs another one, and then wraps a class that the module defines."""

    def __init__(self, loader: Any, wrap: Callable[[Any], None]) -> None:
        self._loader, self._wrap = loader, wrap

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._wrap(module)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        wrap = _WRAPPED.pop(fullname, None)  # the search below comes here again
        spec = None if wrap is None else find_spec(fullname)
        if spec is not None and wrap is not None:
            spec.loader = _Wrapping(spec.loader, wrap)
        return spec


sys.meta_path.insert(0, _Finder())
