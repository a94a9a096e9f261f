"""Writes docs/commands.md, the reference of all commands, from the commands themselves.

python tools/commands_page.py          # writes it
python tools/commands_page.py --check  # fails when it is not what the commands say
"""

from collections.abc import Iterator

import click
from fresh import ROOT, write

from elche_client.cli import cli
from elche_coordinator.main import main as coordinator
from elche_worker.agent.main import main as worker

PAGE = ROOT / "docs" / "commands.md"
HEAD = """# Commands

Generated from the commands by `make generated`. Exit codes of `elche`: 0 success, 1 the job failed or was cancelled,
2 something that was given is not valid, 130 Ctrl-C. Every [setting](settings.md) is an option of `run`, `submit`,
`resume` and `replay`; they are not repeated here. Nor are these, whose names stand at the end of a command that has
them:

- `--coordinator HOST:PORT`: address of the coordinator; several that share a database are separated by commas. Unless
  given: `ELCHE_COORDINATOR`, that of `elche context`, or `127.0.0.1:7717`.
- `--json`: print one JSON object; progress goes to stderr.
- `-h`, `--help`: show the command's help and exit.
"""
SHARED = ("--coordinator HOST:PORT", "--json", "-h, --help", "--help")
"""Options that are described once, at the beginning, if their help is that of `COMMON`."""
COMMON = ("Address of the coordinator; several that", "Print one JSON object", "Show this message and exit")


def pages() -> Iterator[tuple[str, click.Command]]:
    """Every command with its whole name."""
    for name, command in sorted(cli.commands.items()):
        if isinstance(command, click.Group):
            yield from ((f"elche {name} {inner}", one) for inner, one in sorted(command.commands.items()))
        else:
            yield f"elche {name}", command
    yield "elche-coordinator", coordinator
    yield from ((f"elche-coordinator {name}", command) for name, command in sorted(coordinator.commands.items()))
    yield "elche-worker", worker


def help_of(name: str, command: click.Command) -> str:
    """The output of `--help`, without the settings."""
    context = click.Context(command, info_name=name, max_content_width=100, terminal_width=100)
    text = command.get_help(context)
    head, _, rest = text.partition("\nSettings, which replace those of the file:\n")
    examples = rest.partition("\n\n")[2]
    return without_shared(f"{head.rstrip()}\n\n{examples}".rstrip())


def without_shared(text: str) -> str:
    """The help without the descriptions of the options that most commands share; their names are in its last line."""
    kept: list[str] = []
    names: list[str] = []
    is_shared = False
    for line in text.splitlines():
        is_option = line.startswith("  -")
        if is_option or not line.startswith("   "):
            is_shared = is_option and line.strip().startswith(SHARED) and any(words in line for words in COMMON)
            names += [line.split()[0].rstrip(",")] if is_shared else []
        if not is_shared:
            kept.append(line)
    if kept[-1] == "Options:":
        kept.pop()
    return "\n".join(
        [*kept, *([f"Also: {', '.join('--help' if name == '-h' else name for name in names)}"] if names else [])]
    )


def page() -> str:
    """The whole page."""
    parts = [HEAD, *(f"## {name}\n\n```text\n{help_of(name, command)}\n```\n" for name, command in pages())]
    return "\n".join(parts)


if __name__ == "__main__":
    write(PAGE, page())
