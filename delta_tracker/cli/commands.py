"""Command group that imports the module of a command only when the command or its help is requested."""

import importlib

import click

from delta_tracker.errors import import_optional

# Command name to the summary in the list of commands. The file of a command has the same name.
_SUMMARIES = {
    "inspect": "Show the contents of a stream, its predictors, and what a new predictor would read.",
    "tail": "Print versions as they are committed.",
    "top": "Show a live screen: rates, rows and bytes per table, lag of each predictor.",
    "verify": "Check every hash and every link of the chain.",
    "diff": "Show the rows of a table that differ between two versions, and by how much.",
    "compact": "Merge versions, so that a new predictor has less to read.",
    "fleet": "Show the version, the lag and the state of every predictor, by host.",
    "mirror": "Copy a stream to another store, and follow it.",
    "sink": "Write a stream to a row store, such as Redis or LMDB, and follow it.",
    "rollback": "Return all predictors that follow pins to a version.",
    "release": "Let the predictors of a rolled back stream continue from a snapshot.",
    "takeover": "Ask a standby to take over from the publisher of a stream.",
    "export": "Write the tables of a version to safetensors files or a DCP checkpoint.",
    "exporter": "Serve the ages of a stream and the lags of its predictors to Prometheus.",
    "assets": "Write the alert rules for Prometheus or the dashboard for Grafana.",
    "plan": "Forecast memory, bytes, requests, disk and start-up time of a stream.",
    "report": "Write a self-contained HTML report about a stream.",
}


_HELP = """Inspect and verify streams of embedding deltas, and export versions.

A URL is file:///directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix; a plain path is a
directory. Commands that only read also accept http://host/path and https://host/path, a server or cache in front of
such a store. Set the credentials and the endpoint of a remote store with the usual environment variables
(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT, AWS_REGION, GOOGLE_..., AZURE_...), and other options with
--option name=value. An endpoint without TLS needs --option allow_http=true.

\b
Exit codes:
  0    success
  1    the stream is damaged, replaced or without a snapshot, or a check has findings
  2    the call is invalid, or the store cannot be reached
  130  interrupted by Ctrl-C; no partial output is left
  141  the output pipe was closed
  143  ended by SIGTERM (top and sink; it ends other commands at once)
"""


class _Commands(click.Group):
    """Click group that imports commands lazily.

    Each command is the object ``command`` in the module with the command's name.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's interface
        return list(_SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  click's interface
        if cmd_name not in _SUMMARIES:
            return None
        if cmd_name in ("compact", "diff", "export", "plan", "sink", "verify"):
            import_optional("torch", "torch", "torch")
        command = importlib.import_module(f"{__package__}.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _SUMMARIES[name]) for name in self.list_commands(ctx)])


commands = _Commands(
    "delta-tracker",
    {name: click.Command(name) for name in _SUMMARIES},  # for suggestions of similar names
    help=_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
