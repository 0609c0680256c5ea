"""The benchmark programs run, and their built-in checks pass."""

from __future__ import annotations

import importlib
import json
import math
import re
import subprocess
import sys
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench_gpu, gpu_needs, gpu_results
from benchmarks.bench_recovery import shortest_intervals
from benchmarks.gpu_kernels import time_launches
from benchmarks.harness import Report, Sample, interleaved
from benchmarks.ids import distinct_ids, uniform_ids, zipf_ids
from benchmarks.journey import made_purchases
from benchmarks.summary import COMPARISON, alternatives, markdown
from benchmarks.targets import Target
from tests import forked
from tests.fake_streams.simulation import fake_streams
from tests.sweeps import SWEEPS_ARE_WHOLE

_ROOT = Path(__file__).parent.parent.parent
_IN_SWEEPS = pytest.mark.sweep("short", only=True)  # some 10 s each


@pytest.mark.parametrize(
    "name",
    [
        *("bench_predict", "bench_publish", "bench_step"),
        pytest.param("bench_alternatives", marks=pytest.mark.sweep("long", only=True)),
        *(
            pytest.param(name, marks=_IN_SWEEPS)
            for name in (
                "bench_fleet",
                "bench_freshness",
                "bench_journey",
                "bench_optimizers",
                "bench_quality",
                "bench_read",
                "bench_recovery",
                "bench_sinks",
                "bench_store",
                "growth",
            )
        ),
    ],
)
def test_a_benchmark_runs_tiny(name: str, tmp_path: Path) -> None:
    # In a separate process, because it makes a process group and changes settings of torch.
    arguments = ["--tiny", "--out", str(tmp_path), "--work", str(tmp_path)]
    done = forked.run(f"benchmarks.{name}", *arguments, timeout_seconds=240)
    assert done.returncode == 0, done.stderr[-4000:]
    table = (tmp_path / f"{name}.md").read_text()
    assert done.stdout == table
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record["environment"]["torch"] == torch.__version__
    values = [value for case in record["figures"].values() for sample in case.values() for value in sample]
    assert values
    assert all(math.isfinite(value) for value in values)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.json", f"{name}.md"], "it left files behind"


@pytest.mark.sweep("short")
def test_the_benchmark_for_gpus_runs_tiny_without_one() -> None:
    parts = ["row-sets", "steps", "publishing", "snapshots", "applying", "first-steps"]
    if SWEEPS_ARE_WHOLE:
        parts += ["fbgemm-steps", "flushes"]
    done = forked.run("benchmarks.bench_gpu", "--device", "simulated", "--parts", *parts, timeout_seconds=240)
    assert done.returncode == 0, done.stderr[-4000:]
    for line in ("mark: torch", "step of 200 plain tables", "longest stall", "p99", "first step"):
        assert line in done.stdout, line
    assert ("TorchRec's tracker" in done.stdout) == SWEEPS_ARE_WHOLE


def test_each_launch_is_timed_between_its_events() -> None:
    device = torch.device("cuda", 0)
    with fake_streams(1):  # operations run as late as possible
        table = torch.zeros(3, device=device)

        def launch(count: int) -> int:
            for _ in range(count):
                torch.cuda._sleep(1)  # one operation
            return count

        found = time_launches(device, [partial(launch, count) for count in range(23)])
        assert found.results == list(range(23))
        assert found.sample.values == tuple(count / 1e3 for count in range(23))
        assert not found.is_host_bound
        assert time_launches(device, [table.tolist]).is_host_bound
    assert time_launches(torch.device("cpu"), [lambda: 7]).results == [7]


def test_results_for_gpus_are_kept_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(gpu_results.RESULTS, raising=False)
    gpu_results.append("part", name="before")
    monkeypatch.setenv(gpu_results.RESULTS, str(tmp_path / "results"))
    gpu_results.append("part", name="a", device=torch.device("cpu"))
    report = {"nodeid": "b", "location": ("", 0, ""), "keywords": {}}
    for outcome, text, when in [("passed", None, "setup"), ("failed", "why", "call"), ("passed", None, "teardown")]:
        gpu_results.pytest_runtest_logreport(
            pytest.TestReport(**report, outcome=outcome, longrepr=text, when=when)  # type: ignore[arg-type]
        )
    first, second = map(json.loads, (tmp_path / "results").read_text().splitlines())
    assert (first["kind"], first["name"], first["device"]) == ("part", "a", "cpu")
    assert (second["kind"], second["name"], second["outcome"], second["text"]) == ("test", "b", "failed", "why")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the outcome without a GPU")
