"""The command `elche`. Each command imports what it needs when it runs, so that `elche --help` is fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from elche.errors import ElcheError, JobFailed
from elche_client.cli_context import context
from elche_client.cli_init import init
from elche_client.cli_options import (
    CommandGroup,
    ScriptCommand,
    TrainingCommand,
    address_option,
    device_option,
    env_option,
    file_argument,
    job_options,
    json_option,
    local_options,
    logs_option,
    out_option,
    training_options,
)

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Exit codes: 0 success, 1 the job failed or was cancelled, 2 invalid input, 130 Ctrl-C."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors are printed by this program, in one line
    try:
        code = cli.main(arguments, prog_name="elche", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.NoSuchOption as error:
        return _refuse(_unknown_option(error))
    except click.ClickException as error:
        return _refuse(error.format_message())
    except JobFailed as error:
        return _refuse(str(error), error.traceback, exit_code=2 if error.invalid else 1)
    except ElcheError as error:
        return _refuse(str(error))
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader of the pipe has gone, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _refuse(message: str, traceback: str = "", *, exit_code: int = 2) -> int:
    from elche_client.formatting import printable, printable_lines

    if traceback:
        click.echo(printable_lines(traceback), err=True)
    click.echo(f"elche: {printable(message)}", err=True)
    return exit_code


def _unknown_option(error: click.NoSuchOption) -> str:
    from elche_client.suggestions import similar

    context = error.ctx
    known = [name for one in context.command.get_params(context) for name in one.opts] if context else []
    guesses = similar(error.option_name, [name for name in known if name.startswith("--")])
    command = context.command_path if context else "elche"
    hint = f"did you mean {' or '.join(guesses)}?" if guesses else f"`{command} --help` lists them"
    if isinstance(context and context.command, ScriptCommand) and not guesses:
        hint += "; arguments for the file come after --"
    return f"there is no option {error.option_name}: {hint}"


@click.group(cls=CommandGroup, invoke_without_command=True, context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="elche", message="elche %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train one PyTorch model on whatever devices you have.

    \b
    Examples:
      elche run examples/digits.py --ranks 2          everything on this machine
      elche submit train.py --coordinator gpu1:7717   to a coordinator that runs
      elche jobs
      elche watch JOB
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command(cls=ScriptCommand)
@file_argument
@training_options
@env_option
@device_option
@out_option
@logs_option
@json_option
@click.option("--events", "as_events", is_flag=True, help="Print one JSON object a line: everything as it happens.")
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

    Without --ranks there is one rank per GPU, or one on the CPU. The folder for model, record and logs is
    runs/NAME-DATE-TIME unless --out names one. The output of the ranks is shown as it comes. Ctrl-C writes a checkpoint
    and cancels the job.

    \b
    Examples:
      elche run train.py
      elche run train.py --ranks 2 --slow 1=2.3
      elche run train.py --device cpu --ranks 4 --epochs 3 --json
      elche run train.py --env DATA=/data -- --learning-rate 0.1
    """
    from elche_client.local_run import LocalRun
    from elche_client.script_run import ScriptRun, has_own_loop

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


