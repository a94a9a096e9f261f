"""A user-owned loop as a job of a coordinator: it reports its progress, and receives requests of operators.

Nothing waits for the coordinator. When the connection is lost, training goes on without it.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import torch

from elche.channel import open_channel
from elche.errors import ElcheError, Misuse, PeerLost, UnknownMessage
from elche.network import user_at_host
from elche.output import notice
from elche.protocol import call_metadata
from elche.status import calling, from_rpc, was_never_sent
from elche.tls import named_folder
from elche.token import read_token
from elche.v1 import rank_pb2, rank_pb2_grpc
from elche_worker.collectives.calls import CallsDiffer
from elche_worker.collectives.store import CoordinatorStore
from elche_worker.collectives.world import World, model_name
from elche_worker.data.lease_loader import shows_lost_worker
from elche_worker.process.descriptors import CLOSED, OpenDescriptor
from elche_worker.session.launch import Launch
from elche_worker.session.script import trim
from elche_worker.session.session import Session, sendable
from elche_worker.telemetry.gauges import GaugeSampler
from elche_worker.telemetry.meter import EpochSums
from elche_worker.telemetry.timeline import SpanRecorder
from elche_worker.trainer.attachment import Attachment, NextGroup
from elche_worker.trainer.config import TrainerConfig
from elche_worker.user.events import MAX_CHARS, send_events_to
from elche_worker.user.scalars import MAX_NAME_CHARS as MAX_METRIC_CHARS
from elche_worker.user.scalars import MAX_SCALARS, Sum, without_graph

REPORT_EVERY_S = 0.05
"""Least time in seconds between progress reports."""
READ_EVERY_S = 1.0
"""Least time in seconds between reads of losses from a device, since each makes the host wait for the device."""
ATTACH_TIMEOUT_S = 20.0
"""Seconds for which `Trainer.setup` waits for the coordinator's answer to `Attach`, before it raises, and then for a
stream, before it goes on without."""
RESTART_LIMIT_S = 5.0
"""Seconds for which it calls a coordinator that refuses connections, as one does that is started again."""
RETRY_S = 0.2
AWAY_LIMIT_S = 60.0
"""Seconds for which a rank that needs a new group waits for an absent coordinator."""
MAX_BATCH_TIMES = 64
"""Newest batch times that a report carries; `BatchesTrained.batch_ms` has this limit."""
CONNECT_S = 1.0
"""Seconds in which a coordinator that is there takes a loop's last messages, before a line says that it is away."""
LAST_WORDS_S = 10.0
"""Seconds for which a loop that has ended tries to tell an absent coordinator: it has no agent that would."""
STUCK_S = 5.0
"""Seconds that a rank of a failed loop has to reach its next step, where it may be waiting over NCCL."""
MAX_NAME_CHARS = 100
MAX_REASON_CHARS = 300


