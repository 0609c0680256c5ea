"""Keep hooks out of the graphs of ``torch.compile`` and of compiled autograd.

The compiler cannot trace a hook, because a hook acquires locks and registers hooks of autograd nodes. It therefore
breaks the graph before each call of a hook and calls the hook as ordinary code. Where it must not break the graph
(``fullgraph=True``), it would raise an error in the training step. In this case the graph contains no call of the hook,
and the owner of the hook is notified once, during the compilation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch


def untraced(hook: Callable[..., None], omitted: Callable[[], object]) -> Callable[..., None]:
    """Return a function that calls ``hook``, and that the compiler does not trace.

    Args:
        hook: the hook. It must not raise.
        omitted: called without arguments while the compiler builds a graph that must not break. From then on, the graph
            runs instead of the hook. Must not launch operations or raise.
    """
    called = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]

    @torch.compiler.assume_constant_result  # the compiler runs it during the compilation
    def is_omitted() -> bool:
        if not _must_not_break():
            return False
        omitted()
        return True

    def call(*args: object) -> None:
        if torch.compiler.is_dynamo_compiling() and is_omitted():
            return
        called(*args)

    return call


def forget_compiled_code() -> None:
    """Make torch compile all code of this process again.

    Compiled code does not check whether a hook was replaced since, and would run without the new hook.
    """
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None:
        compiler.reset_code_caches()  # unlike torch.compiler.reset(), keeps CUDA graphs


def _must_not_break() -> bool:
    """Return True if the graph that is being compiled must not break."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415  loaded by the compiler

    translator = InstructionTranslator.current_tx()
    return bool(getattr(translator, "one_graph", False) or getattr(translator, "error_on_graph_break", False))
