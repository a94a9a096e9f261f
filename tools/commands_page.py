"""Writes docs/commands.md, the reference of all commands, from the commands themselves.

python tools/commands_page.py          # writes it
python tools/commands_page.py --check  # fails when it is not what the commands say
"""

import re
from collections.abc import Iterator

import click
from fresh import ROOT, write

from elche_client.cli.main import cli
from elche_coordinator.main import main as coordinator
from elche_worker.agent.main import main as worker

PAGE = ROOT / "docs" / "commands.md"
HEAD = """# Commands

Generated from the commands' help by `make generated`. Options that several commands have are named in the first line of
each, and described here. Every command has `-h`, `--help`; `run`, `submit`, `resume` and `replay` also have an option
for every [setting](settings.md). Exit codes of `elche`: 0 success, 1 the job failed or was cancelled, 2 invalid input,
130 Ctrl-C.

- `--coordinator HOST:PORT`: address of the coordinator; several that share a database are separated by commas. Default:
  `ELCHE_COORDINATOR`, that of `elche context`, or `127.0.0.1:7717`.
- `--json`: print one JSON object; progress goes to stderr.
- `--ranks N`: number of ranks. `MIN..MAX` or `MIN+`: begin with MIN; others join when there are slots.
- `--slow RANK=FACTOR`: slow a rank down to FACTOR times its own time per batch, to simulate a slow device. Repeatable.
- `--verify`: compare the ranks' parameters after every round; a difference fails the job.
- `--env NAME=VALUE`: an environment variable for the file; NAME alone passes its value from here. Repeatable.
- `--device DEVICE`: auto (the default), cpu, cuda, cuda:1, ...
- `--out DIR`: folder for model, record and logs. `--no-logs`: do not show the output of the ranks.
"""
SHARED = {
    "--coordinator": "Address of the coordinator; several that",
    "--json": "Print one JSON object; progress",
    "-h,": "Show this message and exit",
    "--help": "Show this message and exit",
    "--ranks": "Number of ranks. MIN..MAX",
    "--slow": "Slow a rank down to FACTOR",
    "--verify": "Compare the ranks' parameters",
    "--env": "Set an environment variable for the file",
    "--device": "auto, cpu, cuda",
    "--out": "Folder for model, record and logs",
    "--no-logs": "Do not show the output",
}
"""Options that `HEAD` describes, with words of their help: an option of the same name with another help is shown."""
EXAMPLE = re.compile(r"^    (?=(\w+=\S+ )?elche)")
WIDTH = 118


def sections() -> Iterator[tuple[str, list[str]]]:
    """The titles of `elche --help`, each with the help of its commands; the other programs come last."""
    for title, names in cli.sections.items():
        yield title, [text for name in names for text in helps(f"elche {name}", cli.commands[name])]
    yield "Programs", [*helps("elche-coordinator", coordinator, is_own=True), help_of("elche-worker", worker)]


def helps(name: str, command: click.Command, *, is_own: bool = False) -> list[str]:
    """The help of a command, or of each command in a group, and with `is_own` of the group itself."""
    if not isinstance(command, click.Group):
        return [help_of(name, command)]
    inner = [help_of(f"{name} {one}", command.commands[one]) for one in sorted(command.commands)]
    return [help_of(name, command), *inner] if is_own else inner


def help_of(name: str, command: click.Command) -> str:
    """The output of `--help` without the settings, in as few lines as can be: examples begin with `$`."""
    context = click.Context(command, info_name=name, max_content_width=WIDTH, terminal_width=WIDTH)
    text = command.get_help(context).removeprefix("Usage: ")
    head, _, rest = text.partition("\nSettings, which replace those of the file:\n")
    usage, *lines = [*head.splitlines(), *rest.partition("\n\n")[2].splitlines()]
    kept, names = without_shared(lines)
    options = [f"[{name}]" for name in names if name not in ("-h,", "--help")]
    if any(line.startswith("  -") for line in kept):
        options.append("[OPTIONS]")
    whole = " ".join(usage.replace("[OPTIONS]", " ".join(options), 1).split())
    plain = f"  $ {usage.replace(' [OPTIONS]', '', 1)}"
    examples = [EXAMPLE.sub("  $ ", line) for line in kept]
    return "\n".join([whole, *(line for line in examples if line != plain)])


def without_shared(lines: list[str]) -> tuple[list[str], list[str]]:
    """The help without blank lines, headings and `SHARED`, and the names of these."""
    kept: list[str] = []
    names: list[str] = []
    is_shared = False
    for line in lines:
        if line.startswith("  -"):
            option = line.split()[0]
            is_shared = option in SHARED and SHARED[option] in line
            names += [option] if is_shared else []
        elif not line.startswith("   "):
            is_shared = False
        if line.strip() and not is_shared and line.strip() not in ("Options:", "Example:", "Examples:"):
            kept.append(line)
    return kept, names


def page() -> str:
    """The whole page."""
    parts = ["\n".join([f"## {title}\n\n```text", "\n\n".join(texts), "```\n"]) for title, texts in sections()]
    return "\n".join([HEAD, *parts])


if __name__ == "__main__":
    write(PAGE, page())