class CoordinatorAttachment(Attachment):
    """One rank's session with the coordinator. Methods are called by the loop's thread unless they say otherwise."""

    is_attached = True

    def __init__(
        self,
        job_id: str,
        channel: grpc.Channel,
        secret: str,
        world: World,
        *,
        timeline: bool,
        goes_on: bool,
        is_submitted: bool = False,
    ) -> None:
        """`is_submitted`: an agent has started this process, and reports its end."""
        super().__init__()
        self.job_id = job_id
        self._is_submitted = is_submitted
        self._world = world
        self._store = CoordinatorStore(channel, secret)
        self._goes_on = goes_on
        """True if the other ranks go on when one dies."""
        self._group: rank_pb2.FormGroup | None = None
        """The newest group that the coordinator has ordered this rank to form. Guarded by `operator.changed`."""
        self._is_leaving = False
        """True once the loop has ended: commands have no effect any more."""
        self._timeline: SpanRecorder | None = None
        self._clock: tuple[float, float] | None = None
        """(sent, received): times of the last clock message by the coordinator's and by this host's clock, in s."""
        # After all that commands write: they are received on the session's thread from here on.
        self._open = OpenDescriptor()
        self._session = Session(channel, secret, on_command=self._receive, on_lost=self._lose, on_away=self._note_away)
        send_events_to(self._session.report_event)
        self._gauges = GaugeSampler(world.device)
        self._is_device = world.device.type != "cpu"
        self._num_batches = 0
        self._num_samples = 0
        self._batch_ms: list[float] = []
        self._losses = EpochSums()
        """Losses on the device that were not reported yet."""
        self._epoch = EpochSums()
        """Batches of the present epoch, for the report at its end."""
        self._num_losses = 0
        """Number of the epoch's batches whose losses are known."""
        self._waited_ms = 0.0
        self._data_wait_ms = 0.0
        self._reported_s = self._read_s = 0.0
        if timeline:
            self._timeline = SpanRecorder(self._session.send, lambda: self._clock)
            self._session.send(rank_pb2.ConverseRequest(ready=rank_pb2.Ready(timeline=True)))

    def wait_until_connected(self) -> None:
        """Waits until the coordinator sees this rank's end. It would give a rank that exits before that a minute to
        connect, and the others would wait for it.
        """
        self._session.wait_until_connected(ATTACH_TIMEOUT_S)

    # Reports

    def begin(self, policy: str) -> None:
        """Reports that the trainer of a submitted script is set up."""
        self._session.send(rank_pb2.ConverseRequest(loop_began=rank_pb2.LoopBegan(policy=policy)))

    def add_batches(
        self, num_batches: int, num_samples: int, loss_sum: Any, num_losses: int, scalars: Mapping[str, Sum]
    ) -> None:
        self._num_batches += num_batches
        self._num_samples += num_samples
        self._losses.add(EpochSums(num_losses, num_samples, loss_sum))
        self._epoch.add(EpochSums(num_batches, num_samples, loss_sum, dict(scalars)))
        self._num_losses += num_losses

    def add_times(self, batch_ms: list[float], waited_ms: float, data_wait_ms: float) -> None:
        self._batch_ms = (self._batch_ms + batch_ms)[-MAX_BATCH_TIMES:]
        self._waited_ms += waited_ms
        self._data_wait_ms += data_wait_ms

    def add_span(self, kind: int, start_s: float, end_s: float, detail: int = 0) -> None:
        if self._timeline is not None:
            self._timeline.add(kind, start_s, end_s, detail)

    def report(self, progress: rank_pb2.LoopProgress, learning_rate: float | None, *, is_last: bool = False) -> None:
        now_s = time.perf_counter()
        if self.lost or (now_s - self._reported_s < REPORT_EVERY_S and not is_last):
            return
        self._reported_s = now_s
        report = rank_pb2.BatchesTrained(
            local_step=self._num_batches,
            num_processed=self._num_samples,
            batch_ms=self._batch_ms,
            data_wait_ms=self._data_wait_ms,
            waited_ms=self._waited_ms,
        )
        self._batch_ms = []
        if not self._is_device or is_last or now_s - self._read_s >= READ_EVERY_S:
            self._read_s = now_s
            report.loss_sum, report.loss_count = float(self._losses.loss_sum), self._losses.num_batches
            self._losses = EpochSums()
        if (gauges := self._gauges.take()) is not None:
            if learning_rate is not None:
                gauges.learning_rate = learning_rate
            report.gauges.CopyFrom(gauges)
        self._session.send(rank_pb2.ConverseRequest(batches_trained=report))
        if self._world.rank == 0:
            self._session.send(rank_pb2.ConverseRequest(loop_progress=progress))

    def end_epoch(self, epoch: int, num_done: int, duration_s: float) -> None:
        work, self._epoch = self._epoch.to_message(epoch), EpochSums()
        work.has_no_loss = not self._num_losses
        work.loss_sum *= work.num_batches / max(1, self._num_losses)  # extrapolated to batches whose loss is not known
        self._num_losses = 0
        ended = rank_pb2.LoopEpochEnded(work=work, duration_s=duration_s, num_done=num_done)
        self._session.send(rank_pb2.ConverseRequest(loop_epoch_ended=ended))

    def report_metrics(self, epoch: int, metrics: Mapping[str, float]) -> None:
        sums = {name: rank_pb2.ScalarSum(sum=value, count=1) for name, value in metrics.items()}
        self._session.send(rank_pb2.ConverseRequest(evaluated=rank_pb2.Evaluated(epoch=epoch, sums=sums)))

    def report_saved(self, version: int, path: str, size_bytes: int, duration_s: float) -> None:
        saved = rank_pb2.CheckpointSaved(version=version, path=path, size_bytes=size_bytes, duration_s=duration_s)
        self._session.send(rank_pb2.ConverseRequest(checkpoint_saved=saved))

    def report_not_saved(self, version: int, reason: str) -> None:
        failed = rank_pb2.CheckpointFailed(version=version, reason=reason[:1000])
        self._session.send(rank_pb2.ConverseRequest(checkpoint_failed=failed))

    def leave(self, error: BaseException | None, *, is_caught: bool = False) -> None:
        self._is_leaving = True
        if self._timeline is not None:
            self._timeline.stop()
        self._gauges.stop()
        if is_caught and error is not None:
            what = f"the script goes on after {_named(error, type(error))}, on rank {self._world.rank}"
            self._session.report_event(sendable(what[:MAX_CHARS]), 0)
        if error is None or is_caught or self.operator.cancelled:
            self._session.send(rank_pb2.ConverseRequest(loop_left=rank_pb2.LoopLeft()))
        elif self._goes_on and self._world.size > 1 and shows_lost_worker(error) and not isinstance(error, ElcheError):
            # A loader of the script's own, which nobody starts again. As if the kernel had ended the whole process: the
            # others go on without it.
            notice(f"rank {self._world.rank} ends, since a worker process of its loader was killed: {error}")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGABRT)
        elif not (self._is_submitted and isinstance(error, PeerLost)):  # the agent reports who has ended first
            trim(error)
            is_told = isinstance(error, CallsDiffer) or error.__traceback__ is None
            text = "" if is_told else "".join(traceback.format_exception(error))
            kind = Misuse if isinstance(error, Misuse) else type(error)
            what = f"{_named(error, kind)}, on rank {self._world.rank} at batch {self._num_batches}"
            failed = rank_pb2.RankFailed(error=sendable(what), traceback=sendable(text), batch=self._num_batches)
            self._session.send(rank_pb2.ConverseRequest(failed=failed))
        # A loop that ends as soon as it has begun has no stream yet.
        self._session.wait_until_taken(CONNECT_S)
        if not self._session.has_sent_all and not self._session.is_connected and not self.lost:
            notice(f"the loop has ended; the coordinator does not answer: retrying for {LAST_WORDS_S:.0f} s")
        # Without an agent nobody else can report this loop's end: if it is not durable when the process exits, the job
        # stays in state "training" until the coordinator gives its ranks up.
        self._session.wait_until_taken(LAST_WORDS_S)
        self._session.close()

    # Commands

    def _receive(self, command: rank_pb2.ConverseResponse) -> None:
        operator = self.operator
        with operator.changed:
            match command.WhichOneof("message"):
                case "shutdown":
                    operator.cancelled = command.shutdown.reason or "the job is over"
                    if command.shutdown.failed and self._world.waits_on_device:
                        threading.Thread(target=self._end_if_stuck, name="stuck", daemon=True).start()
                case "save_checkpoint":
                    operator.wants_checkpoint = True
                case "pause_loop":
                    operator.is_paused = command.pause_loop.is_paused
                case "clock":
                    self._clock = (command.clock.sent_s, time.time())
                case "abandon":
                    self._world.give_up(command.abandon.generation)
                case "form_group":
                    self._group = command.form_group
                case name:  # the session takes some; others are for ranks of a `TrainingJob`, or of a newer coordinator
                    raise UnknownMessage("ConverseResponse", name)
            operator.changed.notify_all()

    def _end_if_stuck(self) -> None:
        """Ends the process of a failed loop that does not reach its next step. Nothing else ends a collective over NCCL
        that waits for a lost rank: torch's watchdog would take minutes, and its message does not name the cause.
        """
        time.sleep(STUCK_S)
        if not self._is_leaving:
            notice(
                f"rank {self._world.rank} exits: {self.operator.cancelled}; it has not reached its next step "
                f"in {STUCK_S:g} s, and may be waiting over NCCL for a rank that has ended"
            )
            os._exit(1)

    def _lose(self, reason: str) -> None:
        """Called when the coordinator does not know this rank any more. Nobody could end a pause then: it ends here."""
        self.lost = reason
        if self._timeline is not None:
            self._timeline.stop()
        with self.operator.changed:
            self.operator.is_paused = False
            self.operator.changed.notify_all()
        if not self.operator.cancelled and not self._is_leaving:
            notice(f"rank {self._world.rank}: {reason}; training goes on without it")

    def _note_away(self) -> None:
        """Ends a submitted script that can never connect again: its agent would end it, too, after a time of silence.
        Called on the session's thread.
        """
        if not self._open.was_closed:
            return
        if self._is_submitted:
            notice(f"this rank has failed: {CLOSED}")
            os._exit(1)
        elif not self.lost:
            self._lose(f"the coordinator cannot be reached any more, as {CLOSED}")

    def next_group(self, generation: int, reason: str) -> NextGroup | None:
        if self.lost or not self._goes_on:
            return None
        abandoned = rank_pb2.Abandoned(generation=generation, reason=sendable(reason[:MAX_REASON_CHARS]))
        self._session.send(rank_pb2.ConverseRequest(abandoned=abandoned))
        operator = self.operator
        answered_s = time.monotonic()
        with operator.changed:
            # A coordinator that is there may take as long as it needs: it waits until every survivor has abandoned the
            # old group. Only the time without a connection counts against the limit.
            while not self.lost and not operator.cancelled:
                group = self._group
                if group is not None and group.generation > generation:
                    return NextGroup(group.generation, group.position, group.world_size, self._store)
                operator.changed.wait(AWAY_LIMIT_S / 10)
                now_s = time.monotonic()
                answered_s = now_s if self._session.is_connected else answered_s
                if now_s - answered_s > AWAY_LIMIT_S:
                    return None
        return None


