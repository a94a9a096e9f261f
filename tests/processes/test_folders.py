"""A job's folder: uploaded once, over a connection that breaks too, and the working directory of its ranks."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from elche.errors import InvalidJob, JobFailed
from elche.v1 import bundle_pb2, bundle_pb2_grpc, job_pb2, job_pb2_grpc
from elche_client import Client, JobState
from elche_client.transport.bundle import packed
from elche_client.transport.upload import upload
from support.cutter import cutting
from support.real_processes import Cluster, Command, Mark, agent, coordinator

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from models.line import Line
from elche_worker import TrainingJob

POINTS = torch.tensor(json.loads(Path("points.json").read_text()))

def train_step(model, batch):
    assert not os.path.exists("big.bin")
    Path("scratch").write_text("written by a rank")
    return ((model(batch[0]) - batch[0].sum(1, keepdim=True)) ** 2).mean()

job = TrainingJob(
    model=Line,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    dataset=lambda: torch.utils.data.TensorDataset(POINTS),
    train_step=train_step,
    batch_size=4,
    epochs=2,
    num_workers=1,
)
"""
LINE = """
from torch import nn

class Line(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job whose file imports and reads what is beside it."""
    monkeypatch.delenv("ELCHE_FOLDER", raising=False)
    folder = tmp_path / "project"
    (folder / "models").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "models/line.py").write_text(LINE)
    (folder / "points.json").write_text(json.dumps([[x / 40, 1.0] for x in range(40)]))
    (folder / ".elcheignore").write_text("big.bin\n")
    (folder / "big.bin").write_bytes(b"0" * 1000)
    return folder


def bundles(cluster: Cluster, client: Client, folder: Path) -> tuple[int, bool]:
    with packed(folder) as bundle, grpc.insecure_channel(cluster.address) as channel:
        found = bundle_pb2_grpc.BundleServiceStub(channel).FindBundle(bundle_pb2.FindBundleRequest(bundle=bundle.name))
        return found.size_bytes, found.is_complete


def test_ranks_import_and_read_what_is_beside_the_file(
    cluster: Cluster, elche: Callable[..., Command], project: Path
) -> None:
    assert not bundles(cluster, cluster.client, project)[1]
    options = ("--coordinator", cluster.address, "--ranks", "2", "--watch", "--json")
    done = elche("submit", str(project / "train.py"), *options, env={"ELCHE_FOLDER": ""})
    assert done.code == 0, done.err
    assert json.loads(done.out)["committed_samples"] == [40, 40]
    assert bundles(cluster, cluster.client, project)[1]
    assert not (project / "scratch").exists(), "ranks write into a folder of their own"
    again = cluster.client.submit(project / "train.py", num_ranks=1)
    assert again.result().state is JobState.SUCCEEDED


def test_a_file_deep_in_its_folder(cluster: Cluster, project: Path) -> None:
    (project / "jobs").mkdir()
    (project / "train.py").rename(project / "jobs/train.py")
    (project / "jobs/near.py").write_text("")
    (project / "jobs/train.py").write_text("import near\n" + SCRIPT)
    result = cluster.client.submit(project / "jobs/train.py", folder=project, num_ranks=2).result()
    assert result.state is JobState.SUCCEEDED


def test_an_error_in_a_module_beside_the_file_is_shown_with_its_line(cluster: Cluster, project: Path) -> None:
    (project / "models/line.py").write_text(LINE + "\n    def forward(self, x):\n        return self.missing\n")
    with pytest.raises(JobFailed, match="no attribute 'missing'") as raised:
        cluster.client.submit(project / "train.py", num_ranks=1).result()
    assert 'models/line.py", line 9, in forward' in raised.value.traceback
    assert 'File "train.py"' in raised.value.traceback


def test_without_its_folder_it_says_what_is_missing(cluster: Cluster, project: Path) -> None:
    """Alone it runs where the agent runs; its imports are found only by the path that it has on the client."""
    alone = project.parent / "alone.py"
    (project / "train.py").rename(alone)
    with pytest.raises(JobFailed, match="No module named 'models'"):
        cluster.client.submit(alone, folder="none", num_ranks=1).result()


