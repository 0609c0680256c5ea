"""Every Python block of the documents is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import forked
from tests.documents import DOCUMENTS, ROOT, name_of

_BLOCKS = {name_of(path): re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL) for path in DOCUMENTS}


@pytest.mark.parametrize("name", [name for name, blocks in _BLOCKS.items() if blocks])
def test_python_blocks_run(name: str, tmp_path: Path) -> None:
    """Run the blocks in order in one program, as a reader would paste them."""
    blocks = _BLOCKS[name]
    program = "\n".join(f"print('block {number} begins')\n{block}" for number, block in enumerate(blocks))
    (tmp_path / "program.py").write_text(program)
    done = forked.run(str(tmp_path / "program.py"), timeout_seconds=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"block {len(blocks) - 1} begins" in done.stdout


def test_the_page_of_the_code_names_functions_that_the_first_program_runs() -> None:
    page = (ROOT / "delta_tracker" / "README.md").read_text()
    named = re.findall(r"\| `([\w.]+)` \| `delta_tracker/([\w/.]+)` \|$", page, flags=re.MULTILINE)
    done = forked.run("benchmarks.spine", "--show", timeout_seconds=280)
    assert done.returncode == 0, done.stderr
    files = dict(re.findall(r"^(\S+\.py)\n((?:    .+\n)+)", done.stdout, flags=re.MULTILINE))
    assert named
    assert not [each for each in named if each[0] not in files.get(each[1], "").split()]
