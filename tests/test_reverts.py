"""The text that each revert edits still exists in the code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.reverts.every import all_reverts, apply
from tests.reverts.revert import Revert

_ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("revert", all_reverts(), ids=lambda revert: revert.defect)
def test_a_revert_fits_the_code(tmp_path: Path, revert: Revert) -> None:
    for name in revert.edits:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_ROOT / name, tmp_path / name)
    apply(revert, tmp_path)
    file, _, test = revert.generator.partition("::")
    assert not test or f"def {test.partition('[')[0]}(" in (_ROOT / file).read_text()
