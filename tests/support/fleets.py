"""A coordinator, and jobs on agents that an engine starts."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from elche_client import Client, JobHandle
from elche_client.events import JobResult
from support.real_processes import Command, Coordinator, Mark, command, coordinator, eventually

LINEAR = Path(__file__).parents[1] / "processes" / "jobs" / "linear.py"
SLOWLY = """
import dataclasses, time

def slowly(model, batch, step=train_step):
    time.sleep(0.02)
    return step(model, batch)

job = dataclasses.replace(job, train_step=slowly)
"""
UNHURRIED = SLOWLY.replace("0.02", "0.1")
"""With few rounds in a second, beside which an engine has its processors for itself."""
EPOCHS = 10_000
"""How many a job has that is to train for as long as its story takes."""
NUM_SAMPLES = 500
TOKEN = "engines and their token"
WORKER = f"{sys.executable} -m elche_worker.agent --devices cpu"


@dataclass(slots=True)
class Lab:
    """A coordinator, and the commands that start agents for it."""

    coordinator: Coordinator
    address: str
    """Where agents find it."""
    client: Client
    folder: Path
    mark: Mark
    env: dict[str, str]

    def elche(self, *arguments: str) -> Command:
        return command(self.mark, "elche_client", *arguments, cwd=self.folder, env=self.env, limit_s=400)

    def up(self, *arguments: str) -> None:
        done = self.elche("up", "--coordinator", self.address, "--worker", WORKER, *arguments)
        assert done.code == 0, done.err

    def states(self, *arguments: str) -> list[str]:
        done = self.elche("agents", "--json", *arguments)
        assert done.code == 0, done.err
        return [one["state"] for one in json.loads(done.out)]

    def until_attended(self, num_hosts: int) -> None:
        eventually(lambda: len(self.client.hosts()) == num_hosts, f"{num_hosts} hosts attend")

    def train(self, num_ranks: int) -> JobHandle:
        """A job that trains, until `is_exact_so_far`."""
        path = self.folder / "linear.py"
        path.write_text(LINEAR.read_text() + UNHURRIED)
        job = self.client.submit(path, num_ranks=num_ranks, min_ranks=1, epochs=EPOCHS)
        eventually(lambda: self.client.get(job.id).num_rounds >= 3, "it trains")
        return job

    def until_ranks(self, job: JobHandle, number: int) -> None:
        def is_so() -> bool:
            held = [slot for host in self.client.hosts() for slot in host.slots if slot.job_id == job.id]
            return len(held) == number

        eventually(is_so, f"{number} ranks", 90)

    def until_lost(self, number: int) -> None:
        """Until so many ranks have been lost so far. Each may have a slot again at once, on a host that is back."""
        eventually(lambda: self.said("is lost") >= number, f"{number} ranks are lost", 90)

    def said(self, text: str) -> int:
        """How often the coordinator has said this."""
        return self.coordinator.log.read_text().count(text)


def is_exact_so_far(job: JobHandle) -> None:
    """Ends a job that would train for long: each sample of the epochs that are over was committed once, and none twice.
    Later ones may be over in part, since each rank has a reserve, here of several epochs.
    """

    def num_over() -> int:
        view = job.client.get(job.id)
        return view.epoch if view.epoch >= 4 else 0

    over = eventually(num_over, "some epochs are over")
    job.cancel()
    *_, result = job.watch()
    assert isinstance(result, JobResult)
    assert set(result.committed_samples[:over]) == {NUM_SAMPLES}, str(result.committed_samples)
    assert max(result.committed_samples) <= NUM_SAMPLES


@contextmanager
def lab(mark: Mark, folder: Path, env: dict[str, str], host: str = "127.0.0.1") -> Iterator[Lab]:
    token = folder / "pool.token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    env = {"ELCHE_TOKEN_FILE": str(token), **env}
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, folder, listen=f"{host}:0", env=env))
        client = stack.enter_context(Client(one.address, token=TOKEN))
        yield Lab(one, one.address, client, folder, mark, env)
