"""The agent's stream with the coordinator, and how it carries out orders."""

import hashlib
import json
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, assert_never

import grpc

from elche.channel import open_channel
from elche.errors import ElcheError, InvalidJob, NotAllowed, UnknownMessage, Unreachable
from elche.manifest import EMA, MANIFEST, WEIGHTS
from elche.network import BadAddress
from elche.protocol import call_metadata
from elche.status import explained
from elche.tls import BadCertificate
from elche.torchrun import environment_of_rank, free_port
from elche.v1 import agent_pb2, agent_pb2_grpc
from elche.v1.job_pb2 import Fault
from elche_worker.agent.artifacts import ArtifactWriter
from elche_worker.agent.confinement import Confinement
from elche_worker.agent.fitness import NO_THREADS, Fitness
from elche_worker.agent.identity import AgentIdentity
from elche_worker.agent.job_folders import JobFolders
from elche_worker.agent.link_speed import LinkFault, listen, measure
from elche_worker.agent.processes import Exit, Key, Processes, RankStart, SpawnerProcess, rank_exited
from elche_worker.agent.stopped_work import submit_stopped_work
from elche_worker.process.interfaces import listening_address
from elche_worker.process.leaving import ALONE_AFTER_S
from elche_worker.process.log_times import TimesReader
from elche_worker.process.rank_files import RankFiles
from elche_worker.session.launch import BEST, MODEL, Launch
from elche_worker.session.outbound import LOG_EVERY_S, MAX_RETRY_S, RETRY_S, Outbound, soon

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
"""Most bytes of a file in one message, as `DeliverRequest.data` allows."""
LOG_CHUNK_BYTES = 64 << 10
"""The same of a log: the coordinator holds a few for each of very many readers who take none."""
PIECES = "pieces"
"""Folder of a checkpoint that holds the parts of a sharded model."""
GRACE_S = 25.0
"""Seconds for which a leaving agent waits for its ranks. Kubernetes, and some clouds, kill 30 s after their notice."""
KEEP_S = 600.0
"""Seconds for which ranks go on without a coordinator. Then the agent ends them: if the coordinator never comes back,
they would hold their devices forever.
"""
FOLLOW_EVERY_S = 0.2
"""Seconds between two looks at a followed log, or at ranks that are to leave."""
MAX_PROBLEM = 1000
"""Most characters of why this host can start no ranks."""
MAX_GONE = 100
"""Most dead agents that are named to the coordinator; the newest ones."""
REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Status codes by which the coordinator refuses the agent for good: it ends, and does not try again."""
ALIVE_EVERY_S = 5.0
"""Seconds between empty messages to who follows a log: sending one fails when the reader has gone."""

MAX_DELIVERIES = 192
"""Most files that are sent at once: each takes two threads and two open files, which starting ranks needs, too."""
NO_THREAD = "can't start new thread"
"""What Python says, in a `RuntimeError`, when the system starts no more threads."""
Order = TypeVar("Order", agent_pb2.SendModel, agent_pb2.SendLog, agent_pb2.StoreArtifacts)


class Agent:
    """Serves a coordinator until it is stopped. When the connection is lost its ranks go on, and it connects again."""

    def __init__(
        self,
        coordinator: str,
        slots: list[agent_pb2.Slot],
        work_dir: Path,
        *,
        token: Callable[[], str] = str,
        tls: str = "",
        interface: str = "",
        grace_s: float = GRACE_S,
        keep_s: float = KEEP_S,
        labels: Mapping[str, str] | None = None,
        secrets_dir: Path | None = None,
        confinement: Confinement | None = None,
        spawner: SpawnerProcess | None = None,
    ) -> None:
        """`token`: reads it, and again when it is refused; `tls`: folder of certificates for connections to the
        coordinator; `interface`: network interface on which others reach its ranks; `grace_s`: seconds for which ranks
        may commit their work when the agent leaves; `keep_s`: seconds for which ranks outlive the coordinator;
        `labels`: properties of the host, on which jobs may set conditions; `secrets_dir`: has a file for each secret
        that jobs may ask for by its name; `confinement`: what its ranks see of this host, None: all of it; `spawner`:
        one that runs already.
        """
        self._grace_s = _waitable_s(grace_s)
        self._keep_s = keep_s
        self._identity = AgentIdentity(work_dir)
        self._store = ""
        """Id of the coordinator's store; empty before the first welcome."""
        self._is_welcome = False
        """True if the present stream, or the last one, has received a welcome."""
        self._is_leaving = False
        """True once `leave` was called. A second call ends everything at once."""
        self._tells_fitness = False
        """True if the coordinator takes `HostFitness`."""
        self._coordinator = coordinator
        self._slots = slots
        self._labels = labels or {}
        self._secrets_dir = secrets_dir
        self._work_dir = work_dir
        self._token = token
        self._metadata = call_metadata(token())
        self._interface = interface
        self._tls = os.path.abspath(tls) if tls else ""
        self._stopped = threading.Event()
        self._outbound: Outbound[agent_pb2.AttendRequest] = Outbound()
        self._call: Any = None
        self._folders = JobFolders(work_dir)
        self._fitness = Fitness(work_dir, self._tell_fitness)
        self._deliveries = threading.Semaphore(MAX_DELIVERIES)
        self._processes = Processes(self._report_exit, len(slots), confinement, spawner)
        self._is_confined = confinement is not None
        self._artifacts = ArtifactWriter(self._folders, self._processes, is_confined=confinement is not None)
        self._loop_ports: dict[str, int] = {}
        """By job: port of rank 0's store, for a script whose ranks are being started here."""

    def run(self) -> None:
        """Serves until `stop`; waits for a coordinator that does not answer. Raises `Unreachable` if the coordinator
        refuses the agent, and `BadCertificate` if its certificate is wrong.
        """
        self._processes.warm_up()
        # Confined ranks are not trusted: a record that one has written could name any folder of this host as its draft.
        if not self._is_confined:
            submit_stopped_work(self._coordinator, self._tls, self._folders, self._stopped)
        threading.Thread(target=self._fitness.watch, args=(self._stopped,), daemon=True).start()
        threading.Thread(target=self._processes.watch, args=(self._stopped,), daemon=True).start()
        retry_s, seen_s, logged_s = RETRY_S, time.monotonic(), -LOG_EVERY_S
        while not self._stopped.is_set():
            reason = self._serve()
            if self._stopped.is_set():
                break
            if self._is_welcome:  # the coordinator was there until now, even if it sent nothing
                retry_s, seen_s, logged_s = RETRY_S, time.monotonic(), -LOG_EVERY_S
            away_s, num_ranks = time.monotonic() - seen_s, self._processes.num_running
            if num_ranks and away_s > self._keep_s:
                log.warning("the coordinator has been away for %.0f s: %d ranks are ended", away_s, num_ranks)
                self._give_up_ranks()
            if time.monotonic() - logged_s >= LOG_EVERY_S:
                what = "is away" if self._store else "does not answer yet"
                goes_on = f"; {num_ranks} ranks go on" if num_ranks else ""
                log.warning("coordinator=%s %s (%s)%s; trying again", self._coordinator, what, reason, goes_on)
                logged_s = time.monotonic()
            self._stopped.wait(soon(retry_s))
            retry_s = min(2 * retry_s, MAX_RETRY_S)
        self._processes.close()  # this process must not end before `stop` has ended them

    def _serve(self) -> str:
        """Carries out orders until the stream ends; returns why it has. Raises as `run` does, with all ranks ended."""
        self._is_welcome = False
        try:
            with open_channel(self._coordinator, self._tls) as channel:
                for response in self._attend(channel):
                    self._do(response)
            return "it closed the stream"
        except BadCertificate as error:
            if not self._store:
                self._processes.close()
                raise
            return str(error)
        except grpc.RpcError as error:
            reason = explained(error.details() or error.code().name)
            refused = error.code() in REFUSALS
            refused |= error.code() is grpc.StatusCode.INVALID_ARGUMENT and not self._store
            if not self._stopped.is_set() and refused and not self._has_new_token():
                self._processes.close()
                raise Unreachable(f"the coordinator at {self._coordinator} refuses this worker: {reason}") from None
            return reason
        except RuntimeError as error:
            # By gRPC, for the connection.
            if NO_THREAD not in str(error):
                raise
            return f"this worker {NO_THREADS}"

    def _has_new_token(self) -> bool:
        """True if the token has been replaced since it was read; the new one is used from then on."""
        before = self._metadata
        with suppress(NotAllowed):  # its file is being written
            self._metadata = call_metadata(self._token())
        return self._metadata != before

    def _give_up_ranks(self) -> None:
        """Ends all ranks, which the coordinator does not know or has given up, and drops the reports on them."""
        self._processes.kill_all()
        self._outbound.begin_anew()
        self._store = ""

    def leave(self) -> None:
        """Ends the agent, once its ranks have committed their work and left, and artifacts are stored, or when the
        grace time is over. A second call ends everything at once. Called on a thread of its own.
        """
        num_ranks, over_s = self._processes.num_running, time.monotonic() + self._grace_s
        if not self._is_leaving:
            self._is_leaving = True
            if num_ranks:
                log.info("leaves; %d ranks commit their work, for at most %.0f s", num_ranks, self._grace_s)
                self._outbound.send(agent_pb2.AttendRequest(host_leaves=agent_pb2.HostLeaves()))
                self._await_ranks(over_s)
            if not self._artifacts.is_idle:
                log.info("leaves once jobs' artifacts are stored, or in %.0f s", max(0.0, over_s - time.monotonic()))
                self._artifacts.wait_until_idle(over_s - time.monotonic())
        self.stop()

    def _await_ranks(self, over_s: float) -> None:
        """Waits until all ranks have left, at most until `over_s`. The coordinator asks them to; if it is away, the
        agent asks them itself, and they stop without it.
        """
        seen_s, is_asked = time.monotonic(), False
        while not self._processes.wait_until_idle(FOLLOW_EVERY_S) and time.monotonic() < over_s:
            if self._outbound.is_open:
                seen_s = time.monotonic()
            elif not is_asked and time.monotonic() - seen_s > ALONE_AFTER_S:
                is_asked = True
                log.warning("no coordinator answers: ranks stop and leave their work here for the next worker")
                self._processes.ask_all()

    def stop(self) -> None:
        """Ends the stream and every rank on this host."""
        # First: the ends of ranks that follow are this agent's doing, and are not reported as losses.
        self._stopped.set()
        self._processes.close()
        if self._call is not None:
            self._call.cancel()

    def _attend(self, channel: grpc.Channel) -> Iterator[agent_pb2.AttendResponse]:
        outgoing: queue.SimpleQueue[agent_pb2.AttendRequest | None] = queue.SimpleQueue()
        hello = agent_pb2.AgentHello(
            host=socket.gethostname(),
            slots=self._slots,
            labels=self._labels,
            identity=self._identity.name,
            gone=self._identity.gone[-MAX_GONE:],
            store=self._store,
            num_received=self._outbound.num_received,
            num_ranks=self._processes.num_running,
            measures_links=True,
            stores_artifacts=True,
            starts_loops=True,
            injects_faults=True,
            folder=self._folders.id,
            jobs=self._folders.newest(),
        )
        outgoing.put(agent_pb2.AttendRequest(hello=hello))
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        self._call = call = stub.Attend(self._outbound.requests(outgoing), metadata=self._metadata)
        if self._stopped.is_set():  # since before there was a call to cancel
            call.cancel()  # type: ignore[no-untyped-call]
        try:
            for response in call:
                if response.HasField("welcome"):
                    self._take_welcome(response.welcome)
                    self._outbound.open(outgoing, response.welcome.taken)
                elif self._outbound.is_news(response.seq):
                    yield response
                    # Only now: an order that was not carried out must be sent again on the next stream.
                    self._outbound.num_received = response.seq or self._outbound.num_received
        finally:
            self._outbound.close()
            outgoing.put(None)

    def _take_welcome(self, welcome: agent_pb2.AgentWelcome) -> None:
        """Handles the welcome. A coordinator that does not know this agent does not know its ranks either."""
        log.info("coordinator=%s connected as %s", self._coordinator, welcome.agent_id)
        if welcome.is_new:
            if num_ranks := self._processes.num_running:
                log.warning("the coordinator has given %d ranks up: they are ended", num_ranks)
            self._give_up_ranks()
        self._store, self._is_welcome = welcome.store, True
        self._tells_fitness = welcome.takes_fitness
        self._fitness.tell_again()

    def _do(self, response: agent_pb2.AttendResponse) -> None:
        match response.WhichOneof("message"):
            case "taken":
                self._outbound.forget(response.taken.seq)
            case "start_rank":
                self._start_rank(response.start_rank)
            case "send_model":
                self._begin_delivery(self._deliver, response.send_model)
            case "send_log":
                self._begin_delivery(self._deliver_log, response.send_log)
            case "store_artifacts":
                self._begin_delivery(self._store_artifacts, response.store_artifacts)
            # On threads: these wait for other processes and hosts, and the next order must not wait for them.
            case "send_stacks":
                if not _begin(self._send_stacks, response.send_stacks):
                    self._answer_stacks(response.send_stacks, f"its worker {NO_THREADS}")
            case "open_link":
                _begin(self._open_link, response.open_link)
            case "try_link":
                _begin(self._try_link, response.try_link)
            case "inject_fault":
                self._inject_fault(response.inject_fault)
            case "stop_rank":
                stop = response.stop_rank
                key = (stop.job_id, stop.rank, stop.incarnation)
                self._processes.stop(key, _waitable_s(stop.grace_s), waits_while_stopped=stop.waits_while_stopped)
            case None if not response.seq:
                log.warning("ignored an order that only newer versions of elche know")
            # no answer is possible, and the coordinator waits for one: this agent's end tells it that none comes
            case "welcome" | None:
                raise UnknownMessage("AttendResponse")
            case unreachable:
                assert_never(unreachable)

    def _send_stacks(self, order: agent_pb2.SendStacks) -> None:
        """Sends the stacks of a rank's threads."""
        self._answer_stacks(order, self._processes.stacks((order.job_id, order.rank, order.incarnation)))

    def _answer_stacks(self, order: agent_pb2.SendStacks, text: str) -> None:
        stacks = agent_pb2.RankStacks(job_id=order.job_id, rank=order.rank, incarnation=order.incarnation, text=text)
        self._outbound.send(agent_pb2.AttendRequest(rank_stacks=stacks))

    def _inject_fault(self, order: agent_pb2.InjectFault) -> None:
        """Breaks a rank, or this process, on request of somebody who tests what the cluster survives."""
        # A newer coordinator may know faults that this agent does not: naming one would raise, and end all ranks here.
        if order.fault not in Fault.values():
            log.warning("ignored a fault that only newer versions of elche know")
            return
        log.warning("job=%s rank=%d a fault on purpose: %s", order.job_id, order.rank, Fault.Name(order.fault))
        match order.fault:
            case Fault.FAULT_KILL_RANK:
                self._processes.signal(order.job_id, order.rank, signal.SIGKILL)
            case Fault.FAULT_STOP_RANK:
                self._processes.signal(order.job_id, order.rank, signal.SIGSTOP)
                going_on = (order.job_id, order.rank, signal.SIGCONT)
                threading.Timer(_waitable_s(order.seconds), self._processes.signal, going_on).start()
            case Fault.FAULT_KILL_AGENT:
                os.kill(os.getpid(), signal.SIGKILL)

    def _open_link(self, order: agent_pb2.OpenLink) -> None:
        """Listens on the network interface of the ranks here, and delivers the address."""
        try:
            address = listen(listening_address(self._coordinator, self._interface), order.secret)
            answer = agent_pb2.DeliverRequest(data=address.encode())
        except (OSError, InvalidJob) as error:
            answer = agent_pb2.DeliverRequest(error=f"it cannot listen: {error}")
        self._send("where it listens", order.transfer, iter((answer,)))

    def _try_link(self, order: agent_pb2.TryLink) -> None:
        """Measures the link to another host, and delivers the result."""
        try:
            measured = measure(order.address, order.secret, only_connects=order.only_connects)
            answer = agent_pb2.DeliverRequest(data=measured.SerializeToString())
        except (LinkFault, BadAddress) as error:
            answer = agent_pb2.DeliverRequest(error=str(error))
        self._send("what a link can do", order.transfer, iter((answer,)))

    def _begin_delivery(self, deliver: Callable[[Order], None], order: Order) -> None:
        """Sends a file on a thread. Drops the order if `MAX_DELIVERIES` files are being sent: the coordinator then
        answers its client when its own time limit has passed.
        """
        if not self._deliveries.acquire(blocking=False):
            log.warning("job=%s a file is not sent: %d are being sent already", order.job_id, MAX_DELIVERIES)
            return

        def run() -> None:
            try:
                deliver(order)
            finally:
                self._deliveries.release()

        if not _begin(run):
            self._deliveries.release()

    def _deliver(self, order: agent_pb2.SendModel) -> None:
        """Sends the model of a job that ran here, or the weights of a checkpoint of it, and no other file."""
        self._send(f"job {order.job_id}: its model", order.transfer, self._model(order))

    def _model(self, order: agent_pb2.SendModel) -> Iterator[agent_pb2.DeliverRequest]:
        folder = self._folders.find(order.job_id)
        name = BEST if order.best else MODEL
        path = folder / name if folder else Path(name)
        problem = ""
        if order.checkpoint:
            kept = Path(order.checkpoint)
            path = kept / (EMA if (kept / EMA).is_file() else WEIGHTS)
            problem = _problem_of(path.parent) if folder else f"job {order.job_id} has not run here"
        yield from _refusal(problem) if problem else _rest(path, self._processes.files, order.offset, order.sha256)

    def _deliver_log(self, order: agent_pb2.SendLog) -> None:
        """Sends the end of a log that a rank here has written. No other file can be asked for."""
        folder = self._folders.find(order.job_id)
        path, files = _log_path(folder, order.rank) if folder else Path("log"), self._processes.files
        chunks = self._followed(path, order) if order.follow else _chunks(path, order.max_bytes, files)
        times = TimesReader(path, files) if order.with_times else None
        self._send(path, order.transfer, _log_parts(path, chunks, times))

    def _store_artifacts(self, order: agent_pb2.StoreArtifacts) -> None:
        """Stores this host's artifacts of a job that has ended, and delivers the manifest."""
        with self._artifacts.answering():
            self._send(f"job {order.job_id}: its manifest", order.transfer, self._artifacts.answers(order))

    def _followed(self, path: Path, order: agent_pb2.SendLog) -> Iterator[tuple[int, bytes]]:
        """Yields (offset, bytes) of the end of a log and of what is appended to it, until its rank has ended; after
        `ALIVE_EVERY_S` without output, empty bytes.
        """
        sent_s, last = time.monotonic(), b""
        with self._processes.files.read(path) as file:
            goes_on = order.HasField("offset") and order.offset <= _size(file)
            file.seek(order.offset if goes_on else max(0, _size(file) - order.max_bytes))
            while True:
                # Checked before reading, so that what the rank writes before its end is still read after it.
                is_last = self._stopped.is_set() or not self._processes.has(order.job_id, order.rank)
                if file.tell() > _size(file):
                    if last not in (b"", b"\n"):
                        yield file.tell(), b"\n"  # the rest of that line is gone, and another one follows
                    file.seek(0)  # the log was longer than allowed, and was truncated to its end
                while data := file.read(LOG_CHUNK_BYTES):
                    sent_s, last = time.monotonic(), data[-1:]
                    yield file.tell() - len(data), data
                if is_last:
                    return
                if time.monotonic() - sent_s > ALIVE_EVERY_S:
                    sent_s = time.monotonic()
                    yield file.tell(), b""
                self._stopped.wait(FOLLOW_EVERY_S)

    def _send(self, what: Path | str, transfer: str, parts: Iterator[agent_pb2.DeliverRequest]) -> None:
        self._deliver_parts(what, chain([agent_pb2.DeliverRequest(transfer=transfer)], _whole(parts)))

    def _deliver_parts(self, what: Path | str, parts: Iterator[agent_pb2.DeliverRequest]) -> None:
        try:
            with open_channel(self._coordinator, self._tls) as channel:
                agent_pb2_grpc.AgentServiceStub(channel).Deliver(parts, metadata=self._metadata)
        except grpc.RpcError as error:
            log.warning("%s is not delivered: %s", what, error.details())
        except BadCertificate as error:
            log.warning("%s is not delivered: %s", what, error)

    def _tell_fitness(self, problem: str) -> None:
        if self._tells_fitness:
            fitness = agent_pb2.HostFitness(problem=problem[:MAX_PROBLEM])
            self._outbound.send(agent_pb2.AttendRequest(host_fitness=fitness))

    def _start_rank(self, start: agent_pb2.StartRank) -> None:
        key = (start.job_id, start.rank, start.incarnation)
        if problem := self._fitness.look():
            self._report_exit(key, Exit(code=1, log_tail=problem, not_started=True))
            return
        folder = Path(start.spec.output_dir) if start.spec.output_dir else self._work_dir / start.job_id
        self._folders.remember(start.job_id, folder)
        log_path = _log_path(folder, start.rank)
        try:
            processes = [
                RankStart(
                    launch_line=self._launch(start, folder, member).to_line(),
                    group_size=1 + len(start.more_slots),
                    is_loop=start.spec.is_loop,
                    log_path=log_path.with_suffix(f".{member}.log") if member else log_path,
                )
                for member in range(1 + len(start.more_slots))
            ]
            self._processes.start(key, processes)
        # `ValueError`: the folder's name has a null character; `RecursionError`: a setting is nested too deep
        except (OSError, ValueError, RecursionError, ElcheError) as error:
            self._report_exit(key, Exit(code=1, log_tail=f"the rank cannot be started: {error}"))
            return
        log.info("job=%s rank=%d incarnation=%d started", *key)
        started = agent_pb2.RankStarted(
            job_id=start.job_id, rank=start.rank, incarnation=start.incarnation, log_path=str(log_path.absolute())
        )
        self._outbound.send(agent_pb2.AttendRequest(rank_started=started))

    def _launch(self, start: agent_pb2.StartRank, folder: Path, member: int) -> Launch:
        spec, slot = start.spec, self._slot((start.slot, *start.more_slots)[member])
        secrets = {name: text for name in spec.secrets if (text := self._secret(name)) is not None}
        return Launch(
            coordinator=self._coordinator,
            tls=self._tls,
            interface=self._interface,
            secret=start.secret,
            job_id=start.job_id,
            rank=start.rank,
            incarnation=start.incarnation,
            member=member,
            group_size=1 + len(start.more_slots),
            device=slot.device,
            label=f"{slot.device} {slot.model}".strip(),
            source=spec.source,
            file_name=spec.file_name,
            output_dir=str(folder.absolute()),
            slow_factor=spec.slow_factors.get(start.rank, 1.0),
            settings={name: json.loads(text) for name, text in spec.settings.items()},
            verify_rounds=spec.verify_rounds,
            warms_up=start.warms_up,
            resume=spec.resume,
            arguments=list(spec.arguments),
            is_loop=spec.is_loop,
            environment={
                **spec.environment,
                **secrets,
                **(self._loop_environment(start, folder) if spec.is_loop else {}),
            },
            missing_secrets=[name for name in spec.secrets if name not in secrets],
            module=spec.module,
            bundle=spec.bundle,
            requirements=list(spec.requirements),
            packages_dir=str(self._work_dir.absolute() / "packages"),
        )

    def _loop_environment(self, start: agent_pb2.StartRank, folder: Path) -> dict[str, str]:
        """Environment variables of a script with its own loop. Raises `ElcheError` if rank 0 was not started here."""
        # Otherwise an index would be wrong below, and end this agent with all of its ranks.
        if start.rank >= len(start.loop_slots):
            raise ElcheError(f"the order names the devices of {len(start.loop_slots)} ranks")
        if start.rank == 0:  # it is started first
            self._loop_ports[start.job_id] = free_port()
        if (port := self._loop_ports.get(start.job_id)) is None:
            raise ElcheError("rank 0, whose store it needs, is not here")
        if start.rank + 1 == len(start.loop_slots):
            del self._loop_ports[start.job_id]
        devices = [self._slot(number).device for number in start.loop_slots]
        return {
            **environment_of_rank(start.rank, devices, port, os.environ),
            # not the agent's own coordinator, at which processes of the script would start another job
            "ELCHE_COORDINATOR": "",
            "ELCHE_CHECKPOINT_DIR": str(folder.absolute() / "checkpoints"),
            "ELCHE_RESUME": start.spec.resume,
            "ELCHE_SLOW": str(start.spec.slow_factors.get(start.rank, 1.0)),
        }

    def _slot(self, number: int) -> agent_pb2.Slot:
        """One of the slots that this host offers. Raises `InvalidJob` for another."""
        if number >= len(self._slots):
            raise InvalidJob(f"this host has no slot {number}: it offers {len(self._slots)}")
        return self._slots[number]

    def _secret(self, name: str) -> str | None:
        """The value of a secret that a job asks for by name; read each time, since it may change."""
        # A name with a folder in it could be that of any file of this host.
        if self._secrets_dir is None or Path(name).name != name:
            return None
        try:
            text = (self._secrets_dir / name).read_text(encoding="utf-8").rstrip("\n")
            # No environment variable can have a null character, and starting the rank would raise.
            return None if "\0" in text else text
        except (OSError, UnicodeDecodeError):
            return None

    def _report_exit(self, key: Key, ended: Exit) -> None:
        log.info("job=%s rank=%d incarnation=%d exited member=%d code=%d", *key, ended.member, ended.code)
        if self._stopped.is_set():
            return  # this agent has ended the rank because it ends itself
        self._outbound.send(rank_exited(key, ended))