def test_the_tests_for_gpus_run_in_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runner = importlib.import_module("tests.gpu.__main__")
    commands: list[list[str]] = []
    paths: list[str] = []

    def run(command: list[str], env: dict[str, str] | None = None, **_: object) -> SimpleNamespace:
        commands.append(command)
        paths.append((env or {}).get("PYTHONPATH", ""))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("PYTHONPATH", "/packages")
    assert runner.main(["captured", "pipelines"]) == 0
    assert paths[-1] == f"{_ROOT}:/packages", "the packages may be there"
    probe, tests = commands
    assert probe[-1] == "simulated"
    assert tests[-2:] == ["tests/gpu/fbgemm/test_pipelines.py", "tests/gpu/test_graphs.py"]
    printed = capsys.readouterr().out
    assert "without graphs: CUDA graphs\n" in printed
    assert re.search(r"^2 parts in one process +passed", printed, re.MULTILINE)
    with pytest.raises(SystemExit, match="2"):
        runner.main(["captureds"])
    assert (
        "no part has one of ['captureds'] in its title: ['no wait for the device, and row sets', "
        in capsys.readouterr().err
    )


def test_the_tests_for_gpus_name_missing_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_needs.main(["pytest"]) == 0
    monkeypatch.setattr(gpu_needs, "find_spec", lambda name: None if name in ("obstore", "torchrec") else name)
    assert gpu_needs.main(["pytest"]) == 1
    assert capsys.readouterr().err.startswith(f"missing packages: obstore. Install them for {sys.executable}, ")
    assert gpu_needs.fbgemm_obstacle("cuda") == "not installed: torchrec"
    monkeypatch.setattr(sys, "version_info", (3, 10))
    assert gpu_needs.main([]) == 1


def test_carried_wheels_that_are_too_large_or_ambiguous_are_refused(tmp_path: Path) -> None:
    def error() -> str:
        command = [
            sys.executable,
            str(_ROOT / ".ci" / "gpu"),
            "test",
            "--wheels",
            str(tmp_path),
            "--out",
            str(tmp_path),
        ]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 1
        return done.stderr.strip()

    with (tmp_path / "some_package-1.0-py3-none-any.whl").open("wb") as wheel:
        wheel.truncate(65 << 20)
    assert error() == f"{tmp_path} has 65.0 MiB of wheels, more than 64 MiB: remove some"
    (tmp_path / "some.package-2.0-py3-none-any.whl").touch()
    assert error() == f"{tmp_path} has two wheels of some-package: remove one"
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_stopped_install_of_carried_wheels_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = spec_from_loader("carried", SourceFileLoader("carried", str(_ROOT / ".ci" / "gpu")))
    assert spec is not None
    assert spec.loader is not None
    carried = module_from_spec(spec)
    spec.loader.exec_module(carried)
    stops = True

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        target = Path(command[command.index("--target") + 1])
        target.mkdir()
        metadata = target / "some_package-1.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Name: some-package\nVersion: 1.0\n")
        if stops:
            raise KeyboardInterrupt
        (target / "some_package.py").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", pip)
    (tmp_path / "some_package-1.0-py3-none-any.whl").touch()
    with pytest.raises(KeyboardInterrupt):
        carried.install(tmp_path)
    assert carried.installed("some-package") is None
    stops = False
    site = carried.install(tmp_path)
    assert (site / "some_package.py").exists()
    assert carried.installed("some-package") == "1.0"
    stops = True
    assert carried.install(tmp_path) == site, "nothing is missing"


