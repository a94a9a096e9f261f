"""Requests of clients about jobs, by gRPC or from the page, checked in one place."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import PurePath

from elche.artifacts import BEST, MODEL
from elche.errors import InvalidJob, TooMuch, UnknownJob
from elche_coordinator.archive.artifacts import Artifacts
from elche_coordinator.archive.catalogue import JobCatalogue
from elche_coordinator.core.describe import JobView
from elche_coordinator.core.messages.events import (
    CheckpointRequested,
    DrainRequested,
    JobCancelled,
    JobSubmitted,
    PauseRequested,
    ScaleRequested,
)
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.reports import JobResult
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.driver import Driver
from elche_coordinator.job_states import DECIDED
from elche_coordinator.roles import CALLER, HAS_CHANGED
from elche_coordinator.storage.bundles import Bundles
from elche_coordinator.streams.agents import Agents
from elche_coordinator.streams.transfers import Rest

MAX_NAMED = 20
"""Hosts that an error names."""
WRITE_S = 8.0
"""Seconds for which a request waits for the disk; shorter than the clients' timeout."""


async def submit(driver: Driver, spec: JobSpec, key: str = "") -> JobId:
    """Submits a job; returns its id once its record is durable.

    Raises `TooMuch` when there are too many jobs, or the record cannot be written; the job is cancelled then.
    """
    try:
        driver.open_jobs.require_room(CALLER.get().name, spec)
    except TooMuch:
        driver.sources.discard(spec.source_hash)
        raise
    if driver.writer.failing:
        driver.sources.discard(spec.source_hash)
        raise TooMuch(f"{problem(driver)}; nothing was submitted")
    job_id = new_job_id(spec.name)
    driver.handle(JobSubmitted(job_id=job_id, spec=spec, submitted_at=time.time(), key=key))
    try:
        await taken(driver, otherwise="the job was withdrawn")
    except TooMuch:
        # Its client is told that nothing was submitted, and may submit it again.
        driver.handle(JobCancelled(job_id=job_id))
        raise
    return job_id


async def taken(driver: Driver, *, otherwise: str = "it does this once it can") -> None:
    """Waits until what a caller has asked for is durable. Raises `TooMuch` when that takes too long; `otherwise`: what
    comes of it then.
    """
    try:
        async with asyncio.timeout(WRITE_S):
            await driver.durable()
    except TimeoutError:
        why = driver.writer.failing or f"the disk has not responded for {WRITE_S:.0f} s"
        raise TooMuch(f"the coordinator cannot write its records ({why}); {otherwise}") from None


async def resume(
    driver: Driver,
    catalogue: JobCatalogue,
    artifacts: Artifacts,
    bundles: Bundles,
    view: JobView,
    settings: Mapping[str, str],
    submitted_by: str = "",
) -> tuple[JobId, str]:
    """Submits an ended job again, from its newest checkpoint. Returns the new job's id and the checkpoints' folder.

    Raises `InvalidJob` for a job that has not ended, has no checkpoint, is complete, or was started by a script, and
    for one whose file or folder is not here any more.
    """
    result = catalogue.result(view.job_id)
    if result is None:
        if view.state == "paused":
            raise InvalidJob(f"job {view.job_id} is paused; {_going_on(view)}")
        raise InvalidJob(f"job {view.job_id} has not ended; cancel it first, or let it go on")
    spec, checkpoints = catalogue.submission(view.job_id), result.checkpoints
    if spec.is_attached:
        where = f"ELCHE_RESUME={checkpoints[-1].path} " if checkpoints else ""
        raise InvalidJob(f"job {view.job_id} is a script with its own loop: start the script again, {where}to resume")
    if spec.is_loop and result.outcome == "succeeded":
        raise InvalidJob(f"job {view.job_id} has its own training loop, and has succeeded: submit the script again")
    if spec.is_loop and settings:
        raise InvalidJob(f"job {view.job_id} has its own training loop: set {', '.join(settings)} in the script")
    if not checkpoints:
        raise InvalidJob(f"job {view.job_id} has no checkpoint to resume from; submit it again")
    _refuse_complete(result, view.job_id, settings)
    stored = artifacts.checkpoints_place(view.job_id, checkpoints[-1].path)
    spec = replace(spec, resume=stored) if stored else checkpoints[-1].resumed_by(spec)
    spec = replace(
        spec,
        settings={**spec.settings, **settings},
        submitted_by=submitted_by or spec.submitted_by,
    )
    try:
        driver.sources.load(spec.source_hash)
    except KeyError:
        raise InvalidJob(f"the file of job {view.job_id} is not in the database any more; submit it again") from None
    if spec.bundle:  # also marks it as used
        bundles.require(spec.bundle)
    return await submit(driver, spec), spec.resume


