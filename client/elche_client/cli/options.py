"""The options and argument types that the commands of `elche` share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from elche.errors import InvalidJob
from elche.network import DEFAULT_ADDRESS
from elche.settings import SETTINGS, Setting
from elche.token import Role

if TYPE_CHECKING:
    from elche_client.options import JobOptions

MAX_RANKS = 10_000
"""The number of ranks that MIN+ means."""
ROLES = [role.value for role in Role]
UNITS = {"m": 60, "h": 3600, "d": 86_400}
"""Seconds of the units of a lifetime."""
MAX_DAYS = 3650
"""Longest lifetime in days."""
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
"""Units of times, in seconds."""
Command = TypeVar("Command", bound=Callable[..., Any])
Value = TypeVar("Value")


def quantity_of(text: str, units: dict[str, float]) -> float | None:
    """The value of a text such as "25ms" in the base unit; None for another text, and for 0."""
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?([A-Za-z/]+)", text.strip(), re.ASCII)
    value = float(found[1]) * units.get(found[2], 0.0) if found else 0.0
    return value or None


class Parsed(click.ParamType[Value]):
    """The type of an argument that a function parses, which raises `ValueError` with what is wrong."""

    def __init__(self, name: str, parse: Callable[[str], Value]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Value:
        """Returns the value. Raises click's `BadParameter` for a text that is none."""
        try:
            parsed: Value = self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return parsed


def slow_factor(text: str) -> tuple[int, float]:
    """RANK=FACTOR."""
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise ValueError(f"{text!r} is not RANK=FACTOR, such as 1=2.3") from None


def rank_count(text: str) -> tuple[int, int]:
    """N, MIN..MAX, or MIN+ without a maximum: the job begins with MIN ranks and has at most MAX."""
    try:
        least, most = 0, int(text) if text.isascii() and text.isdigit() else 0
        if text.endswith("+"):
            least, most = int(text[:-1]), MAX_RANKS
        elif ".." in text:
            least, most = (int(part) for part in text.split(".."))
    except ValueError:
        most = 0
    if most < 1 or least < 0 or least > most or (least == 0 and not text.isdigit()):
        raise ValueError(f"{text!r} is neither a number of ranks, at least 1, nor a range such as 2..8 or 2+")
    return least, most


def lifetime(text: str) -> float | None:
    """Seconds of a time such as 12h or 90d; None for `never`."""
    if text == "never":
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", text, re.ASCII)
    seconds = int(found[1]) * UNITS[found[2]] if found else 0
    if not 0 < seconds <= MAX_DAYS * UNITS["d"]:
        raise ValueError(f"{text!r} is neither a time such as 30m, 12h or 90d, up to {MAX_DAYS}d, nor `never`")
    return float(seconds)


LIFETIME = Parsed("time", lifetime)


def variable(text: str) -> tuple[str, str]:
    """NAME=VALUE, or NAME alone for its value in this environment."""
    name, equals, value = text.partition("=")
    if not equals and name not in os.environ:
        raise ValueError(f"{name} has no value: write {name}=VALUE, or set it in the environment")
    return name, value if equals else os.environ[name]


class SettingOption(click.Option):
    """An option that replaces a setting of the file; the help lists these separately."""


def setting_option(setting: Setting) -> Callable[[Command], Command]:
    """The option of one setting: `--batch-size` for `batch_size`."""

    def parse(context: click.Context, option: click.Parameter, text: str | None) -> None:
        if text is not None:
            context.ensure_object(dict)[setting.name] = setting.parse(text)

    metavar = setting.metavar if len(setting.metavar) < 30 else "TEXT"
    return click.option(
        setting.flag, cls=SettingOption, metavar=metavar, help=setting.help, callback=parse, expose_value=False
    )


class TrainingCommand(click.Command):
    """A command whose help lists its own options first, then the settings of the file."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, is_setting in (("Options", False), ("Settings, which replace those of the file", True)):
            options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
            shown = [one for one in options if isinstance(one, SettingOption) is is_setting]
            rows = [row for row in (one.get_help_record(ctx) for one in shown) if row is not None]
            with formatter.section(title):
                formatter.write_dl(rows)


class ScriptCommand(TrainingCommand):
    """A command that passes everything after `--` to the user's file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta["arguments"] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENT...]"]


def way_out(context: click.Context | None, *, is_value: bool = False) -> str:
    """What follows a wrong usage: where the command says how it is used. `is_value`: only a value was wrong."""
    if context is None:
        return ""
    may_be_for_file = isinstance(context.command, ScriptCommand) and not is_value
    after = "; arguments for the file come after --" if may_be_for_file else ""
    return f"; see `{context.command_path} --help`{after}"


