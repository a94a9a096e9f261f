"""`elche up`, `elche down` and `elche agents`: workers started through ssh, Slurm or Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from elche_client.cli.options import Command, address_option, json_option

ENGINES = ("ssh", "slurm", "ray")


class EngineCommand(click.Command):
    """A command whose arguments after `--` are for ssh or sbatch; they are the context's `obj`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            end = args.index("--")
            args, ctx.obj = args[:end], args[end + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ENGINE OPTIONS]"]


def _engine_options(command: Command) -> Command:
    return _on_option(click.argument("target", required=False, default="")(_name_option(command)))


_on_option: Callable[[Command], Command] = click.option(
    "--on", "engine", required=True, type=click.Choice(ENGINES), help="What starts the agents."
)
_name_option: Callable[[Command], Command] = click.option(
    "--name", default="elche", show_default=True, metavar="NAME", help="Name of this set of agents."
)


@click.command(cls=EngineCommand)
@_engine_options
@click.option("--agents", type=click.IntRange(0, 1000), metavar="N", help="Number of agents to reach; not with ssh.")
@click.option(
    "--gpus-per-agent",
    type=click.IntRange(0, 64),
    default=0,
    metavar="N",
    help="Number of GPUs to reserve for each agent.",
)
@click.option(
    "--worker",
    default="elche-worker",
    show_default=True,
    metavar="COMMAND",
    help="Command that starts an agent there, with options, such as '~/venv/bin/elche-worker --label zone=eu'.",
)
@click.option(
    "--token-file",
    envvar="ELCHE_TOKEN_FILE",
    show_envvar=True,
    default="",
    metavar="FILE",
    help="File with the agents' token (elche token make pool --role agent).",
)
@address_option
@json_option
@click.pass_obj
def up(
    options: Sequence[str] | None,
    engine: str,
    target: str,
    name: str,
    agents: int | None,
    gpus_per_agent: int,
    worker: str,
    token_file: str,
    address: str,
    as_json: bool,
) -> int:
    """Start or stop workers (agents) through ssh, Slurm or Ray, until their number is as requested.

    \b
    ssh     on each host of the file TARGET; options of elche-worker may stand behind a host
    slurm   an array of jobs of one node each, which come back after their time or a node's loss
    ray     detached actors of the cluster TARGET, or of RAY_ADDRESS

    Running agents stay as they are; surplus ones leave once their ranks' work is committed. Arguments after -- are
    passed to sbatch or ssh. With TLS the agents get the folder that ELCHE_TLS names.

    \b
    Examples:
      elche up --on ssh hosts.txt --coordinator gpu1:7717
      elche up --on slurm --agents 4 --gpus-per-agent 1 -- --partition gpu --time 8:00:00
      elche up --on ray --agents 4 --gpus-per-agent 1
    """
    from elche.errors import ElcheError
    from elche_client.display.notices import print_notice
    from elche_client.launchers import AgentFleet, launcher_of
    from elche_client.transport import contexts

    if not token_file and os.environ.get("ELCHE_TOKEN"):
        raise ElcheError("agents read their token from a file: name it with --token-file, rather than by ELCHE_TOKEN")
    if token_file and not Path(token_file).is_file():
        raise ElcheError(f"--token-file {token_file}: there is no such file")
    launcher = launcher_of(engine, target, options or ())
    fleet = AgentFleet(
        name=name,
        num_agents=agents,
        gpus_per_agent=gpus_per_agent,
        coordinator=address,
        worker=worker,
        token_file=token_file,
        tls=contexts.tls_of(address),
    )
    if _is_of_this_machine(address):
        print_notice(f"agents on other machines do not find {address}; --coordinator names an address that they reach")
    launcher.up(fleet)
    return _list(engine, target, options or (), name, as_json)


@click.command(cls=EngineCommand)
@_engine_options
@json_option
@click.pass_obj
def agents(options: Sequence[str] | None, engine: str, target: str, name: str, as_json: bool) -> int:
    """List the agents that an engine runs or will start. `elche hosts` lists those connected to the coordinator.

    \b
    Examples:
      elche agents --on slurm
      elche agents --on ssh hosts.txt --json
    """
    return _list(engine, target, options or (), name, as_json)


@click.command(cls=EngineCommand)
@_engine_options
@click.pass_obj
def down(options: Sequence[str] | None, engine: str, target: str, name: str) -> int:
    """Stop the agents of an engine, once their ranks' work is committed. Jobs go on with others.

    \b
    Examples:
      elche down --on slurm
      elche down --on ssh hosts.txt
    """
    from elche_client.launchers import launcher_of

    launcher_of(engine, target, options or ()).down(name)
    return 0


def _list(engine: str, target: str, options: Sequence[str], name: str, as_json: bool) -> int:
    import dataclasses
    import json

    from elche_client.display.formatting import printable
    from elche_client.launchers import launcher_of

    members = launcher_of(engine, target, options).members(name)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(one) for one in members]))
        return 0
    for one in members:
        click.echo(printable(f"{one.state:<8}  {one.id:<20}  {one.host:<20}  {one.why}".rstrip()))
    if not members:
        click.echo(f"no agents named {name}", err=True)
    return 0


def _is_of_this_machine(address: str) -> bool:
    from elche.network import is_loopback, split_address, split_addresses

    return all(is_loopback(split_address(one)[0]) for one in split_addresses(address))
