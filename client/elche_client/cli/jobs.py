"""The commands of `elche` for jobs and hosts of a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from elche_client.cli.options import (
    ScriptCommand,
    address_option,
    env_option,
    job_options,
    json_option,
    training_options,
)


@click.command()
@click.argument("job")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--best", is_flag=True, help="The model of the best checkpoint so far, by the monitored metric.")
@address_option
@json_option
def fetch(job: str, file: Path | None, best: bool, address: str, as_json: bool) -> int:
    """Copy the final model of JOB to FILE: by default model.safetensors, with --best best.safetensors.

    If it breaks off, what has come stays in FILE.JOB.SHA256.part, and the same command goes on there.

    \b
    Examples:
      elche fetch digits-1a2b3c4d digits.safetensors --coordinator gpu1:7717
      elche fetch digits-1a2b3c4d --best
    """
    from elche_client.commands import remote

    return remote.fetch(
        job, file or Path("best.safetensors" if best else "model.safetensors"), address, best=best, as_json=as_json
    )


@click.command()
@click.argument("job")
@click.option(
    "--rank", type=int, metavar="N", help="Print the log of this rank alone, without its number before each line."
)
@click.option("-f", "--follow", is_flag=True, help="Print what is written from then on too, until the job ends.")
@click.option("-t", "--times", is_flag=True, help="Print when each line was written, to a second.")
@address_option
@json_option
def logs(job: str, rank: int | None, follow: bool, times: bool, address: str, as_json: bool) -> int:
    """Print the end of the logs of JOB's ranks.

    \b
    Examples:
      elche logs JOB
      elche logs JOB --rank 1 -f
      elche logs JOB --times
    """
    from elche_client.commands import remote

    return remote.logs(job, rank, address, follow=follow, with_times=times, as_json=as_json)


@click.command()
@click.argument("job")
@address_option
@json_option
def checkpoint(job: str, address: str, as_json: bool) -> int:
    """Write a checkpoint of JOB with its next round.

    \b
    Example:
      elche checkpoint JOB
    """
    from elche_client.commands import remote

    return remote.checkpoint(job, address, as_json=as_json)


@click.command()
@click.argument("job", metavar="JOB|RUN")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="trace.json, or trace.html.")
@click.option("--html", "as_page", is_flag=True, help="Write an HTML page instead of a trace for Perfetto.")
@address_option
def timeline(job: str, output: Path | None, as_page: bool, address: str) -> int:
    """Write the timeline of JOB to a file: each rank's work and the coordinator's messages, with times.

    RUN is the folder of a run. A job records a timeline if it is run with --timeline true.

    \b
    Examples:
      elche run train.py --timeline true
      elche timeline runs/train-20260101-120000 -o trace.json   for ui.perfetto.dev
      elche timeline JOB --html -o trace.html                   for a browser
    """
    from elche_client.commands import remote

    output = output or Path("trace.html" if as_page else "trace.json")
    return remote.show_timeline(job, address, output, as_page=as_page)


@click.command()
@click.argument("job", metavar="JOB|RUN")
@click.option(
    "-n", "num_events", type=click.IntRange(min=0), metavar="N", help="The newest N events; all unless given."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print it as it is stored, one JSON object per line, for bug reports."
)
@address_option
def journal(job: str, num_events: int | None, as_json: bool, address: str) -> int:
    """Print the journal of JOB: each event, with the coordinator's commands and refusals.

    RUN is the folder of a run that did not succeed. Attach the output of --json to bug reports: every decision can be
    replayed from it. It contains hosts, paths and errors, but no source code, arguments or values of environment
    variables.

    \b
    Examples:
      elche journal JOB -n 20
      elche journal JOB --json > journal.jsonl
    """
    from elche_client.commands import journal as journals

    return journals.show(job, address, num_events=num_events, as_json=as_json)


@click.command()
@click.argument("job")
@click.option("--ranks", type=click.IntRange(min=1), required=True, metavar="N", help="The new number of ranks.")
@address_option
@json_option
def scale(job: str, ranks: int, address: str, as_json: bool) -> int:
    """Change the number of ranks of JOB while it trains.

    New ranks join when there are slots for them; surplus ranks, the highest, leave once their work is committed.

    \b
    Examples:
      elche scale JOB --ranks 4
    """
    from elche_client.commands import remote

    return remote.scale(job, ranks, address, as_json=as_json)


@click.command()
@click.argument("host")
@click.option("--off", is_flag=True, help="Offer HOST again.")
@address_option
@json_option
def drain(host: str, off: bool, address: str, as_json: bool) -> int:
    """Drain HOST, such as before a shutdown: its ranks leave once their work is committed, and go on elsewhere.

    A job without ranks elsewhere writes a checkpoint and waits for another host. A worker drains itself on SIGTERM.

    \b
    Examples:
      elche drain gpu-3
      elche drain gpu-3 --off
    """
    from elche_client.commands import remote

    return remote.drain(host, address, is_drained=not off, as_json=as_json)


@click.command()
@click.argument("job")
@click.option("--off", is_flag=True, help="Let JOB go on.")
@address_option
@json_option
def pause(job: str, off: bool, address: str, as_json: bool) -> int:
    """Pause the training of JOB after its open round. Its ranks keep their devices and their memory.

    \b
    Examples:
      elche pause JOB
      elche pause JOB --off
    """
    from elche_client.commands import remote

    return remote.pause(job, address, is_paused=not off, as_json=as_json)


@click.command(cls=ScriptCommand)
@click.argument("file", type=click.Path(path_type=Path), required=False)
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
    help="Jobs of higher priority get slots first, and may take them from jobs of lower priority, which go on later.",
)
@click.option(
    "--project",
    default="",
    envvar="ELCHE_PROJECT",
    show_envvar=True,
    help="Project whose slots the job takes; default: your own slots.",
)
@click.option(
    "--artifacts",
    default="",
    metavar="PLACE",
    help="Where to store the job's model and logs: a folder that workers and coordinator share, or a URL; default: the "
    "coordinator's.",
)
@click.option(
    "--on",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="What the job's devices must meet: model=*H200*, memory>=20GiB (of a GPU), host!=gpu-3, a label such as "
    "zone=eu. Repeatable.",
)
@click.option(
    "--module",
    default="",
    metavar="PACKAGE.MODULE:NAME",
    help="Take the job from a module in the folder instead of FILE.",
)
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="NAME",
    help="Environment variable whose value the job's hosts have (elche-worker --secrets). Repeatable.",
)
@click.option(
    "--requirements",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with packages that hosts install for the job too; default: those in the job's file (PEP 723).",
)
@click.option(
    "--folder",
    metavar="PATH|none",
    envvar="ELCHE_FOLDER",
    show_envvar=True,
    help="Folder that the ranks get; default: that of FILE, or of its packages. none: FILE alone.",
)
@click.option(
    "--key",
    default="",
    metavar="TEXT",
    help="Your name for this submission: repeated with it, the command finds the first job and makes no second one.",
)
@json_option
def submit(
    file: Path | None,
    address: str,
    folder: str | None,
    key: str,
    watch_it: bool,
    no_check: bool,
    as_json: bool,
    **training: Any,
) -> int:
    """Send the job in FILE to a coordinator and print the job's id.

    The ranks get the folder of FILE, except what .gitignore and .elcheignore exclude, as their working directory.
    It is uploaded if it has changed. Packages that FILE imports must be installed on the workers, or be required by
    --requirements or FILE's own metadata. Without --ranks the job takes every slot that is free when it starts.

    FILE may be a script with its own loop (Trainer of elche_worker): all of its ranks are started on one host, as
    torchrun would, once it has free slots for them. Its settings are those in the script.

    \b
    Examples:
      elche submit train.py
      elche submit train.py --coordinator gpu1:7717 --ranks 8 --watch
      elche submit jobs/train.py --folder . --priority 10 --project vision
      elche submit --module train.digits:job --secret WANDB_API_KEY
      elche submit train.py --requirements requirements.txt
      elche submit train.py --on 'device=cuda' --on 'memory>=20GiB'
      elche submit train.py --env DATA=/data -- --learning-rate 0.1
    """
    from elche_client.commands import remote

    options = job_options(**training)
    return remote.submit(
        file, options, address, folder=folder, key=key, watch_it=watch_it, as_json=as_json, checks=not no_check
    )


@click.command()
@address_option
@json_option
def jobs(address: str, as_json: bool) -> int:
    """List the jobs of a coordinator, oldest first.

    The loss is the mean training loss of the batches last reported by the ranks.

    \b
    Examples:
      elche jobs
      elche jobs --coordinator gpu1:7717 --json
    """
    from elche_client.commands import remote

    return remote.jobs(address, as_json=as_json)


@click.command()
@address_option
@json_option
def hosts(address: str, as_json: bool) -> int:
    """List the hosts of a coordinator, with the jobs on their devices.

    \b
    Examples:
      elche hosts
      elche hosts --json
    """
    from elche_client.commands import remote

    return remote.hosts(address, as_json=as_json)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--cancel", "cancels", is_flag=True, help="Cancel the trials of the sweep that have not ended.")
@address_option
@json_option
def sweep(file: Path, cancels: bool, address: str, as_json: bool) -> int:
    """Try many values of a job's settings and arguments, each in a small job on free slots.

    FILE is YAML or TOML. The command can be stopped and run again to continue; jobs go on meanwhile. Methods are grid,
    random, halving (all for few epochs, the best third for three times as many, and so on) and optuna.

    \b
    Example of FILE:
      job: train.py
      metric: accuracy
      mode: max
      method: random
      trials: 20
      settings: {epochs: 5, batch_size: [16, 32, 64]}
      arguments: {--learning-rate: {min: 0.0001, max: 0.1, log: true}}

    \b
    Examples:
      elche sweep sweep.yaml
      elche sweep sweep.yaml --cancel
    """
    from elche_client.commands import sweep_run

    return sweep_run.sweep(file, address, as_json=as_json, cancels=cancels)


@click.command()
@address_option
@json_option
@click.option(
    "--work-dir",
    type=click.Path(path_type=Path),
    default="runs",
    show_default=True,
    help="Folder in which runs or elche-worker will write.",
)
@click.option(
    "--links",
    "with_links",
    is_flag=True,
    help="Also measure the link of each pair of the coordinator's hosts, 3 s each.",
)
def doctor(address: str, work_dir: Path, with_links: bool, as_json: bool) -> int:
    """Check this machine and the connection to the coordinator for faults that keep jobs from training, with remedies.

    Exits with code 1 if there is a fault.

    \b
    Examples:
      elche doctor
      elche doctor --coordinator gpu1:7717
      elche doctor --coordinator gpu1:7717 --links
    """
    import json
    from dataclasses import asdict
    from itertools import chain

    from elche_client.commands.doctor import State, of_coordinator, of_links, of_this_machine
    from elche_client.display.formatting import printable
    from elche_client.transport import contexts

    is_default = click.get_current_context().get_parameter_source("address") is ParameterSource.DEFAULT
    of_address = of_coordinator(address, is_named=not is_default or contexts.is_named())
    found = []
    for one in chain(of_this_machine(work_dir), of_address, of_links(address) if with_links else ()):
        found.append(one)
        if not as_json:
            click.echo(printable(f"{one.state:<7}  {one.name:<15}  {one.text}"))
            if one.advice:
                click.echo(printable(f"{'':<26}-> {one.advice}"))
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found]))
    return int(any(one.state is State.FAULT for one in found))


@click.command()
@address_option
@json_option
@click.option("--every", "every_s", default=1.0, show_default=True, type=click.FloatRange(min=0.1), metavar="SECONDS")
def top(address: str, every_s: float, as_json: bool) -> int:
    """Show all jobs and devices of a coordinator, live. Ctrl-C ends it.

    \b
    Examples:
      elche top
      elche top --coordinator gpu1:7717 --every 5
    """
    from elche_client.commands import top as tops

    return tops.top(address, every_s=every_s, as_json=as_json)


@click.command()
@click.argument("job")
@address_option
@json_option
def watch(job: str, address: str, as_json: bool) -> int:
    """Show JOB until it ends. Ctrl-C stops watching, not the job.

    \b
    Example:
      elche watch JOB --coordinator gpu1:7717
    """
    from elche_client.commands import remote

    return remote.watch(job, address, as_json=as_json)


@click.command()
@click.argument("job")
@address_option
@json_option
def cancel(job: str, address: str, as_json: bool) -> int:
    """Cancel JOB. Does nothing if it has ended.

    \b
    Example:
      elche cancel JOB
    """
    from elche_client.commands import remote

    return remote.cancel(job, address, as_json=as_json)


@click.command()
@click.argument("place", type=click.Path(path_type=Path))
@click.option("--days", type=click.FloatRange(min=0), metavar="N", help="Remove what was last written over N days ago.")
@click.option("--gib", type=click.FloatRange(min=0), metavar="N", help="Then the oldest, until the rest is N GiB.")
@click.option("--dry-run", "is_dry", is_flag=True, help="Only say what would be removed.")
@address_option
@json_option
def prune(place: Path, days: float | None, gib: float | None, is_dry: bool, address: str, as_json: bool) -> int:
    """Remove the files of ended jobs in PLACE: the --work-dir of a worker, or a folder that is an artifact store.

    Run it where PLACE is, as its owner. It removes folders that are named after jobs of this coordinator that have
    ended. Those stay from which a job goes on that has not ended, and those that are not yet in the artifact store.

    \b
    Examples:
      elche prune /srv/elche --days 30 --gib 500 --dry-run
      elche prune /srv/elche-artifacts --days 365
    """
    from elche_client.commands import prune as pruning

    if days is None and gib is None:
        raise click.UsageError("say how much stays: --days N, --gib N or both")
    return pruning.prune(place, address, days=days, gib=gib, is_dry=is_dry, as_json=as_json)