def test_a_part_of_the_benchmark_for_gpus_that_fails_loses_no_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: bench_gpu.Bench) -> None:
        raise torch.OutOfMemoryError("no memory")

    def succeed(bench: bench_gpu.Bench) -> None:
        bench.add("a case", Sample((0.5,)))

    monkeypatch.setattr(
        bench_gpu, "PARTS", {"first": (fail, False), "second": (succeed, False), "flushes": (fail, True)}
    )
    monkeypatch.setattr(bench_gpu, "fbgemm_obstacle", lambda _: "fbgemm does not run here")
    assert bench_gpu.main(["--device", "simulated"]) == 1
    printed = capsys.readouterr()
    assert "| a case | 500.000 (500.000-500.000) |" in printed.out
    assert "- Not run: flushes (fbgemm does not run here).\n- FAILED: first.\n" in printed.out
    assert "OutOfMemoryError: no memory" in printed.err


@pytest.mark.parametrize(
    "name", ["bench_freshness", "bench_journey", "bench_predict", "bench_publish", "bench_quality", "bench_sinks"]
)
def test_committed_results_are_of_the_current_program(name: str) -> None:
    directory = _ROOT / "benchmarks" / "results"
    record = json.loads((directory / f"{name}.json").read_text())
    table = (directory / f"{name}.md").read_text()
    assert {"date", "processor", "cores", "torch", "load_before"} <= record["environment"].keys()
    assert record["environment"]["date"] in table
    importlib.import_module(f"benchmarks.{name}")
    assert re.search(rf"^# {name}$", table, re.MULTILINE)


def test_make_bench_runs_every_benchmark() -> None:
    runner = importlib.import_module("benchmarks.__main__")
    named = {*runner.PROGRAMS, *runner.PRINTING}
    assert {path.stem for path in (_ROOT / "benchmarks").glob("bench_*.py")} - named == {"bench_gpu"}
    assert not runner.PROGRAMS.keys() & runner.PRINTING.keys()


def test_the_documents_have_the_figures_of_the_committed_results() -> None:
    readme = (_ROOT / "benchmarks" / "README.md").read_text()
    table = markdown(_ROOT / "benchmarks" / "results")
    assert f"<!-- benchmarks -->\n{table}<!-- /benchmarks -->" in readme, "run python -m benchmarks.summary"
    table = alternatives(_ROOT / "benchmarks" / "results")
    text = COMPARISON.read_text()
    assert f"<!-- alternatives -->\n{table}<!-- /alternatives -->" in text, "run python -m benchmarks.summary"
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines()[2:]]
    (latency, size, _, wrong), (_, whole, *_), _, (*_, files), (*_, redis) = cells
    claims = [
        f"{wrong} rows of a predictor were wrong",
        f"{files} of 200,000 were; with rows set in Redis, {redis}",
        f"{size} MB instead of {whole.removesuffix('.0')} MB, served {latency.split(',')[0]} ms",
    ]
    first = " ".join((_ROOT / "README.md").read_text().split())
    assert not [claim for claim in claims if claim not in first], "write the figures of the table into README.md"


def test_a_target_is_met_missed_or_not_measured(tmp_path: Path) -> None:
    report = Report(name="bench_a", settings={}, columns=("what",), environment={"date": "now"})
    for name, value in (("half", 0.5), ("double", 2.0)):
        report.add(name, {"seconds": Sample((value,))})
    environment = {**dict.fromkeys(("cores", "processor", "torch"), "x"), "date": "2026-11-24 09:17 UTC"}
    for name, load in (("bench_a", 0.5), ("bench_c", 1.5)):
        record = {"environment": {**environment, "load_before": load}, "figures": report.figures}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    found = markdown(
        tmp_path,
        [
            Target("least", 1.0, True, lambda results: results.median("bench_a", "double")),
            Target("least", 1.0, True, lambda results: results.median("bench_a", "half")),
            Target("most", 1.0, False, lambda results: results.median("bench_a", "half")),
            Target("most", 1.0, False, lambda results: results.median("bench_a", "double")),
            Target("none", 1.0, False, lambda results: results.median("bench_b", "half")),
            Target("none", 1.0, False, lambda results: max(map(len, results.cases("bench_a", "third")))),
        ],
    )
    assert [line.split(" | ", 1)[1] for line in found.splitlines()[2:8]] == [
        "≥ 1.00 | 2.00 | yes |",
        "≥ 1.00 | 0.50 | no: 0.50 of the target |",
        "≤ 1.00 | 0.50 | yes |",
        "≤ 1.00 | 2.00 | no: 2.00 of the target |",
        "≤ 1.00 |  | not measured |",
        "≤ 1.00 |  | not measured |",
    ]
    runs = "load 0.5 to 1.5 before each run: `bench_a` 09:17, `bench_c` 09:17 (UTC)."
    assert found.splitlines()[9:] == [f"- 2026-11-24, x cores (x), torch x, {runs}"]


