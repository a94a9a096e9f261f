"""The main function of a rank's process."""

import json
import os
import signal
import socket
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import grpc
import torch

from elche.channel import open_channel
from elche.errors import LEFT_ALONE, MISSING, ElcheError, InvalidJob, PeerLost
from elche.extent import Extent
from elche.manifest import NoCheckpoint
from elche.output import notice
from elche.own_modules import path_of
from elche.ready import MAX_TENSORS, MAX_TENSORS_CHARS, ready_message
from elche.settings import AgreedSettings, shared_values
from elche.v1 import rank_pb2
from elche_worker.collectives.nccl import keep_survivors_alive
from elche_worker.collectives.operations import CollectiveFailed, OperationStuck
from elche_worker.data.build import build_dataset, build_eval_dataset, build_order
from elche_worker.data.dataset import Shards
from elche_worker.data.fetching import Fetch
from elche_worker.data.lease_loader import LeaseLoader, shows_lost_worker
from elche_worker.data.prefetch import new_transfer
from elche_worker.data.sample_figures import look_at
from elche_worker.device.build import build_of
from elche_worker.device.faults import is_device_fault
from elche_worker.device.kinds import kind_of
from elche_worker.device.rng import seed_all
from elche_worker.device.streams import DeviceStreams, new_streams, pin_accumulators
from elche_worker.device.transfer import to_device
from elche_worker.model.batch_size import is_auto, largest_that_fits, nominal_batch_size, rank_batch_size
from elche_worker.model.checkpoint import Loaded, load, new_like, new_whole
from elche_worker.model.layout import Layout
from elche_worker.model.modes import eval_mode_notice
from elche_worker.model.own_state import build_own_state
from elche_worker.model.step import (
    Built,
    TrainStep,
    build_model,
    is_out_of_memory,
    merge_of,
    possible_precision,
    why_mean,
)
from elche_worker.process.descriptors import CLOSED, OpenDescriptor
from elche_worker.process.ending import end, forget_handlers
from elche_worker.process.leaving import ALONE_AFTER_S, leave_on_sigterm
from elche_worker.rank.bundle import enter_folder
from elche_worker.rank.distributed_group import DistributedGroup, await_abandoned, await_failure, report_failure
from elche_worker.rank.follower import follow
from elche_worker.rank.loop import Leave, RankLoop, StoppedAlone
from elche_worker.rank.packages import enter_packages
from elche_worker.rank.parts import Parts
from elche_worker.rank.replica import Replica
from elche_worker.rank.replica_group import MEMBER_SEED, ReplicaGroup
from elche_worker.rank.script import become_script
from elche_worker.session.control import Control
from elche_worker.session.launch import Launch
from elche_worker.session.links import Links
from elche_worker.session.session import LOST, Session, sendable
from elche_worker.session.stopped import StoppedRank
from elche_worker.sharding.jobs import sharding_of
from elche_worker.telemetry.nvml import slice_of
from elche_worker.telemetry.timeline import SpanRecorder
from elche_worker.user.as_begun import import_as_begun, keep_modules, read_own_modules
from elche_worker.user.device import Device
from elche_worker.user.events import send_events_to
from elche_worker.user.job import JobDefinition
from elche_worker.user.kept import kept_aside_notice, other_optimizers_notice
from elche_worker.user.loading import (
    UserCodeRaised,
    as_a_script,
    describe_raised,
    leave_if_forked,
    load_job,
    message_of,
    with_settings,
)
from elche_worker.user.strategy import Strategy

LEAVE_GRACE_S = 3.0
"""Seconds for which a rank that was told to leave may stay in user code or a collective before the process is ended."""
MEMBER_GRACE_S = 2.0
"""Seconds for which a process of a replica group waits before it reports an error that may be a failed collective."""
PEERS_GRACE_S = 10.0
"""Seconds for which a process of a replica group waits before it reports a failed collective: enough for the agent,
even on a busy host, to report how the first process of the group ended, and to end the others.
"""
VERDICT_S = 10.0
"""Seconds for which a failed rank waits to be told to leave, which shows that the coordinator has its error."""
READ_BETWEEN = (
    "samples are read between batches and not ahead of them: only the thread that made the data set can read it. With "
    "num_workers they are read ahead, if __getitem__ opens what is bound to a thread when it is first called"
)
"""Notice for a data set that another thread cannot read."""
UNSTEADY = (
    "the stream that dataset() returned gives another first sample when it is read again. If it draws its order with a "
    "generator of its own, several ranks, or worker processes, train some samples twice and others never: let it draw "
    "from random, numpy.random or torch, which elche seeds alike wherever it is read, or seed its generator in __iter__"
)
"""Notice for a stream whose order may differ between its readers."""
ROUNDS_FORMAT = 4
"""Version of what ranks tell each other in rounds (rows of the header, digests), and of what they compute of it: only
ranks of one train together.
"""
AWAY_POLL_S = 0.1
"""Seconds between two checks if the coordinator is away."""


