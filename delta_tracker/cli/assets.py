"""``assets``: write the alert rules or the dashboard of the package."""

from importlib.resources import files
from pathlib import Path

import click

from delta_tracker.cli.output import Output
from delta_tracker.cli.stream_command import os_errors_of

_FILES = {"alerts": "alerts.yml", "dashboard": "dashboard.json"}

_HELP = """Write the alert rules for Prometheus or the dashboard for Grafana.

The files are those of the installed version, which fit the names of its metrics.

\b
Examples:
  delta-tracker assets alerts > delta_tracker.yml
  delta-tracker assets dashboard --out dashboard.json
"""


@click.command("assets", help=_HELP)
@click.argument("name", type=click.Choice([*_FILES]))
@click.option("--json", "is_json", is_flag=True, help="Print the name and the text as a JSON object.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write, instead of stdout.")
def command(name: str, out: Path | None, *, is_json: bool) -> int:
    """Write the alert rules or the dashboard to the file ``out``, or print them if ``out`` is None."""
    text = files("delta_tracker.monitor").joinpath(_FILES[name]).read_text(encoding="utf-8")
    Output(is_json=is_json).json({"name": name, "text": text})
    if out is None and not is_json:
        click.echo(text, nl=False)
    if out is not None:
        with os_errors_of("--out", str(out)):
            out.write_text(text, encoding="utf-8")
    return 0