@cli.command(cls=ScriptCommand)
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
    ended at a coordinator, and is resumed there.

    \b
    Examples:
      elche resume runs/digits-20260101-120000
      elche resume runs/digits-20260101-120000 --epochs 20 --ranks 3
      elche resume digits-1a2b3c4d --coordinator gpu1:7717
    """
    from elche_client.resume import resume_here, resume_job

    options = local_options(**training)
    if "://" not in job and not Path(job).exists() and file is None:
        return resume_job(job, options, address, as_json=as_json)
    return resume_here(job, file, options, device=device, out=out, as_json=as_json, shows_logs=not no_logs)


@cli.command(cls=TrainingCommand)
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@training_options
@device_option
@out_option
@logs_option
@json_option
def replay(folder: Path, device: str, out: Path | None, no_logs: bool, as_json: bool, **training: Any) -> int:
    """Repeat the run in folder RUN: the same samples on each rank, rounds at the same steps.

    \b
    Examples:
      elche replay runs/digits-20260101-120000
      elche replay runs/digits-20260101-120000 --nonfinite fail
    """
    from elche_client.resume import replay_run

    options = local_options(**training)
    return replay_run(folder, options, device=device, out=out, as_json=as_json, shows_logs=not no_logs)


@cli.command()
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
    from elche_client.resume import list_checkpoints

    return list_checkpoints(job, address, as_json=as_json)


@cli.command()
@click.argument("job")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--best", is_flag=True, help="The model of the best checkpoint so far, by the monitored metric.")
@address_option
def fetch(job: str, file: Path | None, best: bool, address: str) -> int:
    """Copy the final model of JOB to FILE: by default model.safetensors, with --best best.safetensors.

    \b
    Examples:
      elche fetch digits-1a2b3c4d digits.safetensors --coordinator gpu1:7717
      elche fetch digits-1a2b3c4d --best
    """
    from elche_client import commands

    return commands.fetch(job, file or Path("best.safetensors" if best else "model.safetensors"), address, best=best)


@cli.command()
@click.argument("job")
@click.option("--rank", type=int, metavar="N", help="Print the log of this rank alone, unchanged.")
@click.option("-f", "--follow", is_flag=True, help="Print what is written from then on too, until the job ends.")
@address_option
def logs(job: str, rank: int | None, follow: bool, address: str) -> int:
    """Print the end of the logs of JOB's ranks.

    \b
    Examples:
      elche logs JOB
      elche logs JOB --rank 1 -f
    """
    from elche_client import commands

    return commands.logs(job, rank, address, follow=follow)


@cli.command()
@click.argument("job")
@address_option
def checkpoint(job: str, address: str) -> int:
    """Write a checkpoint of JOB with its next round.

    \b
    Example:
      elche checkpoint JOB
    """
    from elche_client import commands

    return commands.checkpoint(job, address)


@cli.command()
@click.argument("job", metavar="JOB|RUN")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="trace.json, or trace.html.")
@click.option("--html", "as_page", is_flag=True, help="Write an HTML page instead of a trace for Perfetto.")
@address_option
def timeline(job: str, output: Path | None, as_page: bool, address: str) -> int:
    """Write the timeline of JOB to a file: what each rank did when, and what the coordinator told it.

    RUN is the folder of a run. A job records its timeline when it is run with --timeline true.

    \b
    Examples:
      elche run train.py --timeline true
      elche timeline runs/train-20260101-120000 -o trace.json   for ui.perfetto.dev
      elche timeline JOB --html -o trace.html                   for a browser
    """
    from elche_client import commands

    output = output or Path("trace.html" if as_page else "trace.json")
    return commands.show_timeline(job, address, output, as_page=as_page)


@cli.command()
@click.argument("job", metavar="JOB|RUN")
@click.option(
    "-n", "num_events", type=click.IntRange(min=0), metavar="N", help="The newest N events; all unless given."
)
@click.option("--json", "as_json", is_flag=True, help="Print it as it is kept, one JSON object a line: to be attached.")
@address_option
def journal(job: str, num_events: int | None, as_json: bool, address: str) -> int:
    """Print what happened to JOB, event by event, what the coordinator said to each, and what it refused.

    RUN is the folder of a run that did not succeed. What --json prints belongs to a report of a bug: whoever gets it
    can repeat every decision. It has hosts, paths and errors, but no source, no argument and no value of an environment
    variable.

    \b
    Examples:
      elche journal JOB -n 20
      elche journal JOB --json > journal.jsonl
      elche journal runs/train-20260101-120000 --json > journal.jsonl
    """
    from elche_client import journal as journals

    return journals.show(job, address, num_events=num_events, as_json=as_json)


@cli.command()
@click.argument("job")
@click.option("--ranks", type=click.IntRange(min=1), required=True, metavar="N", help="How many ranks it is to have.")
@address_option
def scale(job: str, ranks: int, address: str) -> int:
    """Change how many ranks JOB has, while it trains.

    Others join when there are slots for them, or the highest leave once their work is committed.

    \b
    Examples:
      elche scale JOB --ranks 4
    """
    from elche_client import commands

    return commands.scale(job, ranks, address)


@cli.command()
@click.argument("host")
@click.option("--off", is_flag=True, help="Offer HOST again.")
@address_option
def drain(host: str, off: bool, address: str) -> int:
    """Free HOST, before it is shut down, say: its ranks leave once their work is committed, and go on elsewhere.

    Where a job has no rank elsewhere it makes a checkpoint and waits for another host. A worker that gets SIGTERM does
    the same by itself.

    \b
    Examples:
      elche drain gpu-3
      elche drain gpu-3 --off
    """
    from elche_client import commands

    return commands.drain(host, address, is_drained=not off)


@cli.command()
@click.argument("job")
@click.option("--off", is_flag=True, help="Let JOB go on.")
@address_option
def pause(job: str, off: bool, address: str) -> int:
    """Pause the training of JOB after its open round. Its ranks keep their devices and their memory.

    \b
    Examples:
      elche pause JOB
      elche pause JOB --off
    """
    from elche_client import commands

    return commands.pause(job, address, is_paused=not off)


@cli.command(cls=ScriptCommand)
@file_argument
@training_options
@env_option
@address_option
@click.option("--watch/--no-watch", "--follow", "watch_it", help="Show the job until it ends; Ctrl-C stops watching.")
@click.option("--no-check", is_flag=True, help="Do not load the file here first; errors in it are found by the ranks.")
@click.option(
    "--priority",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Jobs with more get slots first, and may take them from those with less, which go on later.",
)
@click.option(
    "--project", default="", envvar="ELCHE_PROJECT", show_envvar=True, help="Whose slots it takes; default: your own."
)
@click.option(
    "--folder",
    metavar="PATH|none",
    envvar="ELCHE_FOLDER",
    show_envvar=True,
    help="Folder that the ranks get; default: that of FILE. none: FILE alone.",
)
@json_option
def submit(
    file: Path, address: str, folder: str | None, watch_it: bool, no_check: bool, as_json: bool, **training: Any
) -> int:
    """Send the job in FILE to a coordinator and print the job's id.

    The ranks get the folder of FILE, but for what .gitignore and .elcheignore name. It is uploaded if it has changed,
    and is their working directory. Packages that FILE imports must be installed where the ranks run. Without --ranks
    the job takes every slot that is free when it starts.

    \b
    Examples:
      elche submit train.py
      elche submit train.py --coordinator gpu1:7717 --ranks 8 --watch
      elche submit jobs/train.py --folder . --priority 10 --project vision
      elche submit train.py --env DATA=/data -- --learning-rate 0.1
    """
    from elche_client import commands

    options = job_options(**training)
    return commands.submit(
        file, options, address, folder=folder, watch_it=watch_it, as_json=as_json, checks=not no_check
    )


@cli.command()
@address_option
@json_option
def jobs(address: str, as_json: bool) -> int:
    """List the jobs of a coordinator, oldest first.

    The loss is the mean training loss of the batches that the ranks have reported last.

    \b
    Examples:
      elche jobs
      elche jobs --coordinator gpu1:7717 --json
    """
    from elche_client import commands

    return commands.jobs(address, as_json=as_json)


@cli.command()
@address_option
@json_option
def hosts(address: str, as_json: bool) -> int:
    """List the hosts of a coordinator, and what runs on their devices.

    \b
    Examples:
      elche hosts
      elche hosts --json
    """
    from elche_client import commands

    return commands.hosts(address, as_json=as_json)


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
    """Cancel JOB. Nothing happens when it has ended already.

    \b
    Example:
      elche cancel JOB
    """
    from elche_client import commands

    return commands.cancel(job, address)


cli.add_command(context)
cli.add_command(init)


if __name__ == "__main__":
    sys.exit(main())
