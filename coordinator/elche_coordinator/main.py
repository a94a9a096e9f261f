"""The command `elche-coordinator`."""

import asyncio
import logging
import os
import sys
from pathlib import Path

import click

from elche.errors import ElcheError
from elche.network import DEFAULT_ADDRESS
from elche.token import read_token


class OneLine(logging.Formatter):
    """Formats a message as one line: text from outside may contain line breaks and terminal control codes."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line, with an escape for each character that is not printable."""
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
@click.option("--listen", default=DEFAULT_ADDRESS, show_default=True, help="HOST:PORT of the gRPC server.")
@click.option(
    "--http", default="127.0.0.1:7718", show_default=True, help="HOST:PORT of the page and of /metrics, or 'off'."
)
@click.option(
    "--data", default=Path(".elche"), show_default=True, type=click.Path(path_type=Path), help="Folder of the database."
)
@click.option("--exit-with-stdin", is_flag=True, help="Exit when standard input closes.")
def main(listen: str, http: str, data: Path, exit_with_stdin: bool) -> None:
    """Runs the coordinator, which decides what each rank trains and when ranks average.

    To listen beyond loopback it needs a token that its agents and clients share: set ELCHE_TOKEN, or ELCHE_TOKEN_FILE
    to a file that contains it.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors are printed by this program, in one line
    from elche_coordinator.daemon import Config, serve

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    os.umask(0o077)  # records and timelines contain users' source code and output
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
