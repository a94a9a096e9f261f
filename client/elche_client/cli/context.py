"""`elche context`: coordinators by name."""

from __future__ import annotations

import click

from elche_client.cli.options import CommandGroup, json_option


@click.group(cls=CommandGroup)
def context() -> None:
    """Named coordinators, so that commands need no --coordinator.

    \b
    Examples:
      elche context add lab --coordinator gpu1:7717 --token-file ~/lab.token
      elche context use lab
      ELCHE_CONTEXT=home elche jobs
    """


@context.command()
@click.argument("name")
@click.option(
    "--coordinator",
    required=True,
    metavar="HOST:PORT",
    help="Address of the coordinator, or several, separated by commas.",
)
@click.option("--token-file", default="", metavar="FILE", help="File with the coordinator's token.")
@click.option("--tls", default="", metavar="DIR", help="Folder with the ca.crt of its authority, if it has TLS.")
def add(name: str, coordinator: str, token_file: str, tls: str) -> int:
    """Add or change NAME. The first context becomes the current one.

    \b
    Example:
      elche context add lab --coordinator gpu1:7717
    """
    import os

    from elche_client.transport import contexts
    from elche_client.transport.connection import checked_address

    found = contexts.load()
    file, folder = (os.path.abspath(os.path.expanduser(one)) if one else "" for one in (token_file, tls))
    found.known[contexts.check_name(name)] = contexts.Context(checked_address(coordinator), file, folder)
    found.current = found.current or name
    contexts.save(found)
    return 0


@context.command()
@click.argument("name")
def use(name: str) -> int:
    """Use NAME from now on.

    \b
    Example:
      elche context use lab
    """
    from elche_client.transport import contexts

    found = contexts.load()
    found.of(name)
    found.current = name
    contexts.save(found)
    return 0


@context.command()
@click.argument("name")
def remove(name: str) -> int:
    """Forget NAME.

    \b
    Example:
      elche context remove lab
    """
    from elche_client.transport import contexts

    found = contexts.load()
    found.of(name)
    del found.known[name]
    found.current = "" if found.current == name else found.current
    contexts.save(found)
    return 0


@context.command(name="list")
@json_option
def list_contexts(as_json: bool) -> int:
    """List the contexts; * marks the current one.

    \b
    Example:
      elche context list
    """
    import json
    import os
    from dataclasses import asdict

    from elche_client.display.formatting import printable
    from elche_client.transport import contexts

    found = contexts.load()
    current = os.environ.get(contexts.CHOICE) or found.current
    if as_json:
        listed = {name: asdict(one) for name, one in found.known.items()}
        click.echo(json.dumps({"current": current or None, "contexts": listed}))
        return 0
    for name, one in found.known.items():
        star = "*" if name == current else " "
        click.echo(printable(f"{star} {name}  {one.coordinator}  {one.token_file}  {one.tls}".rstrip()))
    return 0