def coordinator_address(config: TrainerConfig, world: World) -> str:
    """HOST:PORT of the coordinator that the config or ELCHE_COORDINATOR names; "" without one. Every rank calls it.

    Raises `Misuse` on every rank unless all have a coordinator or none has.
    """
    address = config.coordinator or os.environ.get("ELCHE_COORDINATOR", "")
    if len(set(world.gather_texts(str(bool(address))))) > 1:
        raise Misuse("some ranks have a coordinator and some have none: set ELCHE_COORDINATOR on all ranks or on none")
    return address


def attach(
    address: str, config: TrainerConfig, world: World, *, policy: str, checkpoint_dir: str, resumed: str
) -> CoordinatorAttachment:
    """Makes the loop a job of the coordinator at HOST:PORT. Every rank calls it.

    Raises `Misuse` on every rank when the coordinator does not answer, or refuses.
    """
    channel = _opened(address, world)
    places = [json.loads(text) for text in world.gather_texts(json.dumps([socket.gethostname(), _device(world)]))]
    goes_on = world.can_regroup and config.on_rank_loss == "continue"
    answer, problem = "", ""
    if world.rank == 0:
        request = rank_pb2.AttachRequest(
            name=(config.name or Path(sys.argv[0]).stem or "loop")[:MAX_NAME_CHARS],
            ranks=[rank_pb2.LoopRank(host=host, device=device) for host, device in places],
            policy=policy,
            checkpoint_dir=checkpoint_dir,
            resumed=resumed,
            submitted_by=user_at_host(),
            can_regroup=goes_on,
        )
        try:
            answer = _ask(address, channel, request)
        except ElcheError as error:
            problem = f"{error} (coordinator: {address})"
    world.agree(problem)
    job_id, secrets = json.loads(world.share_text(answer))
    secret = secrets[world.rank]
    attachment = CoordinatorAttachment(job_id, channel, secret, world, timeline=config.timeline, goes_on=goes_on)
    attachment.wait_until_connected()
    return attachment