def _begin(carry_out: Callable[..., None], *orders: Any) -> bool:
    """Carries out an order on a thread. Returns False if none can be started: who waits for an answer then gives up,
    and the next order, which may end the rank that has taken all threads, is carried out.
    """
    try:
        threading.Thread(target=carry_out, args=orders, daemon=True).start()
    except RuntimeError:
        log.warning("an order is not carried out: this worker %s", NO_THREADS)
        return False
    return True


def _waitable_s(seconds: float) -> float:
    """The next number of seconds that a thread can wait; 0 for NaN."""
    return max(0.0, min(seconds, threading.TIMEOUT_MAX))


def _log_path(folder: Path, rank: int) -> Path:
    return folder.absolute() / f"rank-{rank}.log"


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _rest(path: Path, files: RankFiles, offset: int, of_sha256: str) -> Iterator[agent_pb2.DeliverRequest]:
    """Yields a file's checksum, then its content: from `offset` on if the checksum is `of_sha256`, else all of it.
    While the checksum is computed, yields empty messages.
    """
    try:
        with files.read(path) as file:
            digest, said_s = hashlib.sha256(), time.monotonic()
            while data := file.read(CHUNK_BYTES):
                digest.update(data)
                if time.monotonic() - said_s > ALIVE_EVERY_S:
                    said_s = time.monotonic()
                    yield agent_pb2.DeliverRequest()
            sha256 = digest.hexdigest()
            file.seek(min(offset, _size(file)) if sha256 == of_sha256 else 0)
            yield agent_pb2.DeliverRequest(offset=file.tell(), sha256=sha256)
            while data := file.read(CHUNK_BYTES):
                yield agent_pb2.DeliverRequest(data=data)
    except OSError as error:
        yield from _refusal(f"{path} cannot be read: {error.strerror}")


