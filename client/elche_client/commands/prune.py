"""`elche prune`: removes what ended jobs left in a folder with a folder for each job, by age and bytes.

Such a folder is a worker's work folder, or an artifact store in a file system. It needs no record of what is there: the
names of the folders are those of the jobs, and the coordinator knows which of them have ended.
"""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

import click

from elche.artifacts import NOT_STORED
from elche.errors import InvalidJob
from elche_client.client import Client
from elche_client.display.formatting import printable, quantity
from elche_client.display.notices import print_notice
from elche_client.display.record import to_json
from elche_client.events import JobView

DAY_S = 86_400.0
BLOCK_BYTES = 512
"""Of `st_blocks`."""


@dataclass(frozen=True, slots=True)
class Left:
    """The folder of a job that has ended."""

    job_id: str
    num_bytes: int
    """What it takes of the disk."""
    written_s: float
    """When something in it was last written, in seconds since 1970."""


def prune(place: Path, address: str, *, days: float | None, gib: float | None, is_dry: bool, as_json: bool) -> int:
    """Removes the folders; returns 1 if one could not be removed. Raises `InvalidJob` for what is no folder."""
    try:
        there = {entry.name for entry in os.scandir(place) if entry.is_dir(follow_symlinks=False)}
    except OSError as error:
        raise InvalidJob(f"{place} cannot be read: {error.strerror}") from None
    with Client(address) as client:
        views = client.jobs()
    # Looked at after the list was fetched: a job's files are there before it has ended.
    left = [_left(place, view.job_id) for view in views if view.job_id in there and _may_go(view, views)]
    gone = list(too_much(left, older_than_s=None if days is None else days * DAY_S, gib=gib))
    problems = {} if is_dry else _remove(place, gone)
    removed = [one for one in gone if one.job_id not in problems]
    kept_bytes = sum(one.num_bytes for one in left) - sum(one.num_bytes for one in removed)
    for job_id, problem in problems.items():
        print_notice(f"{place / job_id} cannot be removed: {problem}")
    if as_json:
        click.echo(to_json({"removed": [one.job_id for one in removed], "kept_bytes": kept_bytes}))
    else:
        for one in removed:
            age = f"{(time.time() - one.written_s) / DAY_S:.1f} days old"
            click.echo(printable(f"{one.job_id}: {quantity(one.num_bytes, 'B')}, {age}"))
        verb = "would be removed" if is_dry else "removed"
        click.echo(f"{len(removed)} of {len(left)} ended jobs' folders {verb}; {quantity(kept_bytes, 'B')} stay")
    return int(bool(problems))


def too_much(left: Iterable[Left], *, older_than_s: float | None, gib: float | None) -> Iterator[Left]:
    """Yields what is older, and then the oldest until the rest takes at most so many GiB."""
    by_age = sorted(left, key=lambda one: one.written_s)
    num_bytes, now_s = sum(one.num_bytes for one in by_age), time.time()
    for one in by_age:
        is_old = older_than_s is not None and now_s - one.written_s > older_than_s
        if not is_old and (gib is None or num_bytes <= gib * 2**30):
            return
        num_bytes -= one.num_bytes
        yield one


def _may_go(view: JobView, views: Iterable[JobView]) -> bool:
    """False for a job that has not ended, of which a file is yet to be stored, or from which another one begins."""
    if not view.state.has_ended or NOT_STORED in view.artifacts:
        return False
    return not any(view.job_id in PurePath(one.resume).parts for one in views if not one.state.has_ended)


def _left(place: Path, job_id: str) -> Left:
    num_bytes, written_s = 0, 0.0
    for folder, _, names in os.walk(place / job_id):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            with suppress(FileNotFoundError):
                stat = os.lstat(path)
                num_bytes += stat.st_blocks * BLOCK_BYTES
                written_s = max(written_s, stat.st_mtime)
    return Left(job_id, num_bytes, written_s)


def _remove(place: Path, gone: Iterable[Left]) -> dict[str, str]:
    """Removes the folders; returns why not, by job."""
    problems = {}
    for one in gone:
        try:
            shutil.rmtree(place / one.job_id)
        except OSError as error:
            problems[one.job_id] = f"{error.filename}: {error.strerror}"
    return problems