def test_a_bundle_that_the_coordinator_does_not_have_is_refused(cluster: Cluster, project: Path) -> None:
    with pytest.raises(InvalidJob, match="is not in the folder"):
        cluster.client.submit(project / "train.py", folder=project / "models")
    before = len(cluster.client.jobs())
    with grpc.insecure_channel(cluster.address) as channel:
        spec = job_pb2.JobSpec(name="a", source=SCRIPT, file_name="train.py", bundle="0" * 64)
        stub = job_pb2_grpc.JobServiceStub(channel)
        for refused in (spec, job_pb2.JobSpec(name="a", source=SCRIPT, file_name="../a.py", bundle="0" * 64)):
            with pytest.raises(grpc.RpcError) as raised:
                stub.SubmitJob(job_pb2.SubmitJobRequest(spec=refused), timeout=400)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert re.search("submit its file again|not a path within", str(raised.value.details()))
    assert len(cluster.client.jobs()) == before


def test_clients_need_the_token_and_ranks_their_secret(mark: Mark, tmp_path: Path) -> None:
    token = "a-token-of-32-characters-or-more"
    with coordinator(mark, tmp_path, env={"ELCHE_TOKEN": token}) as one, grpc.insecure_channel(one.address) as channel:
        stub = bundle_pb2_grpc.BundleServiceStub(channel)
        calls = (
            lambda: stub.FindBundle(bundle_pb2.FindBundleRequest(bundle="0" * 64), timeout=400),
            lambda: stub.UploadBundle(iter([bundle_pb2.UploadBundleRequest(bundle="0" * 64)]), timeout=400),
            lambda: list(stub.FetchBundle(bundle_pb2.FetchBundleRequest(), timeout=400)),
            lambda: list(
                stub.FetchBundle(
                    bundle_pb2.FetchBundleRequest(), timeout=400, metadata=(("authorization", f"Bearer {token}"),)
                )
            ),
        )
        for call in calls:
            with pytest.raises(grpc.RpcError) as raised:
                call()
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "num_mb", [40, pytest.param(200, marks=pytest.mark.long(reason="40 MB go the same way in less time"))]
)
def test_an_upload_outlasts_a_connection_that_breaks_twice(cluster: Cluster, tmp_path: Path, num_mb: int) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "data.bin").write_bytes(os.urandom(num_mb * 1_000_000))
    with (
        packed(folder) as bundle,
        cutting(cluster.address, num_mb * 500_000, num_mb * 300_000) as cutter,
        grpc.insecure_channel(cutter.address, options=[("grpc.max_reconnect_backoff_ms", 1000)]) as channel,
    ):
        stub = bundle_pb2_grpc.BundleServiceStub(channel)
        sent = upload(stub, bundle, address=cutter.address, metadata=())
        assert cutter.num_cuts == 2
        assert sent == bundle.size_bytes
        assert bundles(cluster, cluster.client, folder) == (bundle.size_bytes, True)
        assert cutter.num_uploaded < 1.6 * bundle.size_bytes, "it goes on where it was; else it would be 1.8 times"
        assert upload(stub, bundle, address=cutter.address, metadata=()) == 0


def test_a_rank_that_is_killed_while_it_unpacks_leaves_no_half_a_folder(
    mark: Mark, tmp_path: Path, project: Path
) -> None:
    """What it had made is made anew by whoever comes next."""
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, devices="cpu") as other,
        Client(one.address, token="") as client,
    ):
        with packed(project) as bundle:
            name = f"code-{bundle.name[:12]}"
        out = tmp_path / "out"
        draft = out / f".{name}.draft"
        (draft / "models").mkdir(parents=True)
        (draft / "models/line.py").write_text("half a fi")
        result = client.submit(project / "train.py", num_ranks=1, output_dir=out).result()
        assert result.state is JobState.SUCCEEDED
        assert (out / name / "models/line.py").read_text() == LINE
        assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == [f".{name}.lock"]
        assert other.process.poll() is None
