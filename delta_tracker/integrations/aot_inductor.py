"""Compiled models: packages of ``torch.export`` and AOTInductor whose parameters a predictor updates in place.

AOTInductor compiles an exported model to native code. :func:`compile_package` ensures that each parameter and
persistent buffer can be replaced. :class:`CompiledModel` loads the package and replaces these constants with new
tensors ("user-managed" in torch). A predictor writes rows and dense tensors to the new tensors, and the next call of
the compiled model reads them. This was tested on CPUs only.

Other models need no package: pass the module of an exported program, ``exported.module()``, or the model that
``torch.compile`` returns, to :class:`~delta_tracker.predictor.predictor.Predictor`.
"""

import inspect
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from delta_tracker.arguments import check_path
from delta_tracker.errors import InvalidArgumentError, UnsupportedModelError
from delta_tracker.stream.format.state_tree import TENSOR_DTYPES

_logger = logging.getLogger(__name__)
_KEY = "delta_tracker"  # of the package's metadata
_MAX_BYTES = 64 << 20
_SUFFIX = ".pt2"
_METADATA = "aot_inductor.metadata"
_OWN_OPTIONS: dict[str, object] = {
    # Otherwise vectors of at most eight elements, such as a bias, become literals of the code.
    "always_keep_tensor_constants": True,
    "freezing": False,
    "aot_inductor.use_runtime_constant_folding": False,
}
_DTYPE_NAMES = {dtype: name for name, dtype in TENSOR_DTYPES.items()}

_Size = Annotated[int, Meta(ge=0, lt=1 << 48)]
_DtypeName = Annotated[str, Meta(pattern=rf"\A({'|'.join(TENSOR_DTYPES)})\Z")]


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """Metadata of a package: dtype and shape of each constant, by name."""

    format: Literal[1]
    tensors: dict[str, tuple[_DtypeName, tuple[_Size, ...]]]


def compile_package(
    exported: ExportedProgram, path: str | os.PathLike[str], *, options: Mapping[str, Any] | None = None
) -> str:
    """Compile an exported model to a package that :class:`CompiledModel` loads.

    The compiler may fold constants into the code. To detect this, the function changes one floating point tensor of the
    model at a time, and runs the package and the exported program on the example inputs of the export. If only one of
    the two results changes, the tensor was folded. The check needs memory for a copy of the largest tensor, and two
    runs for each tensor. A warning names the tensors that do not affect the results.

    The package contains the tables only if the model has constants that are not in its ``state_dict``.

    Args:
        exported: result of ``torch.export.export`` for a model in evaluation mode. The function changes its tensors
            temporarily. If their names differ from the names in the stream, pass ``ModelTarget(names=...)`` when you
            build the predictor.
        path: file to write, with the suffix ``.pt2``. An existing file is replaced.
        options: settings of ``torch._inductor.config``; None for the defaults.

    Returns:
        ``path``.

    Raises:
        InvalidArgumentError: if ``path`` has another suffix; if ``options`` contains an option that this function sets;
            if the exported program has no example inputs, changes buffers, has tensors that share memory or are not
            contiguous, or is not deterministic; or if torch is older than 2.8.
        UnsupportedModelError: if a tensor was folded into the compiled code. No package is written.

    Example:
        >>> model = torch.nn.Embedding(10, 4)
        >>> exported = torch.export.export(model, (torch.tensor([1, 2]),))
        >>> compile_package(exported, "embedding.pt2")  # doctest: +SKIP
        'embedding.pt2'
    """
    if not isinstance(exported, ExportedProgram):
        raise InvalidArgumentError("exported", type(exported), "Pass what torch.export.export(model, inputs) returned")
    target = check_path("path", path)
    if target.suffix != _SUFFIX:
        raise InvalidArgumentError("path", str(path), f"Pass a file name that ends with {_SUFFIX}")
    given = dict(options or {})
    for name in (*_OWN_OPTIONS, _METADATA):
        if name in given:
            raise InvalidArgumentError("options", name, "Leave it out: compile_package() sets it")
    tensors = _tensors(exported)
    record = _Record(1, {name: (_DTYPE_NAMES[each.dtype], tuple(each.shape)) for name, each in tensors.items()})
    settings = {
        **given,
        **_OWN_OPTIONS,
        _METADATA: {_KEY: msgspec.json.encode(record).decode()},
        # Without this, a constant that is not in the state_dict has no value.
        "aot_inductor.package_constants_in_so": bool(exported.constants),
    }
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".compile-") as folder:
        draft = str(Path(folder) / f"model{_SUFFIX}")
        torch._inductor.aoti_compile_and_package(exported, package_path=draft, inductor_configs=settings)  # noqa: SLF001
        _check(exported, tensors, draft)
        Path(draft).replace(target)
    return str(path)


