"""What a job's file says reaches the coordinator: from `TrainingJob` over the wire into `AgreedSettings`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elche.extent import Extent
from elche.settings import AgreedSettings
from elche.v1 import rank_pb2
from elche_coordinator.codec import rank_event
from elche_coordinator.core.messages.events import RankReady, ResultReceived
from elche_coordinator.core.messages.ids import Incarnation, JobId, Rank
from elche_coordinator.core.messages.spec import first_disagreement
from elche_worker import TrainingJob
from elche_worker.model.layout import Layout
from elche_worker.rank.main import _ready
from elche_worker.session.launch import Launch

LAUNCH = Launch(
    coordinator="", secret="", job_id="job", rank=0, device="cpu", label="cpu", source="", file_name="", output_dir=""
)
ADDRESS: Any = {"job_id": JobId("job"), "rank": Rank(0), "incarnation": Incarnation(1)}
JOB = TrainingJob(
    model=lambda: nn.Linear(3, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    dataset=lambda: [0] * 100,
    train_step=lambda model, batch: model(batch).sum(),
    batch_size=8,
    epochs=2,
    evaluate=lambda model: {"loss": 1.0},
)


def settings_of(job: TrainingJob, merge: str = "mean") -> AgreedSettings:
    """As the coordinator has them."""
    extent = Extent(dataset_size=100, batch_size=8, epochs=job.epochs, drop_last=job.drop_last, max_steps=job.max_steps)
    ready = _ready(job, extent, Layout(job.model()), LAUNCH, merge=merge)
    message = rank_pb2.ConverseRequest.FromString(rank_pb2.ConverseRequest(ready=ready).SerializeToString())
    event = rank_event(ADDRESS, message)
    assert isinstance(event, RankReady)
    return event.settings


@pytest.mark.parametrize(
    ("said", "reaches"),
    [
        ({"epochs": 7}, {"epochs": 7}),
        ({"policy": "async"}, {"policy": "async"}),
        ({"averaging": "blocking"}, {"averaging": "blocking"}),
        ({"averaging": "overlapped"}, {"averaging": "overlapped"}),
        ({"averaging": "auto"}, {"averaging": "overlapped"}),
        ({"policy": "sync"}, {"policy": "sync", "averaging": "blocking"}),
        ({"backend": "cpu"}, {"backend": "cpu"}),
        ({"nonfinite": "skip"}, {"nonfinite": "skip"}),
        ({"seed": 9}, {"seed": 9}),
        ({"drop_last": True}, {"drop_last": True}),
        ({"anchor": 3}, {"anchor": 3}),
        ({"max_anchor": 30}, {"max_anchor": 30}),
        ({"overhead_target": 0.25}, {"overhead_target": 0.25}),
        ({"divergence_threshold": 0.125}, {"divergence_threshold": 0.125}),
        ({"divergence_threshold": 0}, {"divergence_threshold": 0.0}),
        ({"speed_hint": (1, 2.5)}, {"speed_hint": (1, 2.5)}),
        ({"speed_hint": None}, {"speed_hint": None}),
        ({"max_batch_diff": 4}, {"max_batch_diff": 4}),
        ({"max_steps": 11}, {"max_steps": 11}),
        ({"checkpoint_every_epochs": 2}, {"checkpoint_every_epochs": 2}),
        ({"checkpoint_every_minutes": 1.5}, {"checkpoint_every_s": 90.0}),
        ({"checkpoint_every_minutes": None}, {"checkpoint_every_s": None}),
        ({"keep_checkpoints": 5}, {"keep_checkpoints": 5}),
        ({"monitor": "loss", "mode": "max", "patience": 3}, {"monitor": "loss", "more_is_better": True, "patience": 3}),
        ({"monitor": "loss"}, {"monitor": "loss", "more_is_better": False, "patience": None}),
        ({"evaluate": None}, {"has_evaluation": False}),
        ({"metrics_fn": print}, {"wants_metrics": True}),
        ({"state": dict}, {"keeps_state": True}),
        ({}, {"keeps_state": False}),
    ],
    ids=str,
)
def test_what_the_file_says_is_what_the_coordinator_does(said: dict[str, Any], reaches: dict[str, Any]) -> None:
    settings = settings_of(replace(JOB, **said))
    assert {name: getattr(settings, name) for name in reaches} == reaches


def test_what_the_file_leaves_out_is_what_the_job_has() -> None:
    settings = settings_of(JOB)
    for name in ("max_anchor", "overhead_target", "divergence_threshold", "keep_checkpoints", "policy"):
        assert getattr(settings, name) == getattr(JOB, name), name
    assert (settings.dataset_size, settings.batch_size, settings.epochs) == (100, 8, 2)


def test_ranks_must_come_to_the_same_merge() -> None:
    """One that finds another number of optimizers would make other rounds."""
    one, other = settings_of(JOB, merge="mean"), settings_of(JOB, merge="adascale")
    difference = first_disagreement({Rank(0): one, Rank(1): other})
    assert difference is not None
    assert "averaging_options" in difference


def test_the_anchor_is_short_where_averaging_overlaps() -> None:
    anchors = {one: settings_of(replace(JOB, averaging=one)).anchor for one in ("auto", "overlapped", "blocking")}
    assert anchors == {"auto": 1, "overlapped": 1, "blocking": 10}
    assert settings_of(replace(JOB, anchor=7)).anchor == 7


@pytest.mark.parametrize("divergence", [None, 0.0, 0.25])
def test_a_divergence_that_was_not_measured_is_none_and_not_zero(divergence: float | None) -> None:
    ack = rank_pb2.SyncAck(round=1, generation=1, divergence=divergence)
    event = rank_event(ADDRESS, rank_pb2.ConverseRequest(sync_ack=ack))
    assert isinstance(event, ResultReceived)
    assert event.divergence == divergence
