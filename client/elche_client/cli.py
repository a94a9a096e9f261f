"""The command `elche`. What a command needs is imported when it runs: `elche --help` comes at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from elche.errors import ElcheError, JobFailed

if TYPE_CHECKING:
    from elche_client.options import JobOptions

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_ADDRESS = "127.0.0.1:7717"
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. The exit code: 0 done, 1 the job failed or was cancelled, 2 bad input."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is said in one line, by us
    try:
        code = cli.main(arguments, prog_name="elche", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        return _refuse(error.format_message())
    except JobFailed as error:
        return _refuse(str(error), error.traceback, exit_code=2 if error.invalid else 1)
    except ElcheError as error:
        return _refuse(str(error))
    except (click.Abort, KeyboardInterrupt):
        return 130


def _refuse(message: str, traceback: str = "", *, exit_code: int = 2) -> int:
    from elche_client.quantities import plain, plain_lines

    if traceback:
        click.echo(plain_lines(traceback), err=True)
    click.echo(f"elche: {plain(message)}", err=True)
    return exit_code


class SlowFactor(click.ParamType[tuple[int, float]]):
    """RANK=FACTOR."""

    name = "RANK=FACTOR"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        rank, _, factor = str(value).partition("=")
        try:
            return int(rank), float(factor)
        except ValueError:
            self.fail(f"{value!r} is not RANK=FACTOR, such as 1=2.3", param, ctx)


def training_options(command: Command) -> Command:
    """What can be said about a job besides its file."""
    options = [
        click.option("--ranks", type=int, metavar="N", help="How many ranks train."),
        click.option(
            "--slow",
            type=SlowFactor(),
            multiple=True,
            metavar="RANK=FACTOR",
            help="Let a rank take FACTOR times its own time per batch: a stand-in for a slow device.",
        ),
        click.option("--epochs", type=int, metavar="N", help="Replaces the file's number of epochs."),
        click.option("--seed", type=int, metavar="N", help="Replaces the file's seed."),
        click.option("--policy", metavar="cadence|async|sync", help="Replaces the file's averaging policy."),
        click.option("--backend", metavar="auto|nccl|gloo|cpu", help="Replaces the file's averaging backend."),
        click.option("--verify", is_flag=True, help="Compare the ranks' parameters after every round."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


address_option = click.option(
    "--coordinator",
    "address",
    envvar="ELCHE_COORDINATOR",
    default=DEFAULT_ADDRESS,
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT",
    help="Where the coordinator listens.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
file_argument = click.argument("file", type=click.Path(path_type=Path))


@click.group(invoke_without_command=True, context_settings=SETTINGS)
@click.version_option(package_name="elche", message="elche %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train one PyTorch model on whatever devices you have.

    \b
    Examples:
      elche run examples/digits.py --ranks 2 --slow 1=2.3   everything on this machine
      elche submit train.py --coordinator gpu1:7717         to a coordinator that runs
      elche jobs
      elche watch JOB
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command()
@file_argument
@training_options
@click.option("--device", default="auto", show_default=True, metavar="DEVICE", help="auto, cpu, cuda, cuda:1, ...")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder for model, record and logs.")
@json_option
def run(file: Path, device: str, out: Path | None, as_json: bool, **training: Any) -> int:
    """Train the job in FILE on this machine.

    Without --ranks there is one rank per GPU, or one on the CPU. The folder for model, record and logs is
    runs/NAME-DATE-TIME unless --out names one. Ctrl-C cancels the job.

    \b
    Examples:
      elche run train.py
      elche run train.py --ranks 2 --slow 1=2.3
      elche run train.py --device cpu --ranks 4 --epochs 3 --json
    """
    from elche_client.local import LocalRun

    options = _job_options(**training)
    return LocalRun(path=file, options=options, device=device, out=out, as_json=as_json).run()


@cli.command()
@file_argument
@training_options
@address_option
@click.option("--watch/--no-watch", "watch_it", help="Stay and show the job until it ends.")
@json_option
def submit(file: Path, address: str, watch_it: bool, as_json: bool, **training: Any) -> int:
    """Send the job in FILE to a coordinator and print the job's id.

    Without --ranks the job takes every slot that is free when it starts.

    \b
    Examples:
      elche submit train.py
      elche submit train.py --coordinator gpu1:7717 --ranks 8 --watch
    """
    from elche_client import commands

    return commands.submit(file, _job_options(**training), address, watch_it=watch_it, as_json=as_json)


@cli.command()
@address_option
@json_option
def jobs(address: str, as_json: bool) -> int:
    """List the jobs that a coordinator knows, oldest first.

    \b
    Examples:
      elche jobs
      elche jobs --coordinator gpu1:7717 --json
    """
    from elche_client import commands

    return commands.jobs(address, as_json=as_json)


@cli.command()
@click.argument("job")
@address_option
@json_option
def watch(job: str, address: str, as_json: bool) -> int:
    """Show JOB until it ends. Ctrl-C stops watching, not the job.

    \b
    Example:
      elche watch JOB --coordinator gpu1:7717
    """
    from elche_client import commands

    return commands.watch(job, address, as_json=as_json)


@cli.command()
@click.argument("job")
@address_option
def cancel(job: str, address: str) -> int:
    """Stop JOB. Cancelling a job that has ended changes nothing.

    \b
    Example:
      elche cancel JOB
    """
    from elche_client import commands

    return commands.cancel(job, address)


def _job_options(
    *,
    ranks: int | None,
    slow: Sequence[tuple[int, float]],
    epochs: int | None,
    seed: int | None,
    policy: str | None,
    backend: str | None,
    verify: bool,
) -> JobOptions:
    from elche_client.options import JobOptions

    if ranks is not None and ranks < 1:
        raise click.UsageError(f"--ranks must be at least 1, not {ranks}")
    return JobOptions(
        num_ranks=ranks or 0,
        slow_factors=dict(slow),
        seed=seed,
        epochs=epochs,
        policy=policy,
        backend=backend,
        verify_rounds=verify,
    )


if __name__ == "__main__":
    sys.exit(main())
