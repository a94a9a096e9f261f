"""The command `elche-coordinator`."""

import asyncio
import logging
import os
import sys
from pathlib import Path

import click

from elche.errors import ElcheError

EXAMPLES = """
\b
Examples:
  elche-coordinator
  elche-coordinator --listen 127.0.0.1:7717 --data /var/lib/elche
  ELCHE_TOKEN=... elche-coordinator --listen 0.0.0.0:7717
"""


@click.command(epilog=EXAMPLES)
@click.option("--listen", default="127.0.0.1:7717", show_default=True, help="HOST:PORT of the control plane.")
@click.option("--metrics", default="127.0.0.1:7718", show_default=True, help="HOST:PORT of /metrics, or 'off'.")
@click.option(
    "--data", default=Path(".elche"), show_default=True, type=click.Path(path_type=Path), help="Folder of the database."
)
@click.option("--exit-with-stdin", is_flag=True, help="End when standard input ends.")
@click.option("--token", envvar="ELCHE_TOKEN", hidden=True, help="Set ELCHE_TOKEN instead.")
def main(listen: str, metrics: str, data: Path, exit_with_stdin: bool, token: str | None) -> None:
    """Runs the coordinator: decides who trains what, and when ranks average.

    Beyond loopback it listens only with a token: set ELCHE_TOKEN for it, its agents and its clients.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is said in one line, by us
    from elche_coordinator.daemon import Config, serve

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = Config(
            listen=listen,
            metrics=None if metrics == "off" else metrics,
            data=data,
            token=token,
            exit_with_stdin=exit_with_stdin,
        )
        asyncio.run(serve(config))
    except ElcheError as error:
        print(f"elche-coordinator: {error}", file=sys.stderr)
        sys.exit(2)
