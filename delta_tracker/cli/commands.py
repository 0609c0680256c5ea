"""The list of commands. A command's own file is imported when it is called or its help is asked for."""

from __future__ import annotations

import importlib

import click

# A command's name, which is that of its file, and what the list of commands says of it.
_SUMMARIES = {
    "demo": "Train, publish and follow a small model; leaves a stream to try the others on.",
    "inspect": "What a stream holds, what a new predictor reads, and who follows it.",
    "tail": "Print versions as they are committed.",
    "top": "A live screen: rates, rows and bytes per table, lag of each predictor.",
    "verify": "Check every hash and every link of the chain.",
    "diff": "Which rows of a table differ between two versions, and how far they moved.",
    "compact": "Merge versions, so that a new predictor has less to read.",
    "export": "Write the tables of a version to safetensors files or a torch state dict.",
    "report": "Write one self-contained page about a stream.",
}

_HELP = """Look at streams of embedding deltas, check them, and take versions out of them.

A URL is file:///directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix; a plain path names a
directory. Credentials and the endpoint of a remote store come from the usual environment variables
(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT, AWS_REGION, GOOGLE_..., AZURE_...), other settings from
--option name=value; an endpoint without TLS needs --option allow_http=true.

\b
Exit codes:
  0    done; nothing is wrong
  1    the stream is damaged or cannot serve, or a check found something
  2    the call is wrong, or the store cannot be reached
  130  interrupted by Ctrl-C; nothing is left half done
  141  nobody reads the output any more
"""


class _Commands(click.Group):
    """A group whose commands are ``command`` in the file of their name."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's interface
        return list(_SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  as above
        if cmd_name not in _SUMMARIES:
            return None
        command = importlib.import_module(f"{__package__}.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _SUMMARIES[name]) for name in self.list_commands(ctx)])


commands = _Commands("delta-tracker", help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
