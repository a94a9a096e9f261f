"""Plans of jobs: the core runs in virtual time with devices as they are given, and what it has done is counted."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from elche.errors import ElcheError, InvalidJob
from elche.plan import DevicePlan, MemoryPlan, Plan, PlanRequest
from elche.settings import BLOCKING_ANCHOR, OVERLAPPED_ANCHOR, AgreedSettings
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.messages.reports import RoundReport
from elche_coordinator.simulator.simulation import RankModel, Simulation

ROUND_TRIPS = 4
"""Round trips of an averaging for each rank but one: its headers and checks go around the ring before and after values,
and gloo's receiver says that it is ready. Fits what docs/benchmarks.md measured over a slow link."""
FIXED_S = 0.005
"""Seconds that an averaging takes in addition, however small the model: over gloo on loopback at least 2 to 7 ms."""
SENT_FRACTIONS = {None: 1.0, "bf16": 1 / 2, "int8": 260 / 1024, "int4": 34 / 256, "int2": 68 / 1024, "topk": 14 / 1024}
"""Bytes sent per byte of float32, by compression: of a block's bytes with its scales, and of its values'."""
OPTIMIZER_COPIES = {"adam": 2, "momentum": 1, "sgd": 0}
"""Tensors of the parameters' size that each optimizer keeps."""
CHECKPOINT_S = 600.0
"""Default of the seconds between checkpoints of a rank that trains alone."""
LEAST_ROUNDS, FEW_ROUNDS = 8, 3
"""Least number of rounds before counting begins, in which the cadence is found, and of rounds that are counted; the
smaller number where a round has very many batches."""
MOST_VICTIMS = 3
"""Devices that fail in a simulation; the others stand for them."""
ROUNDS_AFTER_FAILURE = 3
"""Rounds that are simulated after a failed device is back."""
NUM_BATCHES = 1500
"""Least number of batches of all ranks before counting begins, and of those counted; with many ranks fewer."""
MOST_BATCHES_BEFORE = 4000
"""If more batches come before counting begins, several are simulated as one that takes as long as all of them."""
LEAST_PARTS = 20
"""Least number of such joined batches that the slowest rank makes in the time of an averaging."""
MOST_RESTART_S = 60.0
"""Seconds of a restart that are simulated at most; for the rest the others are assumed to train without the rank."""
MOST_EVENTS = 500_000
"""Most events that the core handles in one simulation."""
LONG_EPOCH = 300_000
"""Batches of an epoch that does not end while it is simulated."""


def plan(request: PlanRequest) -> Plan:
    """Returns the figures to be expected of a job. Raises `InvalidJob` for settings that exclude each other."""
    return _Planned(request).plan()


def averaging_s(request: PlanRequest) -> float:
    """Seconds of an averaging, by ring; 0 for a device alone."""
    num_others = len(request.batch_ms) - 1
    if not num_others:
        return 0.0
    return FIXED_S + sent_bytes(request) / request.link_bytes_per_s + ROUND_TRIPS * num_others * request.round_trip_s


def sent_bytes(request: PlanRequest) -> float:
    """Bytes that each device sends for an averaging."""
    num_devices = len(request.batch_ms)
    return 2 * (num_devices - 1) / num_devices * request.model_bytes * SENT_FRACTIONS[request.compress]


def memory(request: PlanRequest, *, overlaps: bool) -> MemoryPlan:
    """Bytes of each device, by the table of docs/gpus.md, with the default way to merge."""
    copy, num_devices = request.model_bytes, len(request.batch_ms)
    errors = 0.0 if request.compress is None else 1 + 1 / num_devices
    held, more = 2 + overlaps + errors, errors
    if num_devices == 1:
        held, more = 0, 1  # of a result that may become a checkpoint
    return MemoryPlan(
        parameters=copy,
        gradients=copy,
        optimizer=OPTIMIZER_COPIES[request.optimizer] * copy,
        rounds=round(held * copy),
        while_averaging=round(more * copy),
    )


