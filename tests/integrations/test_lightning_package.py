"""Which package the callbacks for Lightning use, and the error without one."""

from __future__ import annotations

from pathlib import Path

from tests import forked


def test_without_lightning_the_error_names_the_extra(tmp_path: Path) -> None:
    said = _said(
        tmp_path,
        """
sys.modules["pytorch_lightning"] = sys.modules["lightning"] = None
try:
    import delta_tracker.integrations.lightning
except Exception as error:
    print(type(error).__name__, error)
""",
    )
    assert said.startswith("MissingExtraError the package 'pytorch_lightning' is not installed")
    assert "[lightning]'" in said


def test_the_callbacks_are_of_the_package_that_is_imported(tmp_path: Path) -> None:
    said = _said(
        tmp_path,
        """
import types
for name in ("lightning", "lightning.pytorch"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["lightning.pytorch"].Callback = type("Callback", (), {})
from delta_tracker.integrations.lightning import CountersCallback, TrackerCallback
print(*(each.__mro__[1] is sys.modules["lightning.pytorch"].Callback for each in (TrackerCallback, CountersCallback)))
""",
    )
    assert said == "True True\n"


def _said(folder: Path, program: str) -> str:
    path = folder / "program.py"
    path.write_text(f"import sys\nassert not {{'lightning', 'pytorch_lightning'}} & set(sys.modules)\n{program}")
    done = forked.run(str(path), timeout_seconds=240)
    assert done.returncode == 0, done.stderr
    return done.stdout
