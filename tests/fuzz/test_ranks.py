"""What ranks and agents read: checkpoints, what stopped ranks left, and what a coordinator and other ranks send."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from elche import manifest
from elche.errors import ElcheError, InvalidJob
from elche.v1 import averaging_pb2, rank_pb2
from elche_worker.collectives.codecs import BLOCK, CODECS, Encoded
from elche_worker.collectives.header import Row, check_together
from elche_worker.collectives.operations import RanksDiffer, RoundAborted
from elche_worker.collectives.relay import Relay
from elche_worker.model.checkpoint import load
from elche_worker.rank.evaluation_messages import tensors_of
from elche_worker.session.control import Control, Rounds
from elche_worker.session.stopped import FOLDER, stopped_ranks
from support.corpus import CHECKPOINT, LEFT, MANIFEST, messages
from support.fuzzing import (
    as_text,
    changed_bytes,
    changed_json,
    changed_message,
    changed_value,
    fuzzed,
    tried,
)

pytestmark = pytest.mark.usefixtures("bounded")

STATE = json.loads((CHECKPOINT / "state.json").read_text())
TENSORS = [(CHECKPOINT / name).read_bytes() for name in ("model.safetensors", "state.safetensors")]


def sealed(folder: Path, name: str, data: bytes, **changed: Any) -> None:
    """Writes a file of a checkpoint, and the manifest with its right size and checksums."""
    (folder / name).write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    value = {**MANIFEST, "files": {**MANIFEST["files"], name: entry}, **changed}
    (folder / manifest.MANIFEST).write_text(json.dumps({**value, "checksum": manifest.checksum(value)}))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(CHECKPOINT, tmp_path / CHECKPOINT.name)


@fuzzed(40)
@given(name=st.sampled_from(["model.safetensors", "state.safetensors"]), data=changed_bytes(TENSORS))
def test_a_checkpoint_with_any_tensors_is_loaded_or_refused(checkpoint: Path, name: str, data: bytes) -> None:
    shutil.copytree(CHECKPOINT, checkpoint, dirs_exist_ok=True)
    sealed(checkpoint, name, data)
    tried(lambda: load(str(checkpoint)), InvalidJob)


@fuzzed(50)
@given(text=changed_json(STATE).map(as_text))
def test_a_checkpoint_with_any_state_is_loaded_or_refused(checkpoint: Path, text: str) -> None:
    sealed(checkpoint, "state.json", text.encode())
    tried(lambda: load(str(checkpoint)), InvalidJob)


@fuzzed(40)
@given(changed=changed_value(MANIFEST))
def test_a_checkpoint_with_any_manifest_is_loaded_or_refused(checkpoint: Path, changed: Any) -> None:
    text = json.dumps(changed)
    if isinstance(changed, dict):
        text = json.dumps({**changed, "checksum": manifest.checksum(changed)})
    (checkpoint / manifest.MANIFEST).write_text(text)

    def read() -> None:
        loaded = load(str(checkpoint))
        assert json.loads(loaded.training) is not None
        loaded.check_model(["weight float32 [1, 8] parameter"])

    tried(read, InvalidJob)


@fuzzed(50)
@given(text=changed_json(LEFT).map(as_text))
def test_what_a_stopped_rank_has_left_is_read_or_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FOLDER).mkdir(exist_ok=True)
    (tmp_path / FOLDER / "rank-0.1.json").write_text(text)
    tried(lambda: [one.pending for one in stopped_ranks(tmp_path, LEFT["job_id"])], OSError, ValueError)


@fuzzed(50)
@given(told=st.lists(changed_message(messages("RankService/Converse", "response")), min_size=1, max_size=4))
def test_a_rank_takes_or_refuses_whatever_a_coordinator_orders(told: Sequence[Any]) -> None:
    control, rounds = Control(), Rounds()

    def take() -> None:
        for command in told:
            control.put(command)
        for command in control.take():
            if command.HasField("sync_now"):
                rounds.learn(command.sync_now)
            rounds.go_on_alone()
            if (due := rounds.due(2**62, is_out_of_work=False)) is not None:
                rounds.enter(due, 1)

    tried(take, ElcheError)


ROWS = [
    Row(
        attempt=1,
        generation=1,
        round=2,
        layout_hash=3,
        weight=4,
        finite=1,
        cut=4,
        local_step=1,
        compute_us=5,
        version=0,
    )
]


@fuzzed(50)
@given(numbers=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=14, max_size=14), min_size=1, max_size=3))
def test_headers_of_other_ranks_agree_or_are_refused(numbers: list[list[int]]) -> None:
    tried(lambda: check_together([*ROWS, *(Row(*row) for row in numbers)]), RanksDiffer)


@fuzzed(30)
@given(seed=st.integers(0, 2**32), fill=st.sampled_from([None, 0, 127, 128, 255]))
def test_compressed_values_of_other_ranks_are_numbers_whatever_their_bytes(seed: int, fill: int | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for codec in (kind() for kind in CODECS.values()):
        raw = torch.randint(0, 256, (2, 3 * sum(codec.sizes)), dtype=torch.uint8, generator=generator)
        received = Encoded(codec, raw if fill is None else raw.fill_(fill))
        decoded: Any = tried(lambda received=received: received.read(slice(0, 3 * BLOCK)))  # type: ignore[misc]
        assert decoded.shape == (2, 3 * BLOCK)
        assert decoded.dtype == torch.float32


@fuzzed(40)
@given(
    answers=st.lists(changed_message([averaging_pb2.AverageResponse(data=bytes(8))]), max_size=3),
    kind=st.integers(0, 3),
)
def test_a_relayed_average_is_made_or_given_up(answers: list[Message], kind: int) -> None:
    """An answer of another length was an error of torch, which failed the job."""
    relay = Relay.__new__(Relay)
    relay.position, relay.size, relay.sent_bytes, relay._outgoing = 0, 2, 0, SimpleQueue()
    relay._answers = chain(answers, repeat(averaging_pb2.AverageResponse(), 50))
    values = torch.zeros(2, 2)
    runs = [
        lambda: relay.all_gather(values), lambda: relay.all_reduce(values),
        lambda: relay.all_to_all(values), lambda: relay.broadcast(values, 1),
    ]  # fmt: skip
    tried(runs[kind], RoundAborted)


SUMS = [rank_pb2.MakeMetrics(tensors={"hits": rank_pb2.TensorSum(shape=[2], data=bytes(16))}, names=["hits"])]


@fuzzed(50)
@given(order=changed_message(SUMS), one=changed_message([SUMS[0].tensors["hits"]]))
def test_sums_of_an_evaluation_are_tensors_or_refused(order: Any, one: Any) -> None:
    order.tensors["hits"].CopyFrom(one)
    tried(lambda: tensors_of(order.tensors), ElcheError)
