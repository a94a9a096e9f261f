"""`elche token`: tokens with roles for a coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from elche_client.cli.options import LIFETIME, ROLES, CommandGroup, address_option, json_option

if TYPE_CHECKING:
    from elche_client.commands.tokens import Token


@click.group(cls=CommandGroup)
def token() -> None:
    """Tokens of a coordinator that requires them, each with a role. Needs the role operator.

    \b
    viewer    reads: the page, metrics, jobs, hosts, logs
    user      also submits jobs, changes its own, fetches models
    operator  also changes all jobs, hosts and tokens
    agent     offers devices, and nothing else

    \b
    Examples:
      elche token make anna --role user > anna.token
      elche token make prometheus --role viewer --expires never
      elche token list
      elche token revoke 3f9a1c20
    """


@token.command()
@click.argument("name")
@click.option("--role", required=True, type=click.Choice(ROLES), help="What its bearer may do.")
@click.option(
    "--expires", type=LIFETIME, default="90d", show_default=True, metavar="TIME", help="Such as 12h, 90d or never."
)
@address_option
@json_option
def make(name: str, role: str, expires: float | None, address: str, as_json: bool) -> int:
    """Make a token for NAME and print it. The coordinator stores only a hash.

    \b
    Example:
      elche token make spot-pool --role agent --expires 30d > agent.token
    """
    import json
    from datetime import timedelta

    from elche.token import Role
    from elche_client.commands.tokens import Tokens
    from elche_client.display.notices import print_notice
    from elche_client.display.output import print_made

    with Tokens(address) as tokens:
        made, text = tokens.make(name, Role(role), expires=None if expires is None else timedelta(seconds=expires))
    print_made(json.dumps({**_fields(made), "token": text}) if as_json else text, f"token {made.id} is made")
    if as_json:
        return 0
    until = f"until {made.expires_at:%Y-%m-%d %H:%M} UTC" if made.expires_at else "without an end"
    print_notice(f"token {made.id}: {name} is {role}, {until}; this text is shown once")
    return 0


@token.command(name="list")
@address_option
@json_option
def list_tokens(address: str, as_json: bool) -> int:
    """List the tokens, without the tokens themselves.

    \b
    Example:
      elche token list
    """
    import json
    from datetime import UTC, datetime

    from elche_client.commands.tokens import Tokens
    from elche_client.display.formatting import printable

    with Tokens(address) as tokens:
        found = tokens.all()
    if as_json:
        click.echo(json.dumps([_fields(one) for one in found]))
        return 0
    for one in found:
        state = f"until {one.expires_at:%Y-%m-%d %H:%M} UTC" if one.expires_at else "no end"
        if one.expires_at and one.expires_at <= datetime.now(UTC):
            state = "expired"
        click.echo(printable(f"{one.id}  {one.role:<8}  {one.name:<20}  {state}"))
    return 0


@token.command()
@click.argument("token_id", metavar="ID")
@address_option
def revoke(token_id: str, address: str) -> int:
    """Revoke a token, and end its open connections.

    \b
    Example:
      elche token revoke 3f9a1c20
    """
    from elche_client.commands.tokens import Tokens
    from elche_client.display.notices import print_notice

    with Tokens(address) as tokens:
        gone = tokens.revoke(token_id)
    print_notice(f"the token {gone.id} of {gone.name} ({gone.role}) is revoked")
    return 0


def _fields(one: Token) -> dict[str, object]:
    until = one.expires_at.isoformat() if one.expires_at else None
    facts = {"made_at": one.made_at.isoformat(), "made_by": one.made_by}
    return {"id": one.id, "name": one.name, "role": str(one.role), "expires_at": until, **facts}