@dataclass(frozen=True, slots=True)
class _Mark:
    """A moment of the simulation, that of a commit."""

    at_s: float
    num_rounds: int
    committed: int
    """Batches, of those that are simulated."""
    trained_s: tuple[float, ...]
    """Of each rank."""


class _Planned:
    """The simulation of one request."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._num = len(request.batch_ms)
        self._bounds = [1000 / ms for ms in request.batch_ms]
        """Batches per second of each device alone."""
        self._averaging_s = averaging_s(request)
        self._settings = self._make_settings()
        self._restart_s = min(request.restart_s, MOST_RESTART_S, 1000 / sum(self._bounds))
        """Seconds of a restart that are simulated."""
        models = [RankModel(batch_ms=ms * self._factor) for ms in request.batch_ms]
        self._simulation = Simulation(
            settings=self._settings,
            ranks=models,
            latency_ms=request.round_trip_s / 2 * 1000,
            sync_ms=self._averaging_s * 1000,
            start_ms=self._restart_s * 1000,
            check=False,
        )
        self._num_read = self._num_rounds = self._committed = 0
        """Numbers of the simulation's reports that were read, of rounds in them, and of these rounds' batches."""

    def _make_settings(self) -> AgreedSettings:
        request = self._request
        settings = AgreedSettings(
            epochs=100_000,
            dataset_size=LONG_EPOCH,
            batch_size=1,
            policy=request.policy,
            averaging=request.averaging,
            checkpoint_every_minutes=None,
        )
        if request.averaging == "overlapped" and not settings.traits.may_overlap:
            raise InvalidJob(f"averaging is auto or blocking with policy {request.policy}, not overlapped")
        self._overlaps = settings.overlaps
        self._factor = self._find_factor()
        if request.epoch_batches is not None:
            settings = replace(settings, dataset_size=ceil(request.epoch_batches / self._factor))
        return replace(
            settings,
            averaging="overlapped" if self._overlaps else "blocking",
            anchor=ceil((OVERLAPPED_ANCHOR if self._overlaps else BLOCKING_ANCHOR) / self._factor),
            max_anchor=max(1, settings.max_anchor // self._factor),
        )

    def _find_factor(self) -> int:
        """Returns the number of batches that are simulated as one: 1, unless averagings are so long that the simulation
        would take too long.
        """
        wanted = LEAST_ROUNDS * self._averaging_s * sum(self._bounds) / MOST_BATCHES_BEFORE
        most = self._averaging_s * min(self._bounds) / LEAST_PARTS
        if self._request.epoch_batches is not None:
            most = min(most, self._request.epoch_batches / 100)
        return 1 if self._request.policy == "sync" else max(1, int(min(wanted, most)))

    def plan(self) -> Plan:
        """Simulates the job without failures, and then with some; counts both."""
        first = self._reach(LEAST_ROUNDS, NUM_BATCHES)
        last = self._reach(LEAST_ROUNDS, NUM_BATCHES)
        took_s, num_rounds = last.at_s - first.at_s, last.num_rounds - first.num_rounds
        trained = [min(1.0, (b - a) / took_s) for a, b in zip(first.trained_s, last.trained_s, strict=True)]
        averaging = 0.0 if self._overlaps else num_rounds * self._averaging_s / took_s
        mtbf_s, per_failure_s = self._request.mtbf_s, None
        kept = 1.0
        """Part of the time that is not lost to failures."""
        if mtbf_s is not None:
            per_failure_s = self._loss_s(first, last)
            kept = mtbf_s / (mtbf_s + per_failure_s * self._num)
        devices = tuple(
            self._device(ms, part, averaging, kept) for ms, part in zip(self._request.batch_ms, trained, strict=True)
        )
        batches_per_s = sum(one.batches_per_s for one in devices)
        epoch = self._request.epoch_batches
        return Plan(
            batches_per_s=batches_per_s,
            bound_batches_per_s=sum(self._bounds),
            rounds_per_minute=60 * num_rounds / took_s * kept,
            averaging_s=self._averaging_s,
            sent_bytes_per_round=self._num * sent_bytes(self._request),
            loss_per_failure_s=per_failure_s,
            devices=devices,
            memory=memory(self._request, overlaps=self._overlaps),
            simulated_s=self._simulation.clock.now_s,
            epoch_s=None if epoch is None else epoch / batches_per_s,
        )

    def _device(self, batch_ms: float, trained: float, averaging: float, kept: float) -> DevicePlan:
        averaging = min(averaging, 1 - trained)
        return DevicePlan(
            batch_ms=batch_ms,
            batches_per_s=trained * kept * 1000 / batch_ms,
            training=trained * kept,
            waiting=(1 - trained - averaging) * kept,
            averaging=averaging * kept,
            lost=1 - kept,
        )

    def _loss_s(self, first: _Mark, last: _Mark) -> float:
        """Mean time that the job loses by a failure of one device."""
        if self._num == 1:  # it goes back to its last checkpoint
            return self._request.restart_s + CHECKPOINT_S / 2
        by_speed = sorted(range(self._num), key=lambda rank: self._request.batch_ms[rank])
        num_victims = min(self._num, MOST_VICTIMS)
        victims = [by_speed[(2 * at + 1) * self._num // (2 * num_victims)] for at in range(num_victims)]
        end = last
        for victim in victims:
            end = self._fail(victim)
        usual = (last.committed - first.committed) / (last.at_s - first.at_s)
        lost_s = end.at_s - last.at_s - (end.committed - last.committed) / usual
        rest_s = (self._request.restart_s - self._restart_s) / self._num
        return max(0.0, lost_s) / num_victims + rest_s

    def _fail(self, victim: int) -> _Mark:
        """A device fails; the moment some rounds after its rank trains again."""
        before = self._simulation.processes[Rank(victim)]
        self._simulation.kill(victim)

        def is_back() -> bool:
            process = self._simulation.processes[Rank(victim)]
            return process is not before and process.trained_s > 0

        self._run(is_back)
        return self._reach(ROUNDS_AFTER_FAILURE, 0)

    def _reach(self, more_rounds: int, more_batches: int) -> _Mark:
        """Lets time pass until so much more is committed."""
        self._read()
        num_rounds, committed = self._num_rounds + more_rounds, self._committed + self._scaled(more_batches)
        few_rounds, very_many = self._num_rounds + FEW_ROUNDS, self._committed + self._scaled(3 * NUM_BATCHES)

        def is_reached() -> bool:
            # Where rounds are long, `more_rounds` of them would take too much time.
            has_news = self._read()
            is_enough = self._committed >= committed and self._num_rounds >= num_rounds
            return has_news and (is_enough or (self._committed >= very_many and self._num_rounds >= few_rounds))

        self._run(is_reached)
        trained_s = tuple(one.trained_s for _, one in sorted(self._simulation.processes.items()))
        return _Mark(self._simulation.clock.now_s, self._num_rounds, self._committed, trained_s)

    def _scaled(self, num_batches: int) -> int:
        return num_batches * 8 // max(8, self._num)

    def _read(self) -> bool:
        """Counts the rounds that were committed since; True if there are any."""
        reports = self._simulation.reports
        is_news = False
        while self._num_read < len(reports):
            report = reports[self._num_read]
            self._num_read += 1
            if isinstance(report, RoundReport):
                self._num_rounds += 1
                self._committed += report.samples
                is_news = True
        return is_news

    def _run(self, condition: Callable[[], bool]) -> None:
        simulation = self._simulation

        def is_over() -> bool:
            return condition() or simulation.job.result is not None or simulation.num_events > MOST_EVENTS

        simulation.run_until(is_over, limit_s=1e12)
        if simulation.job.result is not None:
            raise ElcheError(f"the simulated job ended: {simulation.job.result.error or 'all was trained'}")
        if simulation.num_events > MOST_EVENTS:
            raise ElcheError("the simulation takes too long: fewer ranks, longer batches or a faster link")
