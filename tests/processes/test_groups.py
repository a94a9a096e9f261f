"""Replica groups as real processes: one model divided in each, averaged between them."""

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elche.errors import InvalidJob, JobFailed
from elche_client import Client
from elche_client.events import JobState, MembershipReport, UserEvent
from elche_client.options import JobOptions
from elche_worker.data.dataset import as_dataset, order_of
from elche_worker.model.checkpoint import load
from elche_worker.user.loading import load_job
from support.real_processes import Cluster, Command, Mark, agent, coordinator, eventually

pytestmark = pytest.mark.slow(reason="groups of up to four processes that shard")

JobFile = Callable[..., Path]
NUM_SAMPLES, BATCH_SIZE, EPOCHS = 500, 16, 3  # of jobs/sharded.py
SGD = "import dataclasses\njob = dataclasses.replace(job, {})"
ENDLESS = SGD.format("epochs=1000") + "\nos.environ['SLEEP_S'] = '0.05'"
"""A job that trains until the test has seen something."""
LONG = pytest.mark.long(reason="each case trains for several seconds, beside one in the gate that goes the same way")
PLAIN_SGD = "optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A host with six slots."""
    mark, folder = Mark(), tmp_path_factory.mktemp("groups")
    with (
        coordinator(mark, folder) as one,
        agent(mark, folder, one.address, devices=",".join(["cpu"] * 6), env={"OMP_NUM_THREADS": "1"}) as other,
        Client(one.address, token="") as client,
    ):
        yield Cluster(one, other, client, mark)
    mark.assert_none_left()


@pytest.fixture
def groups(host: Cluster) -> Iterator[Cluster]:
    """The host; all ranks of a test's jobs are gone at its end."""
    yield host
    for job in host.client.jobs():
        if not job.state.has_ended:
            host.client.cancel(job.job_id)
    host.mark.assert_none_left("elche rank")
    assert host.coordinator.new_errors() == []


def trained(groups: Cluster, path: Path, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The final model of a job that has succeeded."""
    options = {"verify_rounds": True, "group_size": 2, **options}
    result = groups.client.submit(path, output_dir=out, **options).result()
    assert result.committed_samples == (NUM_SAMPLES,) * result.epochs
    return load_file(out / "model.safetensors")


def trained_alone(path: Path) -> dict[str, torch.Tensor]:
    """The model after the same batches, in one process, with plain PyTorch."""
    job = load_job(path.read_text(), str(path))
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer, dataset = job.optimizer(model), job.dataset()
    order = order_of(as_dataset(dataset, ""), None, job.seed, "")
    for epoch in range(job.epochs):
        indices = order.indices(epoch, 0, NUM_SAMPLES)
        for at in range(0, NUM_SAMPLES, job.batch_size):
            loss = job.train_step(model, dataset[indices[at : at + job.batch_size]])
            loss.backward()
            if job.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def assert_near(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.allclose(one[name], other[name], rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize(
    ("shard", "size", "more"),
    [
        ("full_shard", 2, "max_grad_norm=0.1"),
        pytest.param("shard_grad_op", 3, "accumulate=2", marks=LONG),
        pytest.param("no_shard", 2, "", marks=LONG),
        pytest.param("hybrid", 4, "shard=Strategy.HYBRID_SHARD(2), group_size=4", marks=LONG),
    ],
)
def test_one_group_learns_what_one_process_does(
    groups: Cluster, job_file: JobFile, tmp_path: Path, shard: str, size: int, more: str
) -> None:
    """500 samples in batches of 16 leave 4 at the end of an epoch, and neither is a multiple of 3: parts differ."""
    path = job_file("sharded.py", "from elche_worker import Strategy", SGD.format(", ".join([PLAIN_SGD, more])))
    settings = {} if shard == "hybrid" else {"shard": shard}
    model = trained(groups, path, tmp_path / "out", num_ranks=1, group_size=size, **settings)
    alone = trained_alone(path)
    if "accumulate" in more:
        alone["seen"] = model["seen"]  # it counts parts of batches
    assert_near(model, alone)


def test_a_batch_that_does_not_reach_all_members(groups: Cluster, job_file: JobFile, tmp_path: Path) -> None:
    """Batches of 499 samples leave one at the end of an epoch: what stands in for others' parts counts nothing."""
    path = job_file("sharded.py", SGD.format(f"{PLAIN_SGD}, batch_size=499, epochs=6"))
    model = trained(groups, path, tmp_path / "out", num_ranks=1, group_size=3)
    assert_near(model, trained_alone(path))


@pytest.mark.parametrize(
    "settings",
    [
        {"averaging": "blocking", "outer_optimizer": "nesterov", "merge": "adascale"},
        pytest.param({"averaging": "overlapped"}, marks=LONG),
    ],
)
def test_two_groups_learn_what_two_ranks_do(
    groups: Cluster, job_file: JobFile, tmp_path: Path, settings: dict[str, str]
) -> None:
    """The same rounds, repeated by two ranks that each have a whole model. Digests are compared after each round."""
    path = job_file("sharded.py", SGD.format(PLAIN_SGD))
    handle = groups.client.submit(
        path, num_ranks=2, group_size=2, verify_rounds=True, output_dir=tmp_path / "two", **settings
    )
    recording = b""
    for event in handle.watch():
        recording += getattr(event, "recorded", b"")
    assert handle.result().state is JobState.SUCCEEDED
    whole_settings = {"group_size": 1, "shard": None, **settings}
    options = JobOptions(num_ranks=2, settings=whole_settings, replay=recording, output_dir=str(tmp_path / "whole"))
    whole = groups.client.submit_options(path, options).result()
    assert whole.state is JobState.SUCCEEDED
    two, whole_model = (load_file(tmp_path / one / "model.safetensors") for one in ("two", "whole"))
    assert_near(two, whole_model, tolerance=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "sync", "anchor": None, "epochs": 1},
        pytest.param({"policy": "async"}, marks=LONG),
        pytest.param({"nonfinite": "skip", "compress": "int8"}, marks=LONG),
    ],
)
def test_every_policy_trains_every_sample_once(
    groups: Cluster, job_file: JobFile, tmp_path: Path, options: dict[str, Any]
) -> None:
    env_note = "os.environ['NOTE'] = '1'"
    path = job_file("sharded.py", env_note)
    trained(groups, path, tmp_path / "out", num_ranks=2, slow_factors={1: 2.0}, **options)
    noted = Counter(int(index) for rank in (0, 1) for index in path.with_suffix(f".rank-{rank}").read_text().split())
    assert set(noted) == set(range(NUM_SAMPLES))
    assert set(noted.values()) == {options.get("epochs", EPOCHS)}


