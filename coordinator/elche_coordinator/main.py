"""The command `elche-coordinator`."""

import asyncio
import logging
import os
import sys
from pathlib import Path

import click

from elche.errors import ElcheError
from elche.token import read_token


class OneLine(logging.Formatter):
    """Writes a message as one line: what came from outside may hold line ends and terminal codes."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line, with whatever does not print as an escape."""
        line = super().formatMessage(record)
        return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


EXAMPLES = """
\b
Examples:
  elche-coordinator
  elche-coordinator --listen 127.0.0.1:7717 --data /var/lib/elche
  ELCHE_TOKEN_FILE=/run/secrets/elche elche-coordinator --listen 0.0.0.0:7717 --http 0.0.0.0:7718
"""


@click.command(epilog=EXAMPLES)
@click.option("--listen", default="127.0.0.1:7717", show_default=True, help="HOST:PORT of the control plane.")
@click.option(
    "--http", default="127.0.0.1:7718", show_default=True, help="HOST:PORT of the page and of /metrics, or 'off'."
)
@click.option(
    "--data", default=Path(".elche"), show_default=True, type=click.Path(path_type=Path), help="Folder of the database."
)
@click.option("--exit-with-stdin", is_flag=True, help="End when standard input ends.")
def main(listen: str, http: str, data: Path, exit_with_stdin: bool) -> None:
    """Runs the coordinator: decides who trains what, and when ranks average.

    Beyond loopback it listens only with a token that its agents and clients know too: set ELCHE_TOKEN, or
    ELCHE_TOKEN_FILE to a file that holds it.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is said in one line, by us
    from elche_coordinator.daemon import Config, serve

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    os.umask(0o077)  # records and timelines hold what users have written
    try:
        config = Config(
            listen=listen,
            http=None if http == "off" else http,
            data=data,
            token=read_token(),
            exit_with_stdin=exit_with_stdin,
        )
        asyncio.run(serve(config))
    except ElcheError as error:
        print(f"elche-coordinator: {error}", file=sys.stderr)
        sys.exit(2)