def problem(driver: Driver) -> str:
    """Why the coordinator decides nothing: its database cannot be written; empty if it can."""
    why = driver.writer.failing
    return f"the coordinator cannot write its records ({why})" if why else ""


def _refuse_complete(result: JobResult, job_id: str, settings: Mapping[str, str]) -> None:
    """Raises `InvalidJob` for a complete training, unless the settings ask for more epochs or steps."""
    if result.outcome != "succeeded" or result.ended_early:
        return
    if json.loads(settings.get("epochs", "0")) <= result.epochs and "max_steps" not in settings:
        raise InvalidJob(
            f"job {job_id} is complete, with {result.epochs} epochs: there is nothing to resume unless --epochs is more"
        )


def own_view(catalogue: JobCatalogue, job_id: str) -> JobView:
    """The view of a job that the caller may change. Raises `UnknownJob` or `Forbidden`."""
    view, spec = catalogue.view(job_id), catalogue.spec(job_id)
    if view is None or spec is None:
        raise UnknownJob(job_id)
    CALLER.get().require_own(spec.submitted_by, job_id)
    return view


def model_chunks(
    catalogue: JobCatalogue, agents: Agents, artifacts: Artifacts, view: JobView, rest: Rest
) -> AsyncGenerator[bytes]:
    """The job's model, or the rest of it, from its host, or from the artifact store where none has it any more. Raises
    `InvalidJob`.
    """
    result = catalogue.result(view.job_id)
    spec = catalogue.spec(view.job_id)
    if spec is not None and spec.is_loop:
        raise InvalidJob(f"job {view.job_id} has its own training loop, and such scripts save their models themselves")
    if result is None or not result.model:
        raise InvalidJob(f"job {view.job_id} has no model; only a job that has succeeded has one")
    ask = partial(agents.ask_for_model, view.job_id, result, rest)
    absent = f"the host that has the model is not here any more; the model is {result.model} there"
    return artifacts.from_host([ask], view.job_id, MODEL, absent, rest=rest)


def best_weights(
    catalogue: JobCatalogue, agents: Agents, artifacts: Artifacts, view: JobView, rest: Rest
) -> AsyncGenerator[bytes]:
    """The best weights of a job, or the rest of them, from a host that has them: of the final model, or before that of
    the best checkpoint. Raises `InvalidJob` when there is none, or no connected host has it.
    """
    result = catalogue.result(view.job_id)
    if result is not None and result.model_is and result.best_epoch is not None and not result.best_problem:
        holders = agents.holders(view.job_id, AgentId(result.model_agent_id), result.model_folder)
        if holders or artifacts.has(view.job_id, BEST):
            ask = partial(agents.ask_for_model, view.job_id, result, rest, best=True)
            return artifacts.from_host([ask], view.job_id, BEST, "", rest=rest)
    best = next((one for one in view.checkpoints if one.is_best), None)
    if best is None:
        raise InvalidJob(f"job {view.job_id} has no best checkpoint: that needs `monitor`, and an epoch's evaluation")
    if "://" in best.path:
        files = "model.safetensors (ema.safetensors of a job with ema)"
        raise InvalidJob(f"the best checkpoint of job {view.job_id} is {best.path}: read its {files} there")
    asks = [partial(agents.ask_for_checkpoint, view.job_id, one, best.path, rest) for one in agents.hosts_of(view)]
    absent = f"no host of job {view.job_id} is here any more; its best checkpoint is {best.path} there"
    return artifacts.from_host(asks, view.job_id, artifacts.weights_of(view.job_id, best.path), absent, rest=rest)


