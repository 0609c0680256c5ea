"""Wrap ``DistributedModelParallel`` in each process that has this folder on its path, once torchrec imports it."""

from __future__ import annotations

import functools
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_MODULE = "torchrec.distributed.model_parallel"


class _Wrapping(Loader):
    """Loader that runs another one, and then wraps the class that the module defines."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        kind: Any = module.DistributedModelParallel
        construct = kind.__init__

        @functools.wraps(construct)
        def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
            from tests.comparing.compared import Compared  # noqa: PLC0415  it needs torchrec, which is imported now

            construct(self, *args, **kwargs)
            self._compared = Compared(self)  # from the end of the constructor on

        kind.__init__ = constructed


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None:
            spec.loader = _Wrapping(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
