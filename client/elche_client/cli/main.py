"""The command `elche`. Each command imports what it needs when it runs, so that `elche --help` is fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from elche.errors import ElcheError, HelpShown, JobFailed
from elche.output import open_standard_streams, take_any_text, use_utf8
from elche_client.cli import jobs
from elche_client.cli.certs import certs
from elche_client.cli.chaos import chaos
from elche_client.cli.context import context
from elche_client.cli.init import init
from elche_client.cli.options import (
    Program,
    ScriptCommand,
    TrainingCommand,
    address_option,
    device_option,
    env_option,
    file_argument,
    json_option,
    local_options,
    logs_option,
    out_option,
    training_options,
    way_out,
)
from elche_client.cli.plan import plan
from elche_client.cli.token import token
from elche_client.cli.up import agents, down, up

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _check_working_folder() -> None:
    """Raises `ElcheError` if it was deleted: libraries, and processes that begin there, fail in words of their own."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ElcheError("the working folder was deleted: change to one that exists") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Exit codes: 0 success, 1 the job failed or was cancelled, 2 invalid input, 130 Ctrl-C."""
    if arguments is None:
        use_utf8()
    open_standard_streams()
    take_any_text()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors are printed by this program, in one line
    try:
        _check_working_folder()
        code = cli.main(arguments, prog_name="elche", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.NoSuchOption as error:
        return _refuse(_unknown_option(error))
    except click.exceptions.NoArgsIsHelpError as error:  # `elche token` alone, as `elche` alone
        click.echo(error.format_message())
        return 0
    except click.UsageError as error:
        is_value = isinstance(error, click.BadParameter)  # also a missing one
        return _refuse(error.format_message().rstrip(".") + way_out(error.ctx, is_value=is_value))
    except click.ClickException as error:
        return _refuse(error.format_message())
    except JobFailed as error:
        return _refuse(str(error), error.traceback, exit_code=2 if error.invalid else 1)
    except HelpShown:
        return 0
    except ElcheError as error:
        return _refuse(str(error))
    except (click.Abort, KeyboardInterrupt):
        return 130
    except OSError as error:  # a full disk, a limit of the system, a folder that was made read-only meanwhile
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error) or type(error).__name__
        if unprinted := _drop_unprinted():
            text = f"standard output cannot be written: {unprinted}"
        # The reader of a pipe that has gone, such as `head`, has what it wanted.
        return 1 if isinstance(error, BrokenPipeError) else _refuse(text, exit_code=1)


