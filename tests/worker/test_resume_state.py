"""What a rank that goes on from a checkpoint has of it, beside the model and the moments."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from elche_worker.device.rng import capture_rng_state
from elche_worker.model.step import Built
from elche_worker.rank.checkpoint_capture import CheckpointCapture
from elche_worker.user.schedule import LearningRates


def resumed(rank: int, *, written_by: int = 0, lr: float = 0.5) -> tuple[torch.optim.SGD, dict[str, Any], list[float]]:
    """The optimizer, the scaler's state and the next random numbers of a rank that has restored a checkpoint, which was
    written when the rate was 0.1.
    """
    model = nn.Linear(2, 1)
    then, now = (torch.optim.SGD(model.parameters(), lr=one) for one in (0.1, lr))
    scaler: dict[str, Any] = {}
    capture = CheckpointCapture(
        rank,
        Built(model, now),
        cast(Any, None),
        cast(Any, SimpleNamespace(scaler=SimpleNamespace(load_state_dict=scaler.update))),
        cast(Any, SimpleNamespace(restore=lambda state, mean: None)),
        LearningRates([now]),
        7,
        cast(Any, None),
        cast(Any, SimpleNamespace(names=frozenset())),
    )
    torch.manual_seed(11)
    state = {"optimizers": [then.state_dict()], "scaler": {"scale": 4.0}, "outer": None, "rank": written_by}
    loaded = SimpleNamespace(
        path="", restore_model=lambda model: None, mean={}, state={**state, "random": capture_rng_state()}
    )
    torch.manual_seed(0)
    capture.restore(cast(Any, loaded), version=3)
    return now, scaler, torch.rand(4).tolist()


def test_a_resume_with_another_rate_trains_at_that() -> None:
    optimizer, _, _ = resumed(0)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_scale_of_fp16_goes_on_where_it_was() -> None:
    assert resumed(0)[1] == {"scale": 4.0}


def test_only_the_rank_that_wrote_the_checkpoint_has_its_random_numbers_and_no_two_have_the_same() -> None:
    drawn = [tuple(resumed(rank)[2]) for rank in range(3)]
    torch.manual_seed(11)
    assert drawn[0] == tuple(torch.rand(4).tolist())
    assert len(set(drawn)) == 3
