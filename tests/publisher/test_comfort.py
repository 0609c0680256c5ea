"""What makes the publisher and the tracker pleasant to use: paths, names of enums, `with`, and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from delta_tracker import Encoding, ModelDeltaTracker, Predictor, Publisher, Storage, TrackingMode
from delta_tracker.errors import InvalidArgumentError, RankLostError
from delta_tracker.monitor import Monitor
from delta_tracker.publisher import publisher as publisher_module
from delta_tracker.tracker.consumer_handle import ConsumerHandle


def _tracker() -> ModelDeltaTracker:
    return ModelDeltaTracker(nn.Sequential(nn.EmbeddingBag(9, 2, sparse=True)))


@pytest.mark.parametrize("as_path", [lambda path: path, str, lambda path: path.as_uri()], ids=["Path", "str", "url"])
def test_a_path_is_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_path: Any) -> None:
    with Publisher(_tracker(), as_path(tmp_path / "a b")) as publisher:
        publisher.snapshot()
    monkeypatch.chdir(tmp_path)
    for location in (as_path(tmp_path / "a b"), "a b", Path("a b"), "./a b"):
        assert Predictor({"0": torch.zeros(9, 2)}, location).sync() == 1
        assert Storage(location).url == (tmp_path / "a b").as_uri()


@pytest.mark.parametrize("location", ["", None, 3, b"/stream", "s3:/bucket"])
def test_what_is_neither_a_path_nor_a_url_is_refused(location: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="url="):
        Storage(location)


def test_enums_are_accepted_by_name(tmp_path: Path) -> None:
    for mode in ("EMBEDDING", "embedding", TrackingMode.EMBEDDING):
        assert ModelDeltaTracker(nn.Sequential(nn.Embedding(9, 2)), mode=mode).mode is TrackingMode.EMBEDDING
    for number, encoding in enumerate(("int8", "INT8", Encoding.INT8, {"0": "int8"})):
        with Publisher(_tracker(), tmp_path / str(number), encoding=encoding) as publisher:
            (part,) = publisher.snapshot().parts
            assert {block.encoding for block in part.blocks} == {Encoding.INT8}


def test_a_changed_model_is_compared_with_the_stream_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def model(num_rows: int, *others: nn.Module) -> ModelDeltaTracker:
        return ModelDeltaTracker(nn.Sequential(nn.EmbeddingBag(num_rows, 2, sparse=True), *others))

    with Publisher(model(9, nn.Linear(2, 1)), tmp_path, dense=True) as publisher:
        publisher.snapshot()
    for _ in range(2):  # the first one ends before its first version
        caplog.clear()
        changed = model(9, nn.Linear(2, 3), nn.EmbeddingBag(4, 2, sparse=True))
        with Publisher(changed, tmp_path, dense=True) as publisher:
            found = [each.getMessage() for each in caplog.records if "differs" in each.getMessage()]
            assert found == [
                f"the model differs from version 1 of the stream: {each}"
                for each in (
                    "table '2' is missing in the stream but 4 x 2 float32 in the model",
                    "dense tensor '1.bias' is float32 [1] in the stream but float32 [3] in the model",
                    "dense tensor '1.weight' is float32 [1, 2] in the stream but float32 [3, 2] in the model",
                )
            ]
    with Publisher(changed, tmp_path) as publisher:
        publisher.snapshot()
    caplog.clear()
    with Publisher(changed, tmp_path, dense=False) as publisher:
        publisher.publish()
    assert "differs" not in caplog.text


def test_with_closes_the_publisher_also_after_an_error(tmp_path: Path) -> None:
    tracker = _tracker()
    for number in range(2):  # the consumer is free again
        publisher = Publisher(tracker, tmp_path / str(number))
        with pytest.raises(ZeroDivisionError), publisher:
            raise ZeroDivisionError
        with pytest.raises(InvalidArgumentError, match="closed"):
            publisher.publish()
        publisher.close()


def test_a_close_that_was_interrupted_is_completed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = _tracker()
    publisher = Publisher(tracker, tmp_path)
    release = ConsumerHandle.release

    def interrupted(handle: ConsumerHandle) -> None:
        release(handle)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ConsumerHandle, "release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publisher.close()
    publisher.close()
    with pytest.raises(InvalidArgumentError, match="closed"):
        publisher.publish()
    Publisher(tracker, tmp_path).close()


def test_a_publisher_that_lost_a_rank_at_its_start_leaves_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*args: object, **kwargs: object) -> None:
        raise RankLostError("rank 1 did not call Publisher(...)")

    tracker, monitor, kept = _tracker(), Monitor(), list[RankLostError]()
    with monkeypatch.context() as patched:
        patched.setattr(publisher_module, "VoteExchange", lost)
        try:
            Publisher(tracker, tmp_path / "stream", monitor=monitor)
        except RankLostError as error:
            kept.append(error)  # with the frames of the constructor
    with Publisher(tracker, tmp_path / "stream", monitor=monitor) as publisher:
        assert publisher._recorder.label == {"publisher": "publisher"}


def test_texts_name_what_matters(tmp_path: Path) -> None:
    tracker, served = _tracker(), torch.zeros(9, 2)
    with Publisher(tracker, tmp_path) as publisher:
        publisher.snapshot()
        predictor = Predictor({"0": served}, tmp_path)
        predictor.sync()
        assert repr(tracker) == "ModelDeltaTracker(tables=1, consumers=['default'], mode=ID_ONLY, batches=0)"
        assert repr(publisher) == f"Publisher('{tmp_path.as_uri()}', generation=1, version=1)"
        assert repr(predictor) == f"Predictor('{tmp_path.as_uri()}', version=1)"
    assert "0" in repr(tracker.get_delta())
