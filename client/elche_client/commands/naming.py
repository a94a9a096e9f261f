"""Finds a job by its id, the beginning of its id, or its name."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from elche.errors import InvalidJob, UnknownJob, Unreachable
from elche_client.client import Client
from elche_client.display.suggestions import similar
from elche_client.events import JobView

MAX_SHOWN = 4
Answer = TypeVar("Answer")


def of_job(client: Client, meant: str, ask: Callable[[str], Answer]) -> tuple[str, Answer]:
    """Returns the id of the named job, and the result of `ask` for it. Tries the text as an id first, which needs no
    further call. Raises the errors of `ask`, `UnknownJob`, and `InvalidJob` for an ambiguous text.
    """
    try:
        return meant, ask(meant)
    except UnknownJob as error:
        if error.job_id != meant or not meant:
            raise
        job_id = find(meant, client.jobs())
        return job_id, ask(job_id)


@contextmanager
def folder_or_job(meant: str, address: str) -> Iterator[None]:
    """In the body a name that is not a folder is taken for a job: an `UnknownJob` becomes an `InvalidJob`, and an
    `Unreachable` is extended, to say that it is neither.
    """
    try:
        yield
    except UnknownJob:
        raise InvalidJob(f"{meant} is neither a folder here nor a job of the coordinator at {address}") from None
    except Unreachable as error:
        raise Unreachable(f"{meant} is not a folder here, and {error}") from error


@contextmanager
def known_as_folder(meant: str) -> Iterator[None]:
    """In the body a name is taken for the folder here that has it. An `InvalidJob` then says how to mean the job of
    that name: the folder of a job's file is often called like the job.
    """
    try:
        yield
    except InvalidJob as error:
        if os.sep in meant:
            raise
        raise InvalidJob(f"{error}. For the job {meant}, not the folder here, give the job's id") from None


def find(meant: str, views: Sequence[JobView]) -> str:
    """The id of the job that `meant` names: of the jobs with this name the one that has not ended, or else the newest.
    If there are none, `meant` is the beginning of an id. Raises `UnknownJob`, and `InvalidJob` where several jobs fit.
    """
    named = [view for view in views if view.name == meant]
    going = [view.job_id for view in named if not view.state.has_ended]
    found = going or [view.job_id for view in named[-1:]]
    found = found or [view.job_id for view in views if view.job_id.startswith(meant)]
    if len(found) == 1:
        return found[0]
    if not found:
        names = dict.fromkeys(text for view in reversed(views) for text in (view.job_id, view.name) if text)
        raise UnknownJob(meant, similar(meant, list(names)))
    shown = ", ".join(found[:MAX_SHOWN]) + (f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else "")
    raise InvalidJob(f"{meant!r} may be one of {len(found)} jobs, {shown}: give more of the id")
