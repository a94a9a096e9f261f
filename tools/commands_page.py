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

Generated from the commands' help by `make generated`. Each is shown without what these share:

- Every [setting](settings.md) is an option of `run`, `submit`, `resume` and `replay`.
- `-h`, `--help`: show the help and exit. All commands have it.
- `--coordinator HOST:PORT`: address of the coordinator; several that share a database are separated by commas. Default:
  `ELCHE_COORDINATOR`, that of `elche context`, or `127.0.0.1:7717`. A command that has it says so in its last line.
- `--json`: print one JSON object; progress goes to stderr. Likewise.

Exit codes of `elche`: 0 success, 1 the job failed or was cancelled, 2 invalid input, 130 Ctrl-C.
"""
SHARED = ("--coordinator HOST:PORT", "--json", "-h, --help", "--help")
"""Options that are described once, at the beginning, if their help is that of `COMMON`."""
COMMON = ("Address of the coordinator; several that", "Print one JSON object", "Show this message and exit")
WIDTH = 118


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
    """The output of `--help` without the settings, in as few lines as can be: examples begin with `$`."""
    context = click.Context(command, info_name=name, max_content_width=WIDTH, terminal_width=WIDTH)
    text = command.get_help(context).removeprefix("Usage: ").replace(" [OPTIONS]", "", 1)
    head, _, rest = text.partition("\nSettings, which replace those of the file:\n")
    examples = rest.partition("\n\n")[2]
    lines = without_shared(f"{head}\n{examples}".splitlines())
    return "\n".join(f"  $ {line.strip()}" if line.startswith("    elche") else line for line in lines)


def without_shared(lines: list[str]) -> list[str]:
    """The help without blank lines, headings and the options that most commands share, which the last line names."""
    kept: list[str] = []
    names: list[str] = []
    is_shared = False
    for line in lines:
        is_option = line.startswith("  -")
        if is_option or not line.startswith("   "):
            is_shared = is_option and line.strip().startswith(SHARED) and any(words in line for words in COMMON)
            names += [line.split()[0]] if is_shared and not line.strip().startswith(("-h,", "--help")) else []
        if line.strip() and not is_shared and line.strip() not in ("Options:", "Example:", "Examples:"):
            kept.append(line)
    return [*kept, *([f"  and {', '.join(names)}"] if names else [])]


def page() -> str:
    """The whole page."""
    parts = [HEAD, *(f"## {name}\n\n```text\n{help_of(name, command)}\n```\n" for name, command in pages())]
    return "\n".join(parts)


if __name__ == "__main__":
    write(PAGE, page())
