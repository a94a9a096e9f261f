"""A message that is too large is refused where it is sent, with the name of what is too large."""

import queue
import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elche.errors import ElcheError, InvalidJob, Misuse
from elche.network import MAX_MESSAGE_BYTES
from elche.ready import MAX_TENSORS
from elche.v1 import rank_pb2
from elche_worker.model.layout import Layout
from elche_worker.model.step import _loss_of
from elche_worker.rank.main import _described
from elche_worker.session.session import Session
from elche_worker.trainer.attached import checked_metrics
from elche_worker.user.scalars import number_of, record_scalar


@pytest.fixture
def session() -> Session:
    """One that nobody reads from."""
    session = object.__new__(Session)
    session._outgoing = queue.SimpleQueue()
    return session


def test_a_model_that_is_too_large_to_describe_is_not_blamed_on_scalars(session: Session) -> None:
    ready = rank_pb2.Ready(tensors=["layer.weight float32 [1] parameter" * 30] * (MAX_MESSAGE_BYTES // 1000))
    with pytest.raises(ElcheError, match=r"\(ready\) has \d+ bytes.*it contains the names of the model"):
        session.send(rank_pb2.ConverseRequest(ready=ready))


@pytest.mark.parametrize("tensors", [["w float32"] * (MAX_TENSORS + 1), ["w" * 1025] * 1024])
def test_a_model_that_the_coordinator_would_refuse_is_not_described(tensors: list[str]) -> None:
    assert _described(cast(Layout, SimpleNamespace(entries=tensors))) == []
    assert _described(cast(Layout, SimpleNamespace(entries=tensors[:1000]))) == tensors[:1000]


def test_scalars_that_are_too_large_are_named(session: Session) -> None:
    work = rank_pb2.EpochWork(scalars={"s" * 100 + str(i): rank_pb2.ScalarSum(sum=1.0) for i in range(50_000)})
    with pytest.raises(ElcheError, match="record fewer scalars"):
        session.send(rank_pb2.ConverseRequest(sync_ack=rank_pb2.SyncAck(work=[work])))


def test_metrics_of_a_loop_are_bounded() -> None:
    assert checked_metrics({"accuracy": 0.5}) == {"accuracy": 0.5}
    with pytest.raises(Misuse, match="1001 metrics; at most 1000"):
        checked_metrics({str(i): 0.0 for i in range(1001)})
    with pytest.raises(Misuse, match="201 characters; at most 200"):
        checked_metrics({"m" * 201: 0.0})
    with pytest.raises(Misuse, match="'n' is too large for a float"):
        checked_metrics({"n": 10**400})


@pytest.mark.parametrize(
    ("value", "what"), [("warm", "str"), (None, "NoneType"), (10**400, "one too large for a float")]
)
def test_a_scalar_that_is_no_number_is_named(value: Any, what: str) -> None:
    """It was said that 'float' and 'str' cannot be added."""
    with pytest.raises(ValueError, match=rf"record_scalar\('phase'\): the value must be a number, not {what}"):
        record_scalar("phase", value)


def returned_by_train_step(values: dict[Any, Any]) -> dict[str, Any]:
    loss = torch.ones((), requires_grad=True)
    return _loss_of({"loss": loss, **values}, "train.py")[1]


def test_what_a_train_step_returns_is_bounded() -> None:
    """A long name was taken for an invalid message of the rank, at the end of the first epoch."""
    assert returned_by_train_step({"norm": 2, 5: 0.5}) == {"norm": (2.0, 1), "5": (0.5, 1)}
    with pytest.raises(
        InvalidJob, match=r"train_step\(\) returned a metric whose name has 201 characters; at most 200"
    ):
        returned_by_train_step({"m" * 201: 0.0})
    with pytest.raises(InvalidJob, match=r"train_step\(\) returned 1001 metrics; at most 1000"):
        returned_by_train_step({str(i): 0.0 for i in range(1000)})
    with pytest.raises(InvalidJob, match=r"returned 'n', which must be a number, not one too large for a float"):
        returned_by_train_step({"n": 10**400})


def test_a_loss_with_a_graph_becomes_a_number_without_a_warning() -> None:
    """A line of elche's own code was shown on each rank."""
    loss = torch.ones((), requires_grad=True)
    torch.set_warn_always(True)  # by default torch warns once in a process
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checked_metrics({"loss": loss})["loss"] == number_of(loss) == 1.0
    torch.set_warn_always(False)