EVERYTHING = """
HELD = dataset().tensors
LOG = Path(__file__).with_suffix(f".log-{os.environ.get('ELCHE_RANK')}")

def note(*what):
    import torch.distributed as dist
    with LOG.open("a") as log:
        log.write(" ".join(map(str, [dist.get_rank(), *what])) + "\\n")

def seen(rank, epoch):
    note("epoch", epoch)
    if epoch == 1:
        rank.lr_factor = 0.5

class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return super().forward(self.norm(x))

job = TrainingJob(
    model=Normed,
    optimizer=job.optimizer,
    dataset=dataset,
    train_step=train_step,
    eval_dataset=lambda: TensorDataset(*HELD),
    eval_step=lambda model, batch: {"mse": nn.functional.mse_loss(model(batch[0]), batch[1])},
    batch_size=20,
    epochs=3,
    anchor=3,
    num_workers=1,
    timeline=True,
    precision="bf16",
    epoch_fn=seen,
    metrics_fn=lambda metrics: note("metrics", metrics.epoch),
    checkpoint_fn=lambda version, model: note("checkpoint", float(model(HELD[0]).mean()) is not None),
    after_round=lambda model, version: note("round", version),
    checkpoint_every_epochs=1,
    schedule=lambda progress: 1 - progress.fraction / 2,
    lr_scale_ratio=0.5,
    group_size=2,
    shard="shard_grad_op",
)
"""