def main(launch: Launch) -> None:
    """Runs the rank and ends the process: with exit code 0 when told to leave, 1 when the rank failed."""
    forget_handlers()
    os.environ["ELCHE_RANK"] = str(launch.rank)
    os.environ.update(launch.environment)
    if launch.is_loop:
        become_script(launch)
    # An agent that is killed cannot end its ranks, and they would go on forever next to their successors.
    threading.Thread(target=_end_with_agent, name="agent", daemon=True).start()
    keep_survivors_alive()
    as_a_script(launch.file_name, launch.arguments)
    channel = open_channel(launch.coordinator, launch.tls)
    if launch.member:
        # Without asking to leave: the leader asks the coordinator, for the whole group.
        _follow(launch, channel, leave_on_sigterm())
    control, links = Control(), Links(launch.coordinator, launch.interface)
    session = Session(
        channel,
        launch.secret,
        on_command=lambda c: _receive(control, c) if not c.HasField("probe") else links.answer(c.probe, session.send),
        on_lost=control.leave,
        on_away=partial(_note_away, control, OpenDescriptor()),
    )
    take_back = leave_on_sigterm(lambda: _ask_to_leave(control, session))
    send_events_to(session.report_event)
    try:
        _train(launch, control, session, channel, links.address, take_back)
    except Leave as leave:
        notice(f"this rank leaves: {leave}")
        _end(session, LEFT_ALONE if str(leave).startswith(LOST) else 0)
    except StoppedAlone as stopped:
        notice(f"this rank stops: {stopped}")
        _end(session, LEFT_ALONE, partial(_leave_behind, launch, session, stopped))  # the job is not at fault
    except CollectiveFailed as error:
        notice(error)
        if not isinstance(error, OperationStuck):
            _await_verdict(control)  # another replica group is lost, and the coordinator decides what follows
        _end(session, LEFT_ALONE)


def _note_away(control: Control, mark: OpenDescriptor) -> None:
    """Ends a process that can never connect again, since the connections' file descriptors are closed: it would wait
    for the coordinator for as long as that may be away.
    """
    if mark.was_closed:
        notice(f"this rank has failed: {CLOSED}")
        os._exit(1)
    control.note_news()


def _train(
    launch: Launch,
    control: Control,
    session: Session,
    channel: grpc.Channel,
    address: str,
    take_back: Callable[[], bool],
) -> None:
    loop: RankLoop | None = None
    # Before the file is loaded, in which another process of the group may fail already.
    if launch.group_size > 1:
        failed = rank_pb2.RankFailed.FromString
        await_failure(launch, channel, lambda raw: session.send(rank_pb2.ConverseRequest(failed=failed(raw))))
    try:
        job = _load(launch, channel)
        streams = new_streams(torch.device(launch.device))
        with streams.compute():
            loop, accumulators = _prepare(launch, job, control, session, channel, streams, address)
            if take_back():
                print("elche: at SIGTERM the rank commits its work and leaves: the job's own handler is not called")
            loop.run()
            # Kept until here: autograd has only weak references to them.
            del accumulators
    except (Leave, StoppedAlone, CollectiveFailed):
        raise
    # Also `SystemExit`: user code that calls sys.exit() would otherwise look like a rank that was told to leave.
    except BaseException as error:
        leave_if_forked(error)
        failure = _failure(error, launch, loop.local_step if loop is not None else None)
        notice(f"this rank has failed: {failure.traceback or failure.error}")
        _die_alone(error)
        _await_cause(launch, error)
        session.send(rank_pb2.ConverseRequest(failed=failure))
        _await_verdict(control)
        _end(session, 1)


