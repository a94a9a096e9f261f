"""Writes docs/settings.md from the declarations in `elche.settings`, or checks that it is fresh."""

from dataclasses import MISSING, fields
from math import inf

from fresh import ROOT, write

from elche.policies import POLICIES
from elche.settings import SETTINGS, Setting, Settings

TARGET = ROOT / "docs" / "settings.md"
DEFAULTS = {one.name: one.default for one in fields(Settings)}
BOUNDLESS = 2**31
"""Limits from here on are those of what numbers are stored in, and are not shown."""
PLAIN = {"whole": "whole number", "number": "number", "flag": "`true`, `false`", "word": "text", "pair": "RANK=RATIO"}


def values(setting: Setting) -> str:
    """The values that it may have, as the command line takes them."""
    words = [f"`{word}`" for word in setting.choices] or [_plain(setting)]
    words += [f"`{word}`" for word in setting.also]
    return ", ".join([*words, "`none`"] if setting.may_be_none else words)


def _plain(setting: Setting) -> str:
    kind, least = PLAIN[setting.kind], f"{setting.least:g}"
    if setting.kind not in ("whole", "number") or setting.least == -inf:
        return kind
    if setting.below >= BOUNDLESS:
        return f"{kind}, at least {least}"
    return f"{kind}, {least} to " + (f"below {setting.below:g}" if setting.kind == "number" else f"{setting.below - 1}")


def default(setting: Setting) -> str:
    """The value that holds where none is given."""
    value = DEFAULTS[setting.name]
    if value is MISSING:
        return "must be given"
    return "empty" if value == "" else f"`{setting.unparse(value)}`"


def row(setting: Setting) -> str:
    """Its line of a table."""
    return f"| `{setting.name}` | {values(setting)} | {default(setting)} | {setting.help} |"


def table(*, is_shared: bool) -> str:
    """The settings that the coordinator reads too, or those of the ranks alone."""
    rows = [row(setting) for setting in SETTINGS.values() if setting.is_shared is is_shared]
    return "\n".join(["| setting | values | default | what it does |", "|---|---|---|---|", *rows])


def ignored() -> str:
    """Which of them a policy refuses."""
    refused = {policy: ", ".join(f"`{name}`" for name in traits.ignores) for policy, traits in POLICIES.items()}
    return "\n".join(
        f"With `policy` `{policy}` these have no effect and may not be given: {names}."
        for policy, names in refused.items()
        if names
    )


def page() -> str:
    """The whole page."""
    return (
        "# Settings\n\nWritten from the declarations in `proto/elche/settings.py` by `make generated`. Each is an "
        "argument of `TrainingJob`, and an option of `elche run`, `submit`, `resume` and `replay`: `--batch-size 32` "
        "for `batch_size`. A job file can give functions and objects, too: see "
        "[your own model](tutorials/model.md).\n\n"
        "## Read by the coordinator and the ranks\n\nAll ranks of a job must have the same values.\n\n"
        f"{table(is_shared=True)}\n\n{ignored()}\n\n## Read by the ranks alone\n\n{table(is_shared=False)}\n"
    )


if __name__ == "__main__":
    write(TARGET, page())