class CommandGroup(click.Group):
    """A group whose help has the whole first sentence of each command's help."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggests only commands that begin alike: click's guess for `train` is `drain`."""
        from elche_client.display.suggestions import similar

        if self.get_command(ctx, typed := args[0]) is None:
            known = [name for name in self.list_commands(ctx) if name[:1] == typed[:1].lower()]
            guesses = similar(typed, known)
            hint = f": did you mean {' or '.join(guesses)}?" if guesses else way_out(ctx)
            raise click.ClickException(f"there is no command {typed!r}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_section(formatter, "Commands", self.list_commands(ctx))

    def format_section(self, formatter: click.HelpFormatter, title: str, names: Iterable[str]) -> None:
        width = max(len(name) for name in self.commands)
        with formatter.section(title):
            formatter.write_dl(
                [(f"{name:<{width}}", self.commands[name].get_short_help_str(limit=1000)) for name in names]
            )


class Program(CommandGroup):
    """The whole program, whose help lists its commands by purpose."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.sections: dict[str, list[str]] = {}
        """Names of commands, by the title under which the help lists them."""

    def add_section(self, title: str, *commands: click.Command) -> None:
        """Adds commands, and lists them in the help in this order."""
        for command in commands:
            self.add_command(command)
        self.sections[title] = [str(command.name) for command in commands]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self.sections.items():
            self.format_section(formatter, title, names)


env_option = click.option(
    "--env",
    type=Parsed("NAME=VALUE", variable),
    multiple=True,
    metavar="NAME=VALUE",
    help="Set an environment variable for the file; NAME alone passes its value from here. Can be repeated.",
)
logs_option = click.option("--no-logs", is_flag=True, help="Do not show the output of the ranks.")


def training_options(command: Command) -> Command:
    """The options of a job besides its file."""
    options = [
        click.option(
            "--ranks",
            type=Parsed("N|MIN..MAX|MIN+", rank_count),
            metavar="N",
            help="Number of ranks. MIN..MAX or MIN+: begin with MIN; others join when there are slots (elche submit).",
        ),
        click.option(
            "--slow",
            type=Parsed("RANK=FACTOR", slow_factor),
            multiple=True,
            metavar="RANK=FACTOR",
            help="Slow a rank down to FACTOR times its own time per batch, to simulate a slow device.",
        ),
        click.option(
            "--verify",
            is_flag=True,
            help="Compare the ranks' parameters after every round; a difference fails the job.",
        ),
        *(setting_option(setting) for setting in SETTINGS.values()),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _default_address() -> str:
    from elche_client.transport.contexts import address

    return address()


address_option = click.option(
    "--coordinator",
    "address",
    envvar="ELCHE_COORDINATOR",
    default=_default_address,
    show_default=f"that of `elche context`, or {DEFAULT_ADDRESS}",
    show_envvar=True,
    metavar="HOST:PORT",
    help="Address of the coordinator; several that share a database are separated by commas.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
file_argument = click.argument("file", type=click.Path(path_type=Path))
device_option = click.option(
    "--device", default="auto", show_default=True, metavar="DEVICE", help="auto, cpu, cuda, cuda:1, ..."
)
out_option = click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder for model, record and logs."
)


def job_options(
    *,
    ranks: tuple[int, int] | None,
    slow: Sequence[tuple[int, float]],
    verify: bool,
    env: Sequence[tuple[str, str]] = (),
    requirements: Path | None = None,
    **others: Any,
) -> JobOptions:
    """The options of a job, from those of its command; `others` are fields of `JobOptions`. Raises `InvalidJob`."""
    from elche.requirements import parse_requirements
    from elche_client.options import JobOptions, read_source

    least, most = ranks or (0, 0)
    context = click.get_current_context()
    return JobOptions(
        num_ranks=most,
        min_ranks=least,
        slow_factors=dict(slow),
        settings=context.ensure_object(dict),
        verify_rounds=verify,
        arguments=context.meta.get("arguments", ()),
        environment=dict(env),
        requirements=() if requirements is None else parse_requirements(read_source(requirements, is_job=False)),
        **others,
    )


def local_options(**training: Any) -> JobOptions:
    """The options of a job on this machine, whose devices are all available from the beginning."""
    options = job_options(**training)
    if options.min_ranks:
        raise InvalidJob("a range of ranks is for `elche submit`; on this machine --ranks is one number")
    return options
