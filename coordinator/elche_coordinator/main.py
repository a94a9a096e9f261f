"""The command `elche-coordinator`."""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from elche.errors import ElcheError
from elche.logs import FORMATS, print_reason, set_up
from elche.logs import VARIABLE as LOG_VARIABLE
from elche.network import DEFAULT_ADDRESS
from elche.output import use_utf8
from elche.tls import VARIABLE
from elche.token import read_token

EXAMPLES = """
\b
Examples:
  elche-coordinator
  elche-coordinator --listen 127.0.0.1:7717 --data /var/lib/elche
  elche-coordinator --store postgresql://elche@db.lab/elche
  elche-coordinator --artifacts s3://lab-models/elche
  elche-coordinator --quota ada=4 --quota '*=2'
  ELCHE_TOKEN_FILE=/run/secrets/elche elche-coordinator --listen 0.0.0.0:7717 --http 0.0.0.0:7718
  elche-coordinator --listen 0.0.0.0:7717 --tls ca/gpu1 --client-certificates
  elche-coordinator backup /backup/monday --data /var/lib/elche
"""


def read_quotas(context: click.Context, option: click.Parameter, given: Sequence[str]) -> dict[str, int]:
    """Parses the quotas: slots per project. Raises `click.BadParameter`."""
    quotas: dict[str, int] = {}
    for text in given:
        project, _, slots = text.rpartition("=")
        if not project or not slots.isdecimal():
            raise click.BadParameter(f"{text!r} is not PROJECT=SLOTS, such as ada=4 or '*=2'", context, option)
        if quotas.setdefault(project, int(slots)) != int(slots):
            raise click.BadParameter(f"{project} has two quotas", context, option)
    return quotas


class _Program(click.Group):
    """Tells a wrong usage in one line, as `elche` does, and not with the usage."""

    def main(self, *given: Any, **options: Any) -> Any:
        try:
            return super().main(*given, **options | {"standalone_mode": False})
        except click.ClickException as error:
            words = error.format_message().rstrip(".")
            print(f"elche-coordinator: {words}; see `elche-coordinator --help`", file=sys.stderr)
            sys.exit(2)
        except click.Abort:  # Ctrl-C
            sys.exit(130)