def _follow(launch: Launch, channel: grpc.Channel, take_back: Callable[[], bool]) -> NoReturn:
    """Runs a process of a replica group that is not its leader, and ends it. The leader reports its error to the
    coordinator; the agent ends the group's other processes.
    """
    replica: Replica | None = None
    try:
        job = _load(launch, channel)
        streams = new_streams(torch.device(launch.device))
        with streams.compute():
            control = Control()
            group = DistributedGroup(launch, channel, cast(Strategy, job.shard))
            parts, _ = build(launch, job, group, wake=control.notify, timeline=None, streams=streams)
            replica = Replica(
                launch, job, parts, channel=channel, streams=streams, wake=control.notify, send=lambda message: None
            )
            await_abandoned(launch, channel, replica.averaging.abandon)
            replica.rehearse(warms_up=launch.warms_up)
            take_back()
            group.exchange(None)
            follow(group, replica, control.wake)
    except CollectiveFailed as error:
        print(error, file=sys.stderr)
        code = LEFT_ALONE
    except BaseException as error:
        code = 1
        failure = _failure(error, launch, replica.local_step if replica is not None else None)
        notice(f"this rank has failed: {failure.traceback or failure.error}")
        _die_alone(error)
        _await_cause(launch, error)
        with suppress(RuntimeError):
            report_failure(launch, channel, failure.SerializeToString())
    time.sleep(VERDICT_S)  # time for the leader to learn what follows; the agent then ends this process too
    os._exit(code)


def _await_cause(launch: Launch, error: BaseException) -> None:
    """Delays the report of a failed collective in a replica group, so that its cause is reported first: the agent
    reports why another process of the group has ended, and then ends this one.
    """
    if launch.group_size > 1 and isinstance(error, PeerLost | RuntimeError):
        time.sleep(PEERS_GRACE_S if isinstance(error, PeerLost) else MEMBER_GRACE_S)


def _await_verdict(control: Control) -> None:
    """Waits until the coordinator tells this rank to leave, at most `VERDICT_S`."""
    with control.wake:
        control.wake.wait_for(lambda: control.leaving is not None, timeout=VERDICT_S)


def _load(launch: Launch, channel: grpc.Channel) -> JobDefinition:
    """Reads the user's file, and then selects the device, since the file may set environment variables for it."""
    enter_folder(launch, channel)
    enter_packages(launch.requirements, Path(launch.packages_dir))
    if launch.missing_secrets:
        raise InvalidJob(
            f"the host has no secret {launch.missing_secrets[0]}: put its value into a file of that name in the folder "
            "that elche-worker --secrets names"
        )
    if not launch.bundle:  # which is a copy that nobody edits
        import_as_begun(path_of(Path(launch.output_dir), launch.job_id))
    seed_all(0)  # as every rank does, so that random numbers that the file draws are the same
    job = with_settings(load_job(launch.source, launch.file_name, launch.module), launch.settings)
    if not launch.bundle:
        read_own_modules(launch.packages_dir)
    if job.group_size != launch.group_size:
        raise InvalidJob(
            f"{launch.file_name}: group_size is {job.group_size}, and the job was placed in groups of "
            f"{launch.group_size}: submit it with --group-size {job.group_size}"
        )
    device = torch.device(launch.device)
    _check_device(device)
    kind_of(device).select(device)
    return job


