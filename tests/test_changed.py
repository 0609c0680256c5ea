"""The tests that ``make check`` runs for a change."""

from __future__ import annotations

from tests.changed import own_tests, select

_SOURCES = {
    "delta_tracker/__init__.py": "if TYPE_CHECKING:\n    from delta_tracker.flow.pump import (\n        Pump,\n    )\n",
    "delta_tracker/errors.py": "",
    "delta_tracker/flow/__init__.py": "",
    "delta_tracker/flow/page.py": 'template = files(__package__) / "page.jinja"\n',
    "delta_tracker/flow/pump.py": "from delta_tracker.flow.valve import Valve\n",
    "delta_tracker/flow/valve.py": "from delta_tracker.errors import Error\n\n>>> Valve()\n",
    "delta_tracker/flow/store/disk.py": "",
    "tests/conftest.py": "",
    "tests/servers.py": "from delta_tracker.flow.valve import Valve\n",
    "tests/test_errors.py": "from delta_tracker.errors import Error\n",
    "tests/test_house.py": "",
    "tests/contract/test_store.py": "",
    "tests/flow/conftest.py": "",
    "tests/flow/pump_cases.py": "from delta_tracker import Pump\n",
    "tests/flow/test_page.py": "",
    "tests/flow/test_pump.py": '_CASES = "tests.flow.pump_cases"\n',
    "tests/flow/test_valve.py": "from delta_tracker.flow.valve import (\n    Valve,\n)\n",
    "tests/system/test_servers.py": "from tests import servers\n",
}


def _tests(*changed: str, without: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the reason of each test file, except of those that check the house."""
    sources = {path: text for path, text in _SOURCES.items() if path not in without}
    return {path: why for path, why in select(set(changed), sources).reasons.items() if why != "checks the house"}


def test_the_tests_of_a_module_come_before_those_that_use_it() -> None:
    assert list(select({"delta_tracker/flow/valve.py"}, _SOURCES).reasons.items()) == [
        ("tests/flow/test_valve.py", "tests delta_tracker/flow/valve.py"),
        ("delta_tracker/flow/valve.py", "has examples"),
        ("tests/test_house.py", "checks the house"),
        ("tests/system/test_servers.py", "uses delta_tracker/flow/valve.py"),
        ("tests/flow/test_pump.py", "tests delta_tracker/flow/pump.py, which uses delta_tracker/flow/valve.py"),
    ]


def test_a_changed_test_comes_first() -> None:
    changed = {"tests/flow/test_pump.py", "delta_tracker/errors.py"}
    assert list(select(changed, _SOURCES).reasons)[:2] == ["tests/flow/test_pump.py", "tests/test_errors.py"]


def test_files_directly_in_the_folder_of_tests_check_every_change() -> None:
    assert select({"README.md"}, _SOURCES).reasons == {"tests/test_house.py": "checks the house"}


def test_the_tests_that_say_most_about_a_change_come_first() -> None:
    users = {
        "tests/tracker/test_z.py": "import delta_tracker.flow.valve",
        "tests/tracker/test_y.py": "import delta_tracker.flow.valve, delta_tracker.errors, delta_tracker.flow.page",
        "tests/tracker/test_x.py": "import tests.servers",
        "tests/system/test_w.py": "import delta_tracker.flow.valve",
    }
    modules = {path: text for path, text in _SOURCES.items() if "test_" not in path}
    found = select({"delta_tracker/flow/valve.py"}, {**modules, **users}).reasons
    assert [path for path in found if path in users] == list(users)
    errors = dict.fromkeys(map("tests/tracker/test_{}.py".format, "abc"), "import delta_tracker.errors")
    found = select({"delta_tracker/errors.py", "delta_tracker/flow/page.py"}, {**modules, **users, **errors}).reasons
    assert next(path for path in found if path.startswith("tests/tracker")) == "tests/tracker/test_y.py"


def test_a_public_name_leads_to_the_module_that_defines_it() -> None:
    reasons = _tests("delta_tracker/flow/pump.py", without=("tests/flow/test_pump.py",))
    assert not reasons
    sources = {**_SOURCES, "tests/flow/test_public.py": "from delta_tracker import Pump\n"}
    assert "tests/flow/test_public.py" in select({"delta_tracker/flow/pump.py"}, sources).reasons


def test_cases_lead_to_the_tests_that_name_them() -> None:
    assert _tests("tests/flow/pump_cases.py") == {"tests/flow/test_pump.py": "uses tests/flow/pump_cases.py"}


def test_fixtures_lead_to_the_tests_of_their_folder() -> None:
    assert list(_tests("tests/flow/conftest.py")) == [
        f"tests/flow/test_{name}.py" for name in ("page", "valve", "pump")
    ]


def test_other_files_lead_to_the_modules_that_name_them() -> None:
    reason = "tests delta_tracker/flow/page.py, which uses delta_tracker/flow/page.jinja"
    assert _tests("delta_tracker/flow/page.jinja") == {"tests/flow/test_page.py": reason}


def test_a_moved_module_leads_to_the_tests_of_both_names() -> None:
    changed = ("delta_tracker/flow/valve.py", "delta_tracker/flow/pump.py")
    reasons = _tests(*changed, without=("delta_tracker/flow/valve.py",))
    assert {"tests/flow/test_valve.py", "tests/flow/test_pump.py", "tests/system/test_servers.py"} == set(reasons)


def test_a_deleted_module_leads_to_the_tests_that_still_import_it() -> None:
    gone = ("delta_tracker/flow/valve.py", "tests/flow/test_valve.py")
    assert list(_tests(*gone, without=gone)) == ["tests/system/test_servers.py", "tests/flow/test_pump.py"]


def test_a_file_that_no_test_names_is_reported() -> None:
    selection = select({"LICENSE", "delta_tracker/errors.py", "tests/flow/test_gone.py"}, _SOURCES)
    assert selection.untested == ("LICENSE",)


def test_a_document_leads_to_the_tests_of_all_documents() -> None:
    sources = {"tests/documents.py": "", "tests/test_links.py": "from tests.documents import DOCUMENTS\n"}
    selection = select({"CHANGELOG.md", "LICENSE"}, sources)
    assert selection.reasons == {"tests/test_links.py": "checks CHANGELOG.md"}
    assert selection.untested == ("LICENSE",)


def test_the_tests_of_a_module_have_its_name_or_that_of_its_subpackage() -> None:
    assert own_tests("delta_tracker/errors.py", _SOURCES) == ["tests/test_errors.py"]
    assert own_tests("delta_tracker/flow/valve.py", _SOURCES) == ["tests/flow/test_valve.py"]
    assert own_tests("delta_tracker/flow/store/disk.py", _SOURCES) == ["tests/contract/test_store.py"]
