"""`elche init`: a file to begin with."""

from __future__ import annotations

from pathlib import Path

import click

KINDS = {
    "job": "elche's own loop: you give a model, data and a loss",
    "loop": "a loop of your own",
    "huggingface": "Hugging Face's Trainer",
    "lightning": "PyTorch Lightning",
}
"""Templates by name, each with its purpose."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("train.py"))
@click.option(
    "--kind",
    type=click.Choice(list(KINDS)),
    default="job",
    show_default=True,
    help="; ".join(f"{name}: {use}" for name, use in KINDS.items()) + ".",
)
def init(file: Path, kind: str) -> int:
    """Write a runnable training script to begin with, by default train.py.

    \b
    Examples:
      elche init
      elche init my_loop.py --kind loop
    """
    from importlib.resources import files

    from elche.errors import InvalidJob

    text = files("elche_client").joinpath("templates", f"{kind}.py.txt").read_text(encoding="utf-8")
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(text.replace("train.py", file.name))
    except FileExistsError:
        raise InvalidJob(f"{file} is there already: give another name, as in `elche init my_{file.name}`") from None
    except OSError as error:
        raise InvalidJob(f"{file} cannot be written: {error.strerror}") from None
    click.echo(f"wrote {file}; it runs as it is: elche run {file}")
    return 0