class CompiledModel:
    """Compiled model whose parameters and persistent buffers a predictor can update.

    Loading a package runs its native code: load only packages that you trust. All tensors are initialized to zero, so
    call ``predictor.sync()`` before the first lookup. Call the model inside ``with predictor.reading()``.

    Args:
        path: package that :func:`compile_package` wrote.
        num_runners: maximum number of concurrent calls of the model from several threads.

    Attributes:
        tensors: dict of the tensors that the compiled model reads, by name. Pass this dict to a predictor as the model.
            Modify the tensors only in place.

    Raises:
        InvalidArgumentError: if the package is missing, was not written by :func:`compile_package` or has invalid
            metadata, if ``num_runners`` is less than 1, or if torch is older than 2.8.

    Example:
        >>> model = CompiledModel("embedding.pt2")  # doctest: +SKIP
        >>> predictor = Predictor(model.tensors, url)  # doctest: +SKIP
        >>> predictor.follow()  # doctest: +SKIP
        >>> with predictor.reading():  # doctest: +SKIP
        ...     rows = model(torch.tensor([1, 2]))
    """

    def __init__(self, path: str | os.PathLike[str], *, num_runners: int = 1) -> None:
        if type(num_runners) is not int or num_runners < 1:
            raise InvalidArgumentError("num_runners", num_runners, "Pass a count of 1 or more")
        self._compiled = _loaded(str(path), num_runners)
        metadata = self._compiled.get_metadata()
        device, specs = metadata.get("AOTI_DEVICE_KEY", "cpu"), _parsed(str(path), metadata.get(_KEY))
        self.tensors = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (dtype, shape) in specs.items()}
        _manage(self._compiled, self.tensors)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  those of the exported model
        """Run the compiled model. The arguments are the same as for the exported model."""
        return self._compiled(*args, **kwargs)