def _drop_unprinted() -> str:
    """Returns why what is still to be printed cannot be, or "". Python would try again at its end, and print
    `Exception ignored` with an exit code of its own.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return str(error.strerror or error)
    return ""


def _refuse(message: str, traceback: str = "", *, exit_code: int = 2) -> int:
    from elche_client.display.formatting import printable, printable_lines

    _drop_unprinted()
    if traceback:
        click.echo(printable_lines(traceback), err=True)
    click.echo(f"elche: {printable(message)}", err=True)
    return exit_code


def _unknown_option(error: click.NoSuchOption) -> str:
    from elche_client.display.suggestions import similar

    context = error.ctx
    known = [name for one in context.command.get_params(context) for name in one.opts] if context else []
    guesses = similar(error.option_name, [name for name in known if name.startswith("--")])
    hint = f": did you mean {' or '.join(guesses)}?" if guesses else way_out(context)
    return f"there is no option {error.option_name}{hint}"


@click.group(cls=Program, invoke_without_command=True, context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="elche", message="elche %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train one PyTorch model on whatever devices you have.

    \b
    Examples:
      elche run examples/digits.py --ranks 2          train on this machine
      elche submit train.py --coordinator gpu1:7717   train at a coordinator
      elche jobs
      elche watch JOB
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@click.command(cls=ScriptCommand)
@file_argument
@training_options
@env_option
@device_option
@out_option
@logs_option
@json_option
@click.option("--events", "as_events", is_flag=True, help="Print everything as it happens, one JSON object per line.")
def run(
    file: Path,
    device: str,
    out: Path | None,
    no_logs: bool,
    as_json: bool,
    as_events: bool,
    **training: Any,
) -> int:
    """Train the job in FILE on this machine. FILE may also be a script with its own training loop and elche's Trainer.

    Without --ranks there is one rank per GPU, or one on the CPU. Model, record and logs are written to
    runs/NAME-DATE-TIME, or to the folder that --out names. The output of the ranks is shown as it comes. Ctrl-C writes
    a checkpoint and cancels the job.

    \b
    Examples:
      elche run train.py
      elche run train.py --ranks 2 --slow 1=2.3
      elche run train.py --device cpu --ranks 4 --epochs 3 --json
      elche run train.py --env DATA=/data -- --learning-rate 0.1
    """
    from elche_client.local.job_run import LocalRun
    from elche_client.local.script_run import ScriptRun
    from elche_client.options import has_own_loop

    kind = ScriptRun if has_own_loop(file) else LocalRun
    return kind(
        path=file,
        options=local_options(**training),
        device=device,
        out=out,
        as_json=as_json,
        as_events=as_events,
        shows_logs=not no_logs,
    ).run()


@click.command(cls=ScriptCommand)
@click.argument("job", metavar="JOB|PATH")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@training_options
@env_option
@device_option
@out_option
@logs_option
@address_option
@json_option
def resume(
    job: str,
    file: Path | None,
    device: str,
    out: Path | None,
    no_logs: bool,
    address: str,
    as_json: bool,
    **training: Any,
) -> int:
    """Resume a training from its newest checkpoint.

    PATH is a checkpoint, or the folder of a run. It is resumed on this machine, with the file, settings and number of
    ranks of the checkpoint and the arguments and environment of its run, unless others are given. JOB is a job that has
    ended at a coordinator; it is resumed there, and watched.

    \b
    Examples:
      elche resume runs/digits-20260101-120000
      elche resume runs/digits-20260101-120000 --epochs 20 --ranks 3
      elche resume digits-1a2b3c4d --coordinator gpu1:7717
    """
    from elche_client.commands.resume import resume_here, resume_job

    options = local_options(**training)
    if "://" not in job and not Path(job).exists() and file is None:
        return resume_job(job, options, address, as_json=as_json)
    return resume_here(job, file, options, device=device, out=out, as_json=as_json, shows_logs=not no_logs)


@click.command(cls=TrainingCommand)
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@training_options
@device_option
@out_option
@logs_option
@json_option
@click.option("--one-process", is_flag=True, help="Repeat all ranks in one process; for runs with --audit true.")
@click.option(
    "--until-round", type=click.IntRange(min=1), metavar="N", help="End with this round; implies --one-process."
)
@click.option(
    "--attempt",
    type=click.IntRange(min=1),
    metavar="N",
    help="Repeat this attempt of a run that went back to a checkpoint, not the newest; implies --one-process.",
)
def replay(
    folder: Path,
    device: str,
    out: Path | None,
    no_logs: bool,
    as_json: bool,
    one_process: bool,
    until_round: int | None,
    attempt: int | None,
    **training: Any,
) -> int:
    """Repeat the run in folder RUN: the same samples on each rank, rounds at the same steps.

    With --one-process everything is repeated as in the run, also ranks that died or joined. The command then says
    whether the parameters are equal. Exit codes: 0 equal, 1 different, 2 the recording lacks something.

    \b
    Examples:
      elche replay runs/digits-20260101-120000
      elche replay runs/digits-20260101-120000 --until-round 17
    """
    from elche_client.commands.resume import replay_here, replay_run

    options = local_options(**training)
    if one_process or until_round is not None or attempt is not None:
        return replay_here(
            folder, options, until_round=until_round, attempt=attempt, device=device, out=out, as_json=as_json
        )
    return replay_run(folder, options, device=device, out=out, as_json=as_json, shows_logs=not no_logs)


@click.command()
@click.argument("job", metavar="JOB|PATH")
@address_option
@json_option
def checkpoints(job: str, address: str, as_json: bool) -> int:
    """List the checkpoints of a job at a coordinator, or in the folder of a run.

    \b
    Examples:
      elche checkpoints runs/digits-20260101-120000
      elche checkpoints digits-1a2b3c4d --coordinator gpu1:7717
    """
    from elche_client.commands.resume import list_checkpoints

    return list_checkpoints(job, address, as_json=as_json)


@click.command()
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
def audit(folders: tuple[Path, ...], as_json: bool) -> int:
    """Prove, by what its ranks wrote, that the run in folder RUN trained every sample of every epoch once.

    For a job on several hosts, name the folder of each host.

    The run needs --audit true. The command compares the ranks' files with the record of rounds, the result, the
    checkpoints and, where there is one, the journal. It shares no code with the programs that wrote them. Exit codes:
    0 proven, 1 refuted, with a line per violation, 2 undecided, because files are missing or damaged.

    \b
    Examples:
      elche run train.py --audit true
      elche audit runs/train-20260101-120000
    """
    import elche_audit
    from elche_client.display.formatting import printable
    from elche_client.display.record import to_json

    verdict = elche_audit.judge(*folders)
    if as_json:
        click.echo(to_json(elche_audit.document(verdict), indent=1))
    else:
        click.echo("\n".join(map(printable, elche_audit.lines(verdict))))
    return elche_audit.exit_code(verdict)


cli.add_section("Train", run, resume, replay, init, plan)
cli.add_section(
    "Jobs",
    *(jobs.submit, jobs.sweep, jobs.jobs, jobs.watch, jobs.top, jobs.logs, jobs.fetch),
    *(jobs.checkpoint, checkpoints, jobs.pause, jobs.scale, jobs.cancel),
)
cli.add_section("Cluster", jobs.hosts, jobs.drain, jobs.prune, up, agents, down)
cli.add_section("Debug", jobs.doctor, jobs.timeline, jobs.journal, audit, chaos)
cli.add_section("Access", context, token, certs)


if __name__ == "__main__":
    sys.exit(main())