def test_callbacks_workers_evaluation_and_buffers(groups: Cluster, job_file: JobFile, tmp_path: Path) -> None:
    """Callbacks that get a model run on all members, so that they may use it; those that get figures run once."""
    path = job_file("sharded.py", EVERYTHING)
    handle = groups.client.submit(path, num_ranks=2, output_dir=tmp_path / "out", verify_rounds=True, group_size=2)
    result = handle.result()
    assert result.committed_samples == (NUM_SAMPLES,) * EPOCHS
    assert {"mse"} == set(result.metrics)
    lines = [path.with_suffix(f".log-{rank}").read_text().splitlines() for rank in (0, 1)]
    assert {line for of_rank in lines for line in of_rank} >= {
        f"{member} epoch {n}" for member in "01" for n in (0, 1, 2)
    }
    for of_rank in lines:
        of_members = [[line[2:] for line in of_rank if line[0] == member] for member in "01"]
        assert of_members[1] == [line for line in of_members[0] if not line.startswith("metrics")]
        epochs = [line for line in of_members[0] if line.startswith("epoch")]
        assert epochs == sorted(epochs)  # a group that others outrun may have no batch of an epoch
    assert sum(line == "0 metrics 2" for of_rank in lines for line in of_rank) == 1
    num_shown = sum(line.startswith("0 checkpoint") for of_rank in lines for line in of_rank)
    assert num_shown == len(result.checkpoints)
    assert num_shown in (2, 3)  # two epochs may end in one round
    model = load_file(tmp_path / "out/model.safetensors")
    assert int(model["norm.num_batches_tracked"]) > 0
    assert torch.isfinite(model["norm.running_var"]).all()


WRONG = """
os.environ["SLEEP_S"] = "0.02"  # so that both groups are as fast, however busy the machine is
rounds = []


def wrong(model, batch, before=train_step):
    if os.environ["ELCHE_RANK"] == "1" and len(rounds) >= 12 and "wrong" not in rounds:
        rounds.append("wrong")
        trained = [one for one in model.parameters() if one.requires_grad]
        with torch.no_grad():
            for local in (one.to_local() if hasattr(one, "to_local") else one for one in trained):
                local.view(-1)[:1] = 1e6
    return before(model, batch)


import dataclasses
job = dataclasses.replace(
    job, train_step=wrong, epochs=8, max_anchor=1, after_round=lambda *_: rounds.append(None), {}
)
"""


@pytest.mark.gate
@pytest.mark.parametrize(
    "how", ["group_size=2, shard='full_shard'", pytest.param("group_size=2, shard='no_shard'", marks=LONG)]
)
def test_a_group_that_computes_wrong_is_left_out_of_a_round(groups: Cluster, job_file: JobFile, how: str) -> None:
    path = job_file("sharded.py", WRONG.format(how))
    handle = groups.client.submit(path, num_ranks=2, group_size=2, verify_rounds=True)
    events = [report for report in handle.watch() if isinstance(report, UserEvent)]
    result = handle.result()
    assert [event.rank for event in events] == [1]
    assert "left out of the average" in events[0].text
    assert result.committed_samples == (NUM_SAMPLES,) * 8
    assert 0 < result.discarded_samples < NUM_SAMPLES
    assert result.metrics["mse"] < 1.0


# Death


def pid_of(groups: Cluster, rank: int, member: int) -> int | None:
    """The process id of a member; None while there is none, or none that writes to its log."""
    for pid in groups.mark.living("elche rank"):
        try:
            log = os.readlink(f"/proc/{pid}/fd/1")
        except OSError:
            continue  # it ended while we looked
        if log.endswith(f"rank-{rank}.{member}.log" if member else f"rank-{rank}.log"):
            return pid
    return None


def ranks_of(groups: Cluster, rank: int, member: int) -> int:
    """The process id of a member that is there."""
    pid = pid_of(groups, rank, member)
    assert pid is not None, "there is no such process"
    return pid


HELD = """
made = []


def held(model, batch):
    made.append(None)
    if not Path(__file__).with_name("may-end").exists():
        time.sleep(0.05 if len(made) < 15 else 1.0)
    return train_step(model, batch)
"""
"""After the first rounds few batches are made until `may-end` is there."""