def _prepare(
    launch: Launch,
    job: JobDefinition,
    control: Control,
    session: Session,
    channel: grpc.Channel,
    streams: DeviceStreams,
    links_address: str,
) -> tuple[RankLoop, list[object]]:
    """Builds the rank's parts and reports that it is ready. Also returns objects to keep alive as long as the loop."""
    group = _new_group(launch, job, channel)
    timeline = SpanRecorder(session.send, lambda: control.clock) if job.timeline else None
    parts, accumulators = build(launch, job, group, wake=control.notify, timeline=timeline, streams=streams)
    loop = RankLoop(launch, job, parts, control=control, session=session, channel=channel, streams=streams)
    session.last_words = loop.finish
    loop.rehearse(warms_up=launch.warms_up)
    # The others rehearse too: a rank is ready when all of its processes are.
    group.exchange(None)
    dataset, built, loaded = parts.dataset, parts.built, parts.loaded
    notices = (
        why_mean(job, built),
        eval_mode_notice(built.model, came_in_eval_mode=built.came_in_eval_mode),
        kept_aside_notice(job),
        other_optimizers_notice(job, built.all_optimizers),
        READ_BETWEEN if parts.looked.is_bound and not job.num_workers else "",
        UNSTEADY if parts.looked.is_unsteady else "",
        loop.rates_notice(parts.extent),
    )
    for text in filter(None, notices if launch.rank == 0 else ()):
        notice(text)
    ready = _ready(
        job,
        parts.extent,
        parts.layout,
        launch,
        merge=merge_of(job, built, parts.extent),
        eval_size=len(parts.eval_dataset) if parts.eval_dataset is not None else 0,
        shard_sizes=tuple(dataset.sizes) if isinstance(dataset, Shards) else (),
        is_drawn=bool(job.sample_weights),
    )
    ready.rank_batch_size = parts.batch_size
    ready.links_address = links_address
    ready.timeline = timeline is not None
    ready.samples.extend(parts.looked.samples)
    ready.are_samples_random = parts.looked.are_random
    if not launch.bundle:
        keep_modules(path_of(Path(launch.output_dir), launch.job_id), launch.packages_dir)
    ready.resumed = loaded.training if loaded else parts.no_checkpoint and json.dumps({MISSING: parts.no_checkpoint})
    session.send(rank_pb2.ConverseRequest(ready=ready))
    return loop, accumulators


def _new_group(launch: Launch, job: JobDefinition, channel: grpc.Channel) -> ReplicaGroup:
    if launch.group_size == 1:
        return ReplicaGroup()
    return DistributedGroup(launch, channel, cast(Strategy, job.shard))


def build(
    launch: Launch,
    job: JobDefinition,
    group: ReplicaGroup,
    *,
    wake: Callable[[], None],
    timeline: SpanRecorder | None,
    streams: DeviceStreams,
) -> tuple[Parts, list[object]]:
    """Builds model, optimizers and data of this process. Also returns objects to keep alive as long as its loop."""
    file_name, device = launch.file_name, torch.device(launch.device)
    dataset, dataset_size = build_dataset(job, file_name)
    order = build_order(job, dataset, dataset_size, file_name)
    eval_dataset = build_eval_dataset(job, file_name)
    built = build_model(job, device, file_name, sharding_of(job, file_name))
    accumulators = pin_accumulators(built.model) if built.sharded is None else []
    own_state = build_own_state(job, built.model, file_name)
    # After the model, which all ranks draw alike; from here on each draws numbers of its own.
    seed_all(job.seed + launch.rank + MEMBER_SEED * launch.member)
    layout = Layout(built.model, built.all_optimizers, buffers=job.buffers, optimizer_state=job.optimizer_state)
    loaded, no_checkpoint = _load_checkpoint(launch, layout, built)
    loader = LeaseLoader(
        dataset,
        order=order,
        batch_size=1,
        seed=job.seed,
        collate_fn=job.collate_fn,
        wake=wake,
        num_workers=job.num_workers,
        pins_memory=device.type == "cuda",
        transfer=new_transfer(device, streams),
        file_name=file_name,
        timeline=timeline,
        member=group.position,
        group_size=group.size,
        num_parts=job.accumulate,
    )
    # Only now, when worker processes of the loader run: they have no file open that is opened here.
    batch_size, backs_off = _batch_size(job, launch, built, dataset, dataset_size)
    batch_size = group.exchange(batch_size)[0]
    loader.set_batch_size(batch_size)
    looked = look_at(dataset, job.seed, collate_fn=None if job.num_workers else job.collate_fn)
    if looked.is_for_one_thread and not job.num_workers:
        loader.fetch_in_step()
    extent = Extent(
        dataset_size=dataset_size,
        batch_size=nominal_batch_size(job, dataset_size),
        epochs=job.epochs,
        drop_last=job.drop_last,
        max_steps=job.max_steps,
    )
    parts = Parts(
        looked=looked,
        built=built,
        layout=layout,
        dataset=dataset,
        loader=loader,
        extent=extent,
        group=group,
        pieces=group.new_pieces(),
        batch_size=batch_size,
        backs_off=backs_off,
        eval_dataset=eval_dataset,
        own_state=own_state,
        loaded=loaded,
        no_checkpoint=no_checkpoint,
        timeline=timeline,
    )
    return parts, accumulators