def _chunks(path: Path, max_bytes: int, files: RankFiles) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of the end of a file."""
    with files.read(path) as file:
        file.seek(max(0, _size(file) - max_bytes))
        while data := file.read(min(LOG_CHUNK_BYTES, max_bytes)):
            max_bytes -= len(data)
            yield file.tell() - len(data), data


def _log_parts(
    path: Path, chunks: Iterator[tuple[int, bytes]], times: TimesReader | None
) -> Iterator[agent_pb2.DeliverRequest]:
    """The chunks of a log, the first one with its offset; with `times`, the time before each line."""
    is_first = True
    try:
        for offset, data in chunks:
            text = data if times is None else times.stamped(offset, data)
            # one message for an empty chunk, too, which shows if the reader is still there
            for start in range(0, max(1, len(text)), LOG_CHUNK_BYTES):
                piece = text[start : start + LOG_CHUNK_BYTES]
                yield agent_pb2.DeliverRequest(data=piece, offset=offset if is_first else None)
                is_first = False
    except OSError as error:
        yield from _refusal(f"{path} cannot be read: {error.strerror}")


def _whole(parts: Iterator[agent_pb2.DeliverRequest]) -> Iterator[agent_pb2.DeliverRequest]:
    """The parts; if the order has a name that no file can have, the reason instead, since a client waits for either."""
    try:
        yield from parts
    except (OSError, ValueError) as error:
        yield from _refusal(f"the order cannot be carried out: {getattr(error, 'strerror', None) or error}")


def _refusal(problem: str) -> Iterator[agent_pb2.DeliverRequest]:
    yield agent_pb2.DeliverRequest(error=problem)


def _problem_of(checkpoint: Path) -> str:
    """Returns why a checkpoint's weights cannot be sent as one file; "" when they can."""
    if not (checkpoint / MANIFEST).is_file():
        return f"the checkpoint {checkpoint} is not there any more"
    if (checkpoint / PIECES).is_dir():  # a file cannot hold it: only a job that resumes from it reads the parts
        return f"the checkpoint {checkpoint} has a sharded model in parts, which only a job can go on from"
    return ""