def test_the_shortest_interval_of_a_stream_keeps_one_percent() -> None:
    found = {
        "no checkpoint": {"seconds": [0.1]},
        "dcp.save": {"excess": [2.0]},
        "dcp.async_save": {"excess": [1.0]},
        "delta_tracker every 10": {"excess": [0.02], "tracking": [0.005]},
        "delta_tracker every 100": {"excess": [0.04], "tracking": [0.005]},
    }
    intervals = shortest_intervals(found, (10, 100))
    # 0.02 s are more than half a percent of 10 steps, and 0.04 s are less than that of 100 steps.
    assert intervals == pytest.approx({"dcp.save": 200, "dcp.async_save": 100, "delta_tracker": 10})
    found["delta_tracker every 100"]["excess"] = [0.1]
    assert shortest_intervals(found, (10, 100))["delta_tracker"] == pytest.approx(20)
    found["delta_tracker every 100"]["tracking"] = [0.01]
    assert shortest_intervals(found, (10, 100))["delta_tracker"] == math.inf


def test_cases_run_in_turns_and_warm_ups_do_not_count() -> None:
    rounds: list[list[str]] = []

    def case(name: str) -> dict[str, float]:
        rounds[-1].append(name)
        return {"seconds": float(len(rounds))}

    found = interleaved(
        {"a": lambda: case("a"), "b": lambda: case("b")},
        repeats=9,
        warmups=1,
        before_round=lambda: rounds.append([]),
    )
    assert {"".join(each) for each in rounds} == {"ab", "ba"}
    assert found == {name: {"seconds": Sample(tuple(map(float, range(2, 11))))} for name in "ab"}
    assert Sample((0.003, 0.001, 0.002)).text(1e3) == "2.0 (1.0-3.0)"


def test_a_report_is_written_as_a_table_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(name="name", settings={"rows": 3}, columns=("what", "ms"), notes=["A note."], environment={})
    report.lines.append(("a", "1"))
    report.add("a", {"seconds": Sample((0.5,))})
    report.finish(tmp_path)
    text = (tmp_path / "name.md").read_text()
    assert text.startswith("# name\n\n| what | ms |\n| --- | ---: |\n| a | 1 |\n\n- A note.\n- Settings: rows 3.\n")
    assert capsys.readouterr().out == text
    assert json.loads((tmp_path / "name.json").read_text())["figures"] == {"a": {"seconds": [0.5]}}


def test_no_purchase_counts_before_its_product_is_known() -> None:
    purchases = made_purchases(400, 10)
    products, others = (each.view(-1, 10).tolist() for each in (purchases.ids[1], purchases.others))
    known = set(products[0])
    assert not purchases.is_scored[:10].any()
    for bought, drawn, is_scored in zip(
        products[1:], others[1:], purchases.is_scored.view(-1, 10)[1:].tolist(), strict=True
    ):
        assert is_scored == [product in known for product in bought]
        assert known.issuperset(drawn), "a negative tells that it is new"
        known |= set(bought)


def test_ids_have_the_stated_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    uniform = uniform_ids(10, 20_000, generator).bincount(minlength=10)
    assert len(uniform) == 10
    assert (uniform - 2000).abs().max() < 250
    zipf = zipf_ids(1000, 200_000, generator).bincount(minlength=1000)
    assert len(zipf) == 1000
    # The continuous law's share of the k-th id, from its distribution function.
    power = 1 - 1.05
    edges = torch.arange(1, 1002, dtype=torch.float64) ** power
    share = (edges[:-1] - edges[1:]) / (1 - 1001**power)
    assert torch.allclose(zipf / 200_000, share.float(), atol=0.004)
    ids = distinct_ids(50, 20, generator)
    assert len(ids) == 20
    assert bool((ids[1:] > ids[:-1]).all())
    assert 0 <= int(ids[0]) <= int(ids[-1]) < 50