def attach_submitted(launch: Launch, config: TrainerConfig, world: World, *, policy: str) -> CoordinatorAttachment:
    """Begins the reports of a rank of the job with which its script was submitted. Every rank calls it.

    Raises `Misuse` on every rank if one of them cannot open a channel.
    """
    channel = _opened(launch.coordinator, world, launch.tls)
    attachment = CoordinatorAttachment(
        launch.job_id,
        channel,
        launch.secret,
        world,
        timeline=config.timeline,
        goes_on=False,
        is_submitted=True,
    )
    attachment.begin(policy)
    return attachment


def _opened(address: str, world: World, tls: str | None = None) -> grpc.Channel:
    """A channel to the coordinator. Raises `Misuse` on every rank if one of them cannot open one."""
    channel, problem = None, ""
    try:
        channel = open_channel(address, named_folder() if tls is None else tls)
    except ElcheError as error:
        problem = str(error)
    world.agree(problem)
    assert channel is not None
    return channel


def _ask(address: str, channel: grpc.Channel, request: rank_pb2.AttachRequest) -> str:
    stub, began_s, has_logged = rank_pb2_grpc.RankServiceStub(channel), time.monotonic(), False
    with calling(address):
        while True:
            try:
                left_s = max(1.0, began_s + ATTACH_TIMEOUT_S - time.monotonic())
                response = stub.Attach(request, metadata=call_metadata(read_token()), timeout=left_s)
                return json.dumps([response.job_id, list(response.secrets)])
            except grpc.RpcError as error:
                details = (error.details() or "") if was_never_sent(error) else ""
                is_refused = "refused" in details  # it may be starting again
                limit_s = RESTART_LIMIT_S if is_refused else ATTACH_TIMEOUT_S if "timed out" in details else 0.0
                if time.monotonic() - began_s >= limit_s:
                    raise
                if is_refused and not has_logged:
                    has_logged = True
                    notice(f"{from_rpc(error, address)}; trying for {RESTART_LIMIT_S:.0f} s")
                time.sleep(RETRY_S)


