"""Fixtures of the core's tests: a simulation that is checked after every event, and again when a test leaves it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.simulator.simulation import RankModel
from support.watched import LONG_ROUNDS, WatchedSimulation

TRANSCRIPTS = Path(__file__).parent / "transcripts"
Simulate = Callable[..., WatchedSimulation]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite-transcripts` writes golden transcripts anew; read the diff before you keep it."""
    parser.addoption("--rewrite-transcripts", action="store_true", help="write the core's golden transcripts anew")


@pytest.fixture
def simulate() -> Iterator[Simulate]:
    """Makes simulations. On exit, each that has succeeded has every sample exactly once, and has left nothing."""
    made: list[WatchedSimulation] = []

    def make(rank_models: list[RankModel], **options: object) -> WatchedSimulation:
        fields = AgreedSettings.__dataclass_fields__
        settings = {"dataset_size": 4000, "batch_size": 10, "epochs": 1, "policy": "cadence"}
        settings |= {"checkpoint_every_minutes": None, "ride_out_s": 0.0, **LONG_ROUNDS}
        settings |= {name: value for name, value in options.items() if name in fields}
        rest = {name: value for name, value in options.items() if name not in fields}
        made.append(WatchedSimulation(settings=AgreedSettings(**settings), ranks=rank_models, **rest))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for simulation in made:
        check_on_exit(simulation)


def check_on_exit(simulation: WatchedSimulation) -> None:
    """What must hold of every simulation that a test leaves."""
    job = simulation.core.jobs.get("job")  # type: ignore[call-overload]
    if job is None or job.result is None:
        return
    simulation.assert_ended_cleanly()
    if job.result.outcome is Outcome.SUCCEEDED:
        simulation.assert_exactly_once()
        before = json.loads(simulation.resumed.training)["ledger"]["epoch"] if simulation.resumed else 0
        ledger = job.run.training.ledger
        assert ledger.is_stopped or ledger.epoch == ledger.num_epochs
        told = [report.epoch for report in simulation.epochs]
        assert (told if simulation.job.attempt == 1 + bool(simulation.resumed) else sorted(set(told))) == list(
            range(before, ledger.epoch)
        ), "only a job that has gone back tells of an epoch again"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the golden one of that name, or writes it with `--rewrite-transcripts`."""

    def compare(name: str, text: str) -> None:
        path = TRANSCRIPTS / f"{name}.txt"
        if request.config.getoption("--rewrite-transcripts", default=False):
            path.write_text(text)
        assert path.read_text() == text, f"{path.name} differs: pytest tests/core --rewrite-transcripts"

    return compare
