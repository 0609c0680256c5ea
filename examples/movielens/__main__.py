"""Demo on MovieLens-100K: ``python -m examples.movielens`` or ``make demo``."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.movielens.data import load_ratings
from examples.movielens.forks import Forks, ProcessFailedError, import_early
from examples.movielens.serving import follow
from examples.movielens.settings import WORLD_SIZE, Settings, settings_path
from examples.movielens.trainer import train_and_publish
from examples.movielens.verify import TablesDifferError, verify_run

LIMIT_SECONDS = 600.0
PICTURE = "log-loss.png"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Return 0 if the predictor's tables equal the trainer's at the end, bit for bit."""
    console = Console(highlight=False)
    try:
        settings = parse(arguments)
        renew(settings)
        applied = run(settings, console)
        # This import takes seconds, so it runs after the processes.
        from examples.movielens.report import draw, load_predictions, summary  # noqa: PLC0415

        predictions = load_predictions(settings)
        draw(predictions, settings, settings.out / PICTURE, applied)
        console.print(summary(applied, predictions))
        console.print(f"picture: {settings.out / PICTURE}")
        verified = verify_run(settings.work)
    except (ProcessFailedError, TablesDifferError, ValueError, OSError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("the demo was interrupted", file=sys.stderr)
        return 130
    console.print(f"[bold green]verified:[/] {verified} at version {applied[-1]['version']}", soft_wrap=True)
    return 0


def parse(arguments: Sequence[str] | None) -> Settings:
    """Return the settings from the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.movielens", description="Train, publish, follow, check.")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder to write to; it is replaced")
    parser.add_argument("--ratings", type=int, help="number of ratings to use, oldest first")
    parser.add_argument("--batch", type=int, help="ratings per training batch, all ranks together")
    parser.add_argument("--every", type=int, help="batches per delta")
    parser.add_argument("--zch", type=float, help="rows of users and movies as a share of their ids, for example 0.33")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    return Settings(**given)


def renew(settings: Settings) -> None:
    """Replace the output folder by an empty one.

    Raises:
        ValueError: if the folder has content that is not from an earlier run of the demo.
    """
    out = settings.out
    if out.exists():
        if any(out.iterdir()) and not settings_path(out).exists():
            raise ValueError(f"{out} has other files: pass an empty or a new folder with --out")
        shutil.rmtree(out)
    settings.work.mkdir(parents=True)
    settings.stream.mkdir()
    settings.save()


def run(settings: Settings, console: Console) -> list[dict[str, Any]]:
    """Run the ranks and the predictor to their end. Return the predictor's event of each applied version."""
    applied: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    import_early()
    ratings = load_ratings(settings.ratings)
    with (
        Progress(*columns, console=console, auto_refresh=False) as progress,  # which would start a thread
        Forks(settings.work, LIMIT_SECONDS) as forks,
    ):
        training = progress.add_task("starting the predictor", total=settings.num_batches)
        serving = progress.add_task("predictor: waiting", total=settings.num_batches)
        forks.start("predictor", follow, settings, ratings)
        for event in forks.events():
            match event:
                case {"event": "ready"}:  # start the ranks only now, so that no version waits for the predictor
                    progress.update(training, description=f"starting {WORLD_SIZE} trainer ranks")
                    for rank in range(WORLD_SIZE):
                        forks.start(f"trainer rank {rank}", train_and_publish, settings, ratings, rank)
                case {"event": "metrics", "process": process, "url": url}:
                    console.print(f"metrics of {process}: curl {url}")
                case {"event": "trained", "batches": batches}:
                    progress.update(training, completed=batches, description="trainer: batches trained")
                case {"event": "applied", "version": version, "batches": batches}:
                    applied.append(event)
                    progress.update(serving, completed=batches, description=f"predictor: at version {version}")
            progress.refresh()
    return applied


if __name__ == "__main__":
    sys.exit(main())
