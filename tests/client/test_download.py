"""A download that breaks off goes on where it was, against a real gRPC server."""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from elche.errors import ElcheError, HostAway, InvalidJob, Unreachable
from elche.status import CODES
from elche.v1 import job_pb2 as pb
from elche_client import Client, client
from elche_client.transport.draft import Draft
from support.scripted import VIEW, ScriptedJobs, connected

FIRST, SECOND = os.urandom(10_000), os.urandom(12_000)
CHUNK_BYTES = 1000


@dataclass
class Models(ScriptedJobs):
    """Sends the model, as far as it is let."""

    model: bytes = FIRST
    breaks_after: list[int] = field(default_factory=list)
    """For each call, after how many bytes the stream breaks; later ones do not."""
    breaks_with: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    is_old: bool = False
    """It knows no offset and no checksum."""
    requests: list[pb.FetchModelRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(VIEW)

    def FetchModel(self, request, context):  # noqa: N802
        self._enter(context, request.job_id)
        self.requests.append(request)
        sha256 = "" if self.is_old else hashlib.sha256(self.model).hexdigest()
        offset = request.offset if sha256 and request.sha256 == sha256 else 0
        end = offset + (self.breaks_after.pop(0) if self.breaks_after else len(self.model))
        while offset < min(end, len(self.model)):
            data = self.model[offset : min(end, offset + CHUNK_BYTES)]
            yield pb.FetchModelResponse(data=data, offset=0 if self.is_old else offset, sha256=sha256)
            offset += len(data)
        if offset < len(self.model):
            context.abort(self.breaks_with, "the cable is pulled")
        if not self.is_old:
            yield pb.FetchModelResponse(offset=offset, sha256=sha256)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RECONNECT_EVERY_S", 0.01)


@pytest.mark.parametrize("error", [Unreachable, HostAway])
def test_a_download_goes_on_where_the_stream_broke(tmp_path: Path, error: type[ElcheError]) -> None:
    """Where a worker died while it sent the model, the download failed, also if the worker was started again."""
    models = Models(breaks_after=[9000, 500, 0], breaks_with=CODES[error])
    with connected(models) as one:
        found = one.download("j-1", tmp_path / "model.safetensors")
    assert found.read_bytes() == FIRST
    assert [request.offset for request in models.requests] == [0, 9000, 9500, 9500]
    assert list(tmp_path.iterdir()) == [found]


def test_a_download_that_breaks_before_its_first_part_is_tried_again(tmp_path: Path) -> None:
    """It failed at once; that its host is not there from the beginning still ends it, and that nobody answers."""
    models = Models(breaks_after=[0, 0])
    with connected(models) as one:
        found = one.download("j-1", tmp_path / "model.safetensors")
        assert found.read_bytes() == FIRST
        assert len(models.requests) == 3
        models.breaks_after, models.breaks_with = [0], CODES[HostAway]
        with pytest.raises(HostAway):
            one.download("j-1", tmp_path / "model.safetensors")
        models.refusal = (grpc.StatusCode.UNAVAILABLE, "nobody is there")
        with pytest.raises(Unreachable):
            one.download("j-1", tmp_path / "model.safetensors")
    assert len(models.requests) == 4


def broken_off(models: Models, one: Client, folder: Path) -> Path:
    """The part that stays when nothing comes any more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "RECONNECT_S", -1.0)
        with pytest.raises(Unreachable):
            one.download("j-1", folder / "model.safetensors")
    (part,) = folder.iterdir()
    return part


def test_the_part_of_an_ended_process_is_gone_on_with(tmp_path: Path) -> None:
    models = Models(breaks_after=[9000])
    with connected(models) as one:
        part = broken_off(models, one, tmp_path)
        assert part.name == f"model.safetensors.j-1.{hashlib.sha256(FIRST).hexdigest()}.part"
        found = one.download("j-1", tmp_path / "model.safetensors")
    assert models.requests[-1].offset == 9000
    assert found.read_bytes() == FIRST
    assert list(tmp_path.iterdir()) == [found]


def test_a_model_that_had_come_whole_gets_its_name(tmp_path: Path) -> None:
    models = Models()
    (tmp_path / f"model.safetensors.j-1.{hashlib.sha256(FIRST).hexdigest()}.part").write_bytes(FIRST)
    with connected(models) as one:
        assert one.download("j-1", tmp_path / "model.safetensors").read_bytes() == FIRST
    assert models.requests[0].offset == len(FIRST)


def test_parts_of_two_models_are_not_mixed(tmp_path: Path) -> None:
    models = Models(breaks_after=[9000])
    with connected(models) as one:
        broken_off(models, one, tmp_path)
        models.model = SECOND
        found = one.download("j-1", tmp_path / "model.safetensors")
    assert found.read_bytes() == SECOND
    assert list(tmp_path.iterdir()) == [found]


def test_a_damaged_part_is_noticed_and_removed(tmp_path: Path) -> None:
    models = Models(breaks_after=[9000])
    with connected(models) as one:
        part = broken_off(models, one, tmp_path)
        part.write_bytes(bytes(9000))
        with pytest.raises(InvalidJob, match="is not what was sent, and is removed"):
            one.download("j-1", tmp_path / "model.safetensors")
        assert not list(tmp_path.iterdir())
        assert one.download("j-1", tmp_path / "model.safetensors").read_bytes() == FIRST


def test_an_older_coordinator_sends_all_of_it_again(tmp_path: Path) -> None:
    models = Models(breaks_after=[9000])
    with connected(models) as one:
        broken_off(models, one, tmp_path)
        models.is_old = True
        found = one.download("j-1", tmp_path / "model.safetensors")
        assert found.read_bytes() == FIRST
        models.breaks_after = [9000]
        again = one.download("j-1", tmp_path / "another")
    assert again.read_bytes() == FIRST
    assert set(tmp_path.iterdir()) == {found, again}


def test_two_downloads_to_one_file_do_not_write_into_each_others_parts(tmp_path: Path) -> None:
    sha256 = hashlib.sha256(FIRST).hexdigest()
    with Draft(tmp_path / "model", "j-1") as one, Draft(tmp_path / "model", "j-1") as other:
        for draft, data in ((one, FIRST[:5000]), (other, FIRST[:7000])):
            draft.add(data, 0, sha256)
        with Draft(tmp_path / "model", "j-1") as third:
            assert third.size_bytes == 0
        one.add(FIRST[5000:], 5000, sha256)
        assert one.finish().read_bytes() == FIRST
        other.add(FIRST[7000:], 7000, sha256)
        assert other.finish().read_bytes() == FIRST
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_checksum_that_is_none_names_no_file(tmp_path: Path) -> None:
    with Draft(tmp_path / "model", "../j-1") as draft:
        draft.add(FIRST, 0, "../../" + "a" * 58)
        assert [path.name for path in tmp_path.iterdir()] == [f".model.{os.getpid()}"]
        with pytest.raises(InvalidJob):
            draft.finish()
    assert not list(tmp_path.iterdir())
