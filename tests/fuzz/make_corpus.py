"""Makes `corpus/` anew, by a small real run: `PYTHONPATH=tests .venv/bin/python tests/fuzz/make_corpus.py`.

corpus/messages.jsonl   messages of each kind to and from a coordinator (`support.recording_coordinator`)
corpus/run/             files of the folder of a run
corpus/journal.jsonl    the newest events of a job's journal
"""

import os
import shutil
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from elche.errors import ElcheError
from elche_client import Client
from support.real_processes import Mark, agent, command, coordinator, eventually

CORPUS = Path(__file__).parent / "corpus"
JOB = Path(__file__).parent.parent / "processes" / "jobs" / "linear.py"
FILES = (
    "audit",
    "cadence.binpb",
    "checkpoints",
    "coordinator/recordings",
    "coordinator/timelines",
    "record.json",
    "run.json",
)
SETTINGS = {"epochs": 2, "checkpoint_every_epochs": 1, "timeline": True}


def record_messages(mark: Mark, folder: Path) -> None:
    """A job over the relay, with two ranks, and each question that a client can ask about it."""
    messages = folder / "messages.jsonl"
    env = {"MESSAGES": str(messages)}
    with (
        coordinator(mark, folder, env=env, module="support.recording_coordinator") as one,
        agent(mark, folder, one.address),
        Client(one.address, token="") as client,
    ):
        for backend in ("cpu", "gloo"):
            job = client.submit(folder / "linear.py", num_ranks=2, backend=backend, **SETTINGS)
            eventually(partial(client.checkpoints, job.id), "a checkpoint")
            for change in (client.pause, partial(client.pause, is_paused=False), client.checkpoint):
                with suppress(ElcheError):  # the job may have ended
                    change(job.id)
            with suppress(ElcheError):
                client.scale(job.id, 1)
            job.result()
        ask(client, job.id, folder)
        shutil.copy(messages, CORPUS / "messages.jsonl")


def ask(client: Client, job_id: str, folder: Path) -> None:
    """Each question about a job that has ended."""
    list(client.watch(job_id))
    list(client.logs(job_id, rank=0))
    client.timeline(job_id)
    (CORPUS / "journal.jsonl").write_text(client.journal(job_id, num_events=60), encoding="utf-8")
    client.download(job_id, folder / "model.safetensors")
    host = client.hosts()[0].host
    client.drain(host)
    client.drain(host, is_drained=False)
    client.jobs()
    with suppress(ElcheError):  # the job is complete
        client.resume(job_id)
    client.cancel(job_id)
    with suppress(ElcheError):  # a link is between two hosts
        list(client.measure_links())


def run_alone(mark: Mark, folder: Path) -> None:
    """A run of `elche run`, which ends, whose small files are kept."""
    run = folder / "run"
    options = ["--ranks", "2", "--epochs", "2", "--checkpoint-every-epochs", "1", "--keep-checkpoints", "1"]
    options += ["--audit", "true", "--timeline", "true", "--out", str(run)]
    done = command(mark, "elche_client", "run", "linear.py", *options, cwd=folder)
    assert done.code == 0, done.err
    for path in (path for name in FILES for path in [run / name, *(run / name).rglob("*")] if path.is_file()):
        kept = CORPUS / "run" / path.relative_to(run)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, kept)


def main() -> None:
    """Replaces the corpus."""
    mark = Mark()
    shutil.rmtree(CORPUS, ignore_errors=True)
    CORPUS.mkdir()
    os.environ |= {"ELCHE_FOLDER": "none", "ELCHE_CONFIG": "/proc/none/elche.toml"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copy(JOB, folder / "linear.py")
        record_messages(mark, folder)
        run_alone(mark, folder)
    mark.assert_none_left()


if __name__ == "__main__":
    main()