def _named(error: BaseException, kind: type[BaseException]) -> str:
    return f"{kind.__name__}: {error}" if str(error) else kind.__name__


def _device(world: World) -> str:
    name = "" if world.device.type == "cpu" else model_name(world.device)
    return f"{world.device} {name}".strip()


def checked_metrics(metrics: Mapping[str, Any], call: str = "report()") -> dict[str, float]:
    """Metrics as plain numbers. Raises `Misuse` for other values, and for too many or too long names."""
    if len(metrics) > MAX_SCALARS:
        raise Misuse(f"{call}: {len(metrics)} metrics; at most {MAX_SCALARS} are possible")
    numbers = {}
    for name, value in metrics.items():
        if len(name) > MAX_METRIC_CHARS:
            raise Misuse(
                f"{call}: {name[:40]!r}... has {len(name)} characters; at most {MAX_METRIC_CHARS} are possible"
            )
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise Misuse(f"{call}: {name!r} must be a number, not a tensor of shape {tuple(value.shape)}")
        try:
            numbers[name] = float(without_graph(value))
        except OverflowError:
            raise Misuse(f"{call}: {name!r} is too large for a float") from None
        except (TypeError, ValueError):
            raise Misuse(f"{call}: {name!r} must be a number, not {value!r}") from None
    return numbers
