"""`elche certs`: certificates for coordinators, agents and people, of an authority of one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from elche_client.cli.options import LIFETIME, ROLES, Command, CommandGroup, json_option

if TYPE_CHECKING:
    from datetime import timedelta

    from elche_client.commands.certificates import Holder

NEEDS_END = "a certificate must end: give a time such as 90d"


@click.group(cls=CommandGroup)
def certs() -> None:
    """Certificates for TLS, signed by an authority that the first command creates.

    Each is a subfolder of the authority's folder. Copy it to its holder, and name it there by ELCHE_TLS or --tls.
    Running programs use a renewed folder without a restart. Keep ca.key where you make certificates, and nowhere else.

    \b
    Examples:
      elche certs server gpu1.lab 10.0.0.5
      elche certs client pool --role agent --expires 7d
      elche certs list
      elche-coordinator --listen 0.0.0.0:7717 --tls certs/gpu1.lab --client-certificates
      ELCHE_TLS=certs/pool elche-worker --coordinator gpu1.lab:7717
    """


def _options(command: Command) -> Command:
    expires = click.option(
        "--expires", type=LIFETIME, default="90d", show_default=True, metavar="TIME", help="Such as 12h or 90d."
    )
    return _dir_option(expires(json_option(command)))


_dir_option: Callable[[Command], Command] = click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default="certs",
    show_default=True,
    help="The authority's folder.",
)


@certs.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_options
def server(names: tuple[str, ...], folder: Path, expires: float | None, as_json: bool) -> int:
    """Make a certificate for a coordinator with these NAMEs: host names and addresses. It is also valid for localhost.

    \b
    Example:
      elche certs server gpu1.lab 10.0.0.5
    """
    from elche_client.commands.certificates import Authority

    return _print(Authority(folder).server(list(names), expires=_duration(expires)), as_json)


@certs.command()
@click.argument("name")
@click.option("--role", required=True, type=click.Choice(ROLES), help="What its holder may do (elche token --help).")
@_options
def client(name: str, role: str, folder: Path, expires: float | None, as_json: bool) -> int:
    """Make a certificate for NAME, an agent or a person, for a coordinator that requires them.

    \b
    Example:
      elche certs client anna --role user
    """
    from elche_client.commands.certificates import Authority

    return _print(Authority(folder).client(name, role, expires=_duration(expires)), as_json)


@certs.command(name="list")
@_dir_option
@json_option
def list_certificates(folder: Path, as_json: bool) -> int:
    """List the certificates in the authority's folder, with their expiry dates.

    \b
    Example:
      elche certs list
    """
    import json
    from datetime import UTC, datetime

    from elche_client.commands.certificates import Authority
    from elche_client.display.formatting import printable

    found = Authority(folder).all()
    if as_json:
        click.echo(json.dumps([_fields(one) for one in found]))
        return 0
    for one in found:
        state = f"until {one.expires_at:%Y-%m-%d %H:%M} UTC" if one.expires_at > datetime.now(UTC) else "expired"
        click.echo(printable(f"{one.role or 'server':<8}  {', '.join(one.names):<30}  {state}  {one.folder}"))
    return 0


def _duration(seconds: float | None) -> timedelta:
    from datetime import timedelta

    if seconds is None:
        raise click.BadParameter(NEEDS_END, param_hint="--expires")
    return timedelta(seconds=seconds)


def _print(made: Holder, as_json: bool) -> int:
    import json

    from elche_client.display.notices import print_notice

    if as_json:
        click.echo(json.dumps(_fields(made)))
        return 0
    click.echo(made.folder)
    print_notice(f"{', '.join(made.names)}: {made.role or 'server'}, until {made.expires_at:%Y-%m-%d %H:%M} UTC")
    return 0


def _fields(one: Holder) -> dict[str, object]:
    until = one.expires_at.isoformat()
    return {"folder": str(one.folder), "names": list(one.names), "role": one.role or "server", "expires_at": until}