def _tensors(exported: ExportedProgram) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers. Raise InvalidArgumentError if they cannot be constants."""
    mutated = exported.run_decompositions().graph_signature.buffers_to_mutate  # before, writes are inside of operators
    if mutated:
        remedy = "Export the model in evaluation mode, without buffers that it changes"
        raise InvalidArgumentError("exported", sorted(mutated.values()), remedy)
    if exported.example_inputs is None:
        raise InvalidArgumentError("exported", "no example inputs", "Pass what torch.export.export returned")
    found: dict[str, Tensor] = {}
    names: dict[tuple[torch.device, int], str] = {}
    for name, tensor in exported.state_dict.items():
        if tensor.dtype not in _DTYPE_NAMES or not tensor.is_contiguous():
            remedy = f"Use contiguous tensors with one of {sorted(TENSOR_DTYPES)}"
            raise InvalidArgumentError("exported", name, remedy)
        shared = names.setdefault((tensor.device, tensor.data_ptr()), name) if tensor.numel() else name
        if shared != name:
            raise InvalidArgumentError("exported", name, f"Use separate tensors: it shares memory with {shared!r}")
        found[name] = tensor.detach()
    return found


@torch.no_grad()
def _check(exported: ExportedProgram, tensors: Mapping[str, Tensor], path: str) -> None:
    """Raise UnsupportedModelError if changing a tensor affects the exported program but not the package, or vice versa.

    Raises InvalidArgumentError if the exported program or the package is not deterministic.
    """
    args, kwargs = exported.example_inputs or ((), {})
    compiled, module = _loaded(path, 1), exported.module()
    _manage(compiled, tensors)

    def outputs(run: Callable[..., object]) -> list[object]:
        return [each.clone() if isinstance(each, Tensor) else each for each in tree_leaves(run(*args, **kwargs))]

    plain = outputs(compiled), outputs(module)
    if not (_equal(plain[0], outputs(compiled)) and _equal(plain[1], outputs(module))):
        raise InvalidArgumentError("exported", "random results", "Export the model in evaluation mode")
    unseen = []
    generator = torch.Generator().manual_seed(0)  # not the global one, whose numbers belong to the caller
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        with _changed(tensor, generator):
            is_seen = not _equal(plain[0], outputs(compiled)), not _equal(plain[1], outputs(module))
        if is_seen[0] != is_seen[1]:
            raise UnsupportedModelError(
                {name: ""},
                "Leave out options that fold constants, or change how the model uses the tensor",
                problem="a tensor that the compiler has folded into the code, so that updates would not be seen",
            )
        if not is_seen[0]:
            unseen.append(name)
    if unseen:
        _logger.warning("the example inputs do not depend on these tensors, which were not checked: %s", unseen)


@contextmanager
def _changed(tensor: Tensor, generator: torch.Generator) -> Iterator[None]:
    saved = tensor.clone()
    try:
        tensor.copy_(torch.randn(tensor.shape, dtype=torch.float32, generator=generator).to(tensor.dtype)).add_(2)
        yield
    finally:
        tensor.copy_(saved)


def _equal(some: list[object], others: list[object]) -> bool:
    """Return True if two lists of results are equal. NaN equals NaN."""
    return len(some) == len(others) and all(
        torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())
        if isinstance(one, Tensor) and isinstance(other, Tensor)
        else one == other
        for one, other in zip(some, others, strict=True)
    )


def _loaded(path: str, num_runners: int) -> Any:  # noqa: ANN401  torch's class is private
    """Load a package.

    Raises InvalidArgumentError if the file does not exist, or if torch does not support user-managed constants.
    """
    from torch._inductor.package.package import load_package  # noqa: PLC0415  it imports the compiler

    if not check_path("path", path).is_file():
        raise InvalidArgumentError("path", path, "Pass a file that compile_package() wrote: it does not exist")
    compiled = load_package(path, num_runners=num_runners)
    if "user_managed" not in inspect.signature(compiled.load_constants).parameters:
        raise InvalidArgumentError("torch", torch.__version__, "Install torch 2.8 or newer")
    return compiled


def _manage(compiled: Any, tensors: Mapping[str, Tensor]) -> None:  # noqa: ANN401
    """Make a package read its constants from ``tensors``, which must live as long as the package."""
    names = set(compiled.get_constant_fqns())
    managed = {name: tensor for name, tensor in tensors.items() if name in names}
    compiled.load_constants(managed, check_full_update=False, user_managed=True)


def _parsed(path: str, text: str | None) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of a package's constants, by name. Raise InvalidArgumentError for invalid metadata."""
    remedy = "Compile it with compile_package() of this version of the library"
    if text is None or len(text) > _MAX_BYTES:
        raise InvalidArgumentError("path", path, remedy)
    try:
        record = msgspec.json.decode(text, type=_Record)
    except ValueError as error:
        raise InvalidArgumentError("path", path, f"{remedy}: {error}") from error
    if any(math.prod(shape) >= 1 << 48 for _, shape in record.tensors.values()):
        raise InvalidArgumentError("path", path, f"{remedy}: a tensor is too large")
    return {name: (TENSOR_DTYPES[dtype], shape) for name, (dtype, shape) in record.tensors.items()}