def cancel(driver: Driver, view: JobView) -> str:
    """Cancels a job, unless its outcome is decided; returns its state before."""
    HAS_CHANGED.set(view.state not in DECIDED)
    driver.handle(JobCancelled(job_id=JobId(view.job_id)))
    return view.state


def pause(driver: Driver, view: JobView, *, is_paused: bool) -> None:
    """Pauses a job after its open round, or lets it go on. Raises `InvalidJob` for one that does not train."""
    if view.state not in ("training", "waiting", "paused"):
        raise InvalidJob(f"job {view.job_id} is {view.state}; only a job that trains can be paused or go on")
    HAS_CHANGED.set((view.state == "paused") != is_paused)
    driver.handle(PauseRequested(job_id=JobId(view.job_id), is_paused=is_paused))


def scale(driver: Driver, view: JobView, num_ranks: int) -> int:
    """Changes a job's number of ranks; returns the previous one. Raises `InvalidJob`."""
    if num_ranks < 1:
        raise InvalidJob("a job has at least 1 rank; pause it to have none train")
    before = driver.core.num_wanted(JobId(view.job_id))
    if before is None:
        why = "has ended" if view.state in DECIDED else "repeats a recording, or is a script with its own loop"
        raise InvalidJob(f"the number of ranks of job {view.job_id} cannot be changed: it {why}")
    if (spec := driver.core.spec(JobId(view.job_id))) is not None:
        user = CALLER.get().name and spec.submitted_by
        driver.open_jobs.require_kind(user, spec.scaled(num_ranks))
    HAS_CHANGED.set(before != num_ranks)
    driver.handle(ScaleRequested(job_id=JobId(view.job_id), num_ranks=num_ranks))
    return before


def drain(driver: Driver, name: str, *, is_drained: bool) -> int:
    """Drains all hosts of this name, or the one with this agent id, or ends that; returns the number of ranks that they
    have. Raises `InvalidJob` when none is connected.
    """
    found = [host for host in driver.agents.hosts() if name in (host.host, host.agent_id)]
    if not found:
        there = ", ".join(sorted({host.host for host in driver.agents.hosts()})[:MAX_NAMED]) or "none"
        raise InvalidJob(f"no host {name!r} is connected; connected are {there}")
    HAS_CHANGED.set(any(host.is_drained != is_drained for host in found))
    for host in found:
        driver.handle(DrainRequested(agent_id=host.agent_id, is_drained=is_drained))
    return sum(len(set(host.ranks.values())) for host in found)


def _going_on(view: JobView) -> str:
    """How a paused job is let go on."""
    return f"`elche pause {view.job_id} --off` lets it go on"


def request_checkpoint(driver: Driver, view: JobView) -> None:
    """Requests a checkpoint with the next round. Raises `InvalidJob` for a job that does not train."""
    if view.state == "paused":
        raise InvalidJob(f"job {view.job_id} is paused, and a checkpoint is made with a round; {_going_on(view)}")
    if view.state not in ("training", "waiting"):
        raise InvalidJob(f"job {view.job_id} is {view.state}; only a job that trains writes checkpoints")
    driver.handle(CheckpointRequested(job_id=JobId(view.job_id)))


def new_job_id(name: str) -> JobId:
    """A new job id that begins with the job's name."""
    return JobId(f"{_stem(name)}-{secrets.token_hex(4)}")


def _stem(name: str) -> str:
    letters = "".join(c if c.isalnum() else "-" for c in PurePath(name).name.lower())[:40].strip("-")
    return letters or "job"