@pytest.mark.gate
def test_a_group_whose_member_is_killed_is_started_again(groups: Cluster, job_file: JobFile, tmp_path: Path) -> None:
    epochs = 5
    path = job_file("sharded.py", HELD, SGD.format(f"epochs={epochs}, train_step=held"))
    handle = groups.client.submit(path, num_ranks=3, group_size=2)
    eventually(lambda: groups.client.jobs()[-1].num_rounds > 3, "it trains")
    before = [ranks_of(groups, rank, member) for rank in (0, 2) for member in (0, 1)]
    victim = ranks_of(groups, 1, 1)
    watch = handle.watch()
    next(watch)  # it has begun: what was told before is not told again
    os.kill(victim, signal.SIGKILL)

    def lost() -> MembershipReport | None:
        return event if isinstance(event := next(watch), MembershipReport) else None

    told = eventually(lost, "they go on").text
    assert re.match(r"process 1 \(cpu\) of rank 1 on .* \(2x cpu\) was killed by signal 9 ", told)
    eventually(
        lambda: len(groups.mark.living("elche rank")) == 6 and pid_of(groups, 1, 1) not in (None, victim), "it is back"
    )
    assert [ranks_of(groups, rank, member) for rank in (0, 2) for member in (0, 1)] == before
    (tmp_path / "may-end").touch()
    assert handle.result().committed_samples == (NUM_SAMPLES,) * epochs


def test_a_job_that_is_cancelled_leaves_no_member(groups: Cluster, job_file: JobFile) -> None:
    """While its processes meet, and while they train: the fixture looks for what is left."""
    path = job_file("sharded.py", ENDLESS)
    for num_rounds in (0, 2):
        handle = groups.client.submit(path, num_ranks=2, group_size=2)
        eventually(lambda: groups.client.jobs()[-1].num_rounds >= num_rounds, "it trains")  # noqa: B023
        handle.cancel()
        assert list(handle.watch())[-1].state is JobState.CANCELLED


def test_an_agent_that_is_killed_leaves_no_member(mark: Mark, job_file: JobFile, tmp_path: Path) -> None:
    with (
        coordinator(mark, tmp_path) as one,
        Client(one.address, token="") as client,
        agent(mark, tmp_path, one.address, devices="cpu,cpu") as other,
    ):
        client.submit(job_file("sharded.py", ENDLESS), num_ranks=1, group_size=2)
        eventually(lambda: client.jobs()[-1].num_rounds > 1, "it trains")
        other.process.kill()
        other.process.wait()
        mark.assert_none_left("elche rank")


RAISES_ON_ONE = """
def train_step(model, batch, before=train_step):
    import torch.distributed as dist
    if dist.get_rank() == 1 and model.seen > 20:
        raise ValueError("no such animal")
    return before(model, batch)
"""


def test_what_user_code_raises_on_a_member_reaches_the_user(groups: Cluster, job_file: JobFile) -> None:
    path = job_file("sharded.py", RAISES_ON_ONE, SGD.format("train_step=train_step"))
    with pytest.raises(JobFailed) as failed:
        groups.client.submit(path, num_ranks=2, group_size=2).result()
    assert str(failed.value).startswith("ValueError: no such animal (")
    assert "(process 1 of 2) at batch" in str(failed.value)
    assert "no such animal" in failed.value.traceback


# Checkpoints


@pytest.mark.gate
def test_a_checkpoint_goes_on_in_groups_of_another_number_and_size(
    groups: Cluster, job_file: JobFile, tmp_path: Path
) -> None:
    path = job_file("sharded.py", ENDLESS)
    handle = groups.client.submit(
        path,
        num_ranks=2,
        group_size=2,
        checkpoint_every_epochs=1,
        output_dir=tmp_path / "out",
        on_rank_loss="fail",
    )
    eventually(lambda: len(list(tmp_path.glob("out/checkpoints/*/*/manifest.json"))) > 1, "checkpoints are written")
    os.kill(ranks_of(groups, 0, 0), signal.SIGKILL)
    with pytest.raises(JobFailed, match=r"process 0 \(cpu\) of rank 0 on .* was killed by signal 9 .*rank-0.log$"):
        handle.result()
    kept = max(tmp_path.glob("out/checkpoints/*/*/manifest.json"), key=lambda one: one.parent.name).parent
    epoch = load(str(kept)).manifest["training"]["ledger"]["epoch"]
    for number, size, shard in ((1, 3, "no_shard"), (2, 1, None)):
        result = groups.client.submit(
            path,
            num_ranks=number,
            group_size=size,
            shard=shard,
            resume=kept,
            epochs=epoch + 2,
            output_dir=tmp_path / f"{number}x{size}",
            verify_rounds=True,
        ).result()
        assert result.committed_samples == (NUM_SAMPLES,) * (epoch + 2)