@click.group(cls=_Program, epilog=EXAMPLES, invoke_without_command=True, subcommand_metavar="[COMMAND]")
@click.option("--listen", default=DEFAULT_ADDRESS, show_default=True, help="HOST:PORT of the gRPC server.")
@click.option(
    "--http", default="127.0.0.1:7718", show_default=True, help="HOST:PORT of the page and of /metrics, or 'off'."
)
@click.option(
    "--data", default=Path(".elche"), show_default=True, type=click.Path(path_type=Path), help="Folder of the database."
)
@click.option(
    "--store",
    default="",
    envvar="ELCHE_STORE",
    show_envvar=True,
    metavar="URL",
    help="A PostgreSQL database instead of a file in --data; of several coordinators with the same one, one leads.",
)
@click.option(
    "--tls",
    envvar=VARIABLE,
    show_envvar=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Encrypt, with the tls.crt and tls.key in this folder, which may be replaced at any time.",
)
@click.option(
    "--client-certificates",
    "asks_certificates",
    is_flag=True,
    envvar="ELCHE_CLIENT_CERTIFICATES",
    show_envvar=True,
    help="Clients and agents must present certificates that the ca.crt in that folder has signed (`elche certs`).",
)
@click.option(
    "--quota",
    "quotas",
    multiple=True,
    metavar="PROJECT=SLOTS",
    envvar="ELCHE_QUOTAS",
    show_envvar=True,
    callback=read_quotas,
    help="How many slots a project, or a user without one, may have at once; '*': each that is not named. Repeatable.",
)
@click.option(
    "--keep-jobs",
    default=10_000,
    show_default=True,
    envvar="ELCHE_KEEP_JOBS",
    show_envvar=True,
    type=click.IntRange(min=0),
    help="How many jobs that have ended are remembered; the oldest are forgotten. Checkpoints and models stay.",
)
@click.option(
    "--artifacts",
    default="",
    envvar="ELCHE_ARTIFACTS",
    show_envvar=True,
    metavar="PLACE",
    help="Folder that workers share, or URL that fsspec knows, for what jobs leave: it outlives their hosts.",
)
@click.option(
    "--grace",
    default=25.0,
    show_default=True,
    envvar="ELCHE_GRACE",
    show_envvar=True,
    type=click.FloatRange(min=0),
    help="Seconds that jobs may take to make a checkpoint on SIGTERM, before it stops.",
)
@click.option(
    "--log-format",
    envvar=LOG_VARIABLE,
    default="text",
    show_default=True,
    show_envvar=True,
    type=click.Choice(FORMATS),
    help="Lines of the log on standard error: text, or JSON objects with level, UTC time, job and rank as fields.",
)
@click.option(
    "--allow-chaos",
    "allows_chaos",
    is_flag=True,
    envvar="ELCHE_ALLOW_CHAOS",
    show_envvar=True,
    help="Let `elche chaos` break ranks, workers and this coordinator on purpose. For trials, not for production.",
)
@click.option("--exit-with-stdin", is_flag=True, help="Exit when standard input closes.")
@click.pass_context
def main(
    context: click.Context,
    listen: str,
    http: str,
    data: Path,
    store: str,
    tls: Path | None,
    asks_certificates: bool,
    quotas: Mapping[str, int],
    keep_jobs: int,
    artifacts: str,
    grace: float,
    log_format: str,
    allows_chaos: bool,
    exit_with_stdin: bool,
) -> None:
    """Run the coordinator, which decides what each rank trains and when ranks average.

    On SIGTERM or Ctrl-C, or when its terminal is closed, jobs that train make a checkpoint, and then it stops; a second
    SIGTERM or Ctrl-C stops it at once.

    To listen beyond loopback it needs a token that its agents and clients share: set ELCHE_TOKEN, or ELCHE_TOKEN_FILE
    to a file that contains it. Or it asks them for certificates.
    """
    use_utf8()
    if context.invoked_subcommand is not None:
        return
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors are printed by this program, in one line
    try:
        # Here, so that --help and a wrong option need not wait for gRPC and the packages of the database.
        from elche_coordinator.config import Config
        from elche_coordinator.daemon import serve
        from elche_coordinator.limits.open_files import raise_limit

        set_up(log_format)
        os.umask(0o077)  # records and timelines contain users' source code and output
        raise_limit()
        config = Config(
            listen=listen,
            http=None if http == "off" else http,
            data=data,
            store=store,
            token=read_token(),
            tls=tls,
            asks_certificates=asks_certificates,
            quotas=quotas,
            keep_jobs=keep_jobs,
            artifacts=artifacts,
            grace_s=grace,
            allows_chaos=allows_chaos,
            exit_with_stdin=exit_with_stdin,
        )
        asyncio.run(serve(config))
    except ElcheError as error:
        print_reason("elche-coordinator", str(error), log_format)
        sys.exit(2)
    except KeyboardInterrupt:  # before it takes signals itself
        sys.exit(130)


_data = click.option(
    "--data",
    default=Path(".elche"),
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder of the coordinator.",
)


@main.command("backup")
@click.argument("folder", type=click.Path(path_type=Path))
@_data
def back_up_command(folder: Path, data: Path) -> None:
    """Backs a coordinator up into a new FOLDER, also while it runs.

    The backup has its database, with jobs and tokens, and the jobs' folders; checkpoints and models stay where jobs
    have written them. Back a PostgreSQL database up with `pg_dump`.
    """
    from elche_coordinator.lifecycle.backup import back_up

    _print(lambda: back_up(data, folder))


@main.command("restore")
@click.argument("folder", type=click.Path(path_type=Path))
@_data
def restore_command(folder: Path, data: Path) -> None:
    """Restores the backup in FOLDER to a folder without a coordinator, so that one can be started there.

    Changes since the backup are lost; jobs that ran go on from their newest checkpoints.
    """
    from elche_coordinator.lifecycle.backup import restore

    _print(lambda: restore(folder, data))


def _print(work: Callable[[], str]) -> None:
    os.umask(0o077)
    try:
        print(work())
    except ElcheError as error:
        print(f"elche-coordinator: {error}", file=sys.stderr)
        sys.exit(2)