def _load_checkpoint(launch: Launch, layout: Layout, built: Built) -> tuple[Loaded | None, str]:
    """Reads the checkpoint from which the job resumes; None if it starts from scratch, or if this host does not have
    the checkpoint. Also returns why not in the latter case, in which the rank may get the others' model. Every rank
    reads it; of a sharded model each process reads its part.
    """
    if not launch.resume:
        return None, ""
    try:
        loaded = load(launch.resume, new_whole if built.sharded is None else new_like(built.sharded.parameters()[0]))
        if "loop" in loaded.manifest["training"]:
            raise InvalidJob(f"the checkpoint {loaded.path} was written by a user-owned loop (Trainer), not by a job")
        loaded.check_model(layout.model_tensors)
    except NoCheckpoint as error:
        return None, str(error)
    except InvalidJob as error:
        raise InvalidJob(f"{error} (rank {launch.rank} on {socket.gethostname()}; every rank reads it)") from None
    return loaded, ""


def _batch_size(job: JobDefinition, launch: Launch, built: Built, dataset: Any, dataset_size: int) -> tuple[int, bool]:
    """Returns the samples in this rank's batches, and True if batches are split when memory runs out. The size "auto"
    is tried with samples of the data set, and halved while memory is short.
    """
    device = Device(device=launch.device, model=launch.label.removeprefix(launch.device).strip())
    size = rank_batch_size(job, device, dataset_size)
    if not is_auto(job, device):
        return size, False
    step = TrainStep(job, built, torch.device(launch.device), launch.file_name)
    fetch = Fetch(dataset, job.collate_fn, launch.file_name, num_parts=job.accumulate)

    def train(num_samples: int) -> None:
        data = fetch.collate(fetch.__getitems__(list(range(num_samples))))
        if data is None:
            return
        step.make_gradients(to_device(data, torch.device(launch.device)), num_samples)

    return largest_that_fits(size, train, built.model, is_out_of_memory), True


def _check_device(device: torch.device) -> None:
    try:
        torch.empty(1, device=device)
    except Exception as error:
        raise ElcheError(f"the device {device} cannot be used: {str(error).splitlines()[0]}") from None


def _ready(
    job: JobDefinition,
    extent: Extent,
    layout: Layout,
    launch: Launch,
    *,
    merge: str,
    eval_size: int = 0,
    shard_sizes: tuple[int, ...] = (),
    is_drawn: bool = False,
) -> rank_pb2.Ready:
    """The message that the rank is ready, with the settings on which all ranks must agree."""
    resolved = {"averaging": "overlapped" if job.overlaps else "blocking", "anchor": job.first_anchor}
    settings = AgreedSettings(
        **shared_values(job) | resolved | {"batch_size": extent.batch_size},
        dataset_size=extent.dataset_size,
        averaging_options=_options(job, merge),
        has_evaluation=job.has_evaluation,
        eval_size=eval_size,
        wants_metrics=job.wants_metrics,
        keeps_state=job.state is not None,
        shard_sizes=shard_sizes,
        is_drawn=is_drawn,
        layout_hash=layout.hash,
    )
    device, needs_encryption = torch.device(launch.device), bool(launch.tls) and not launch.interface
    build = build_of(device, needs_encryption=needs_encryption, slice_of=slice_of(device))
    return ready_message(settings, device=_label(job, launch), build=build, tensors=_described(layout))


def _options(job: JobDefinition, merge: str) -> str:
    """Text of the further options that must be equal on all ranks."""
    words: list[object] = [job.weighting, merge, job.compress, job.outer_optimizer, job.buffers, job.optimizer_state]
    words += ["rounds", ROUNDS_FORMAT]
    words += [] if job.ema is None else ["ema", job.ema]
    words += [] if job.shard is None else [job.shard, "in groups of", job.group_size]
    return " ".join(map(str, words))


def _label(job: JobDefinition, launch: Launch) -> str:
    """The name of the device, or of the group's, for display; with the precision if it is not as wanted."""
    label = launch.label
    if launch.group_size > 1:
        model = label.removeprefix(launch.device).strip()
        label = f"{launch.group_size}x {launch.device.partition(':')[0]} {model}".strip()
    precision = possible_precision(job.precision, torch.device(launch.device))
    return label if precision == job.precision else f"{label} ({precision}, no fast {job.precision})"