@LONG
def test_what_is_resumed_is_what_was_kept(groups: Cluster, job_file: JobFile, tmp_path: Path) -> None:
    """Kept by one process or by a group, gone on with by one or by another group: moments and outer steps are alike.

    All repeat the rounds of one training, whose lengths depend on how fast it was.
    """
    outer = "checkpoint_every_epochs=1, averaging='blocking', outer_optimizer='nesterov'"
    path = job_file("sharded.py", SGD.format(outer))

    def repeated(size: int, out: str, **options: Any) -> dict[str, torch.Tensor]:
        sizes = {"group_size": size, "shard": "full_shard" if size > 1 else None}
        options = {
            "num_ranks": 1,
            "settings": sizes,
            "output_dir": str(tmp_path / out),
            "verify_rounds": True,
            **options,
        }
        result = groups.client.submit_options(path, JobOptions(**options)).result()
        assert result.committed_samples == (NUM_SAMPLES,) * EPOCHS
        return load_file(tmp_path / out / "model.safetensors")

    kept_by_1 = groups.client.submit(path, num_ranks=1, group_size=1, shard=None, output_dir=tmp_path / "kept by 1")
    recording = b"".join(getattr(event, "recorded", b"") for event in kept_by_1.watch())
    reference = load_file(tmp_path / "kept by 1/model.safetensors")
    assert_near(repeated(2, "kept by 2", replay=recording), reference, tolerance=1e-4)
    for kept_by, size in ((1, 3), (2, 3), (2, 1)):
        manifests = sorted((tmp_path / f"kept by {kept_by}").glob("checkpoints/*/*/manifest.json"))
        first = str(min(manifests, key=lambda one: one.parent.name).parent)
        gone_on = repeated(size, f"{kept_by}-{size}", replay=recording, resume=first)
        assert_near(gone_on, reference, tolerance=1e-4)

    piece = next(iter((tmp_path / "kept by 2").glob("checkpoints/*/*/pieces/*-00002-*")))
    piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    with pytest.raises(InvalidJob, match=r"is damaged: pieces/shard-00002-.* is not what was written; use an older"):
        load(str(piece.parent.parent))
    piece.unlink()
    with pytest.raises(InvalidJob, match=r"is not whole: pieces/shard-00002-.* is missing; use an older one"):
        load(str(piece.parent.parent))


# The command line, and what cannot be


def test_a_job_that_is_placed_in_other_groups_than_it_says(groups: Cluster, job_file: JobFile) -> None:
    with pytest.raises(JobFailed) as failed:
        groups.client.submit(job_file("sharded.py"), num_ranks=2).result()
    assert "group_size is 2, and the job was placed in groups of 1: submit it with --group-size 2" in str(failed.value)


def test_submit_says_so_before_it_sends(elche: Callable[..., Command], job_file: JobFile, groups: Cluster) -> None:
    done = elche("submit", str(job_file("sharded.py")), "--coordinator", groups.address)
    assert done.code == 2
    assert "submit it with --group-size 2" in done.err
    assert "Traceback" not in done.err


def test_a_model_that_cannot_be_divided(groups: Cluster, job_file: JobFile) -> None:
    scalar = "Net.__init__ = lambda self, before=Net.__init__: (before(self), self.register_parameter('scale', \
nn.Parameter(torch.ones(()))))[0]"
    with pytest.raises(JobFailed, match=r"the model cannot be sharded: .*parameter 'scale' is a scalar"):
        groups.client.submit(job_file("sharded.py", scalar), num_ranks=1, group_size=2).result()


def test_the_best_model_of_a_group_is_put_together_and_restored(
    groups: Cluster, job_file: JobFile, tmp_path: Path
) -> None:
    """Its checkpoint has it in parts; the best is here the worst, which is that of an early epoch."""
    settings = {"monitor": "mse", "mode": "max", "output_dir": tmp_path / "out"}
    path = job_file("sharded.py")
    result = groups.client.submit(path, num_ranks=1, group_size=2, **settings).result()
    assert (result.best_problem, result.model_is) == ("", f"best of epoch {result.best_epoch}")
    (marked,) = [one for one in result.checkpoints if one.is_best]
    assert (Path(marked.path) / "pieces").is_dir()
    for name, metrics in (("model", result.best_metrics), ("last", result.metrics)):
        job = load_job(path.read_text(), str(path))
        model = job.model().eval()
        model.load_state_dict(load_file(tmp_path / "out" / f"{name}.safetensors"))
        assert job.evaluate(model)["mse"] == pytest.approx(metrics["mse"], rel=1e-5)
