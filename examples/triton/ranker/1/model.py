"""Model of Triton Inference Server's Python backend: rows of a table that follows a stream.

Shows where the calls of a predictor belong: ``follow()`` in ``initialize``, ``reading()`` in ``execute``, ``stop()`` in
``finalize``. It was tested against a stub of ``triton_python_backend_utils`` and was not run in Triton.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import triton_python_backend_utils as pb_utils
from torch import nn

from delta_tracker import Predictor

COLUMNS = 16


class TritonPythonModel:
    """Triton creates one object for each instance, in a process of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start to follow the stream, and wait for its first version: Triton then reports the model as ready."""
        given = json.loads(args["model_config"])["parameters"]
        parameters = {name: each["string_value"] for name, each in given.items()}
        for name in ("url", "table", "num_rows", "start_seconds"):
            if name not in parameters:
                raise pb_utils.TritonModelException(f"parameter {name!r} is missing in config.pbtxt")
        self.table = nn.Embedding(int(parameters["num_rows"]), COLUMNS)
        self.predictor = Predictor(
            {parameters["table"]: self.table.weight}, parameters["url"], name=args["model_instance_name"]
        )
        self.predictor.follow()
        deadline = time.monotonic() + float(parameters["start_seconds"])
        while self.predictor.version is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.predictor.version is None:
            error = self.predictor.status().error
            self.predictor.stop()
            raise pb_utils.TritonModelException(f"no version of {parameters['url']} was applied: {error}")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request; a request with invalid ids gets an error, and the others their rows."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:  # noqa: ANN401  Triton's classes exist in Triton only
        ids = torch.from_numpy(pb_utils.get_input_tensor_by_name(request, "ids").as_numpy())
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.table.num_embeddings:
            error = pb_utils.TritonError(f"ids must be from 0 to {self.table.num_embeddings - 1}")
            return pb_utils.InferenceResponse(output_tensors=[], error=error)
        with torch.no_grad(), self.predictor.reading() as held:  # no row changes inside the block
            rows, version = self.table(ids), held.version
        tensors = [
            pb_utils.Tensor("rows", rows.numpy()),
            pb_utils.Tensor("version", torch.tensor([version]).numpy()),
        ]
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def finalize(self) -> None:
        """End the thread of the predictor. Triton calls this before it unloads the model."""
        self.predictor.stop()