def _described(layout: Layout) -> list[str]:
    """Descriptions of the layout's tensors, by which the coordinator names the first difference between two ranks'
    models; empty for a model with too many.
    """
    tensors = [str(entry) for entry in layout.entries]
    fits = len(tensors) <= MAX_TENSORS and sum(map(len, tensors)) <= MAX_TENSORS_CHARS
    return tensors if fits else []


def _failure(error: BaseException, launch: Launch, batch: int | None) -> rank_pb2.RankFailed:
    """The message of a failure. The traceback is left out for an error that elche raised on purpose."""
    member = f" (process {launch.member} of {launch.group_size})" if launch.group_size > 1 else ""
    where = f", on rank {launch.rank}{member}" + (f" at batch {batch}" if batch is not None else "")
    if isinstance(error, InvalidJob):
        return rank_pb2.RankFailed(error=sendable(message_of(error)), batch=batch, invalid=True)
    if isinstance(error, ElcheError) and not isinstance(error, UserCodeRaised):
        return rank_pb2.RankFailed(error=sendable(f"{error}{where}"), batch=batch)
    raised = error if isinstance(error, UserCodeRaised) else describe_raised(error, launch.file_name)
    text = sendable(raised.traceback)
    return rank_pb2.RankFailed(error=sendable(f"{raised}{where}"), traceback=text, batch=batch)


def _die_alone(error: BaseException) -> None:
    """If the device has failed or a DataLoader worker was killed: ends the process by SIGABRT, so that the other ranks
    go on without it (protocol P24.3) and the job does not fail. Else returns.
    """
    if is_device_fault(error) or shows_lost_worker(error):
        whose = "the device" if is_device_fault(error) else "the rank's host"
        print(f"elche: this is a fault of {whose}, not of the job: the rank ends and is restarted", flush=True)
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGABRT)


def _receive(control: Control, command: rank_pb2.ConverseResponse) -> None:
    """Handles a command on the session's thread, or passes it to the loop."""
    if command.HasField("shutdown"):  # the loop may be in user code, or in a collective that waits for a lost rank
        timer = threading.Timer(LEAVE_GRACE_S, lambda: os._exit(0))
        timer.daemon = True
        timer.start()
    if command.HasField("clock"):
        control.clock = (command.clock.sent_s, time.time())
        return
    control.put(command)


def _end_with_agent() -> None:
    """Ends this process when its agent ends: the agent holds the other end of standard input and writes nothing to it.

    Reads the file descriptor, not `sys.stdin`, whose lock would be held forever: processes that user code forks would
    hang when they close theirs.
    """
    while os.read(0, 4096):
        pass
    os._exit(1)


def _ask_to_leave(control: Control, session: Session) -> None:
    """Asks the coordinator to let the rank leave; it stops alone if none answers for `ALONE_AFTER_S`."""
    has_asked = False
    while session.away_s < ALONE_AFTER_S:
        if session.is_connected and not has_asked:
            session.send(rank_pb2.ConverseRequest(leaving=rank_pb2.Leaving()))
            has_asked = True
        time.sleep(AWAY_POLL_S)
    control.stop()


def _leave_behind(launch: Launch, session: Session, stopped: StoppedAlone) -> None:
    """Records the rank's unsent messages, and where its draft is, for the next agent with this work folder."""
    pending = session.pending
    record = StoppedRank(
        job_id=launch.job_id,
        rank=launch.rank,
        incarnation=launch.incarnation,
        secret=launch.secret,
        store=session.store,
        num_sent=pending.num_sent,
        num_heard=pending.num_received,
        messages=[b64encode(one.SerializeToString()).decode() for one in pending.messages],
        round=stopped.round,
        draft=stopped.draft,
    )
    try:
        record.save(Path(launch.output_dir))
    except OSError as error:
        notice(f"this rank's unsent messages cannot be kept: {error}")
        return
    kept = f"; {stopped.draft} has its model of round {stopped.round}" if stopped.round else ""
    notice(f"its work is handed in when its worker and the coordinator are back{kept}")


def _end(session: Session, code: int, after: Callable[[], None] = lambda: None) -> NoReturn:
    """Ends the process; calls `after` when the session is closed."""
    if session.last_words is not None:
        session.last_words()
    session.close()
    after()
    end(code)
