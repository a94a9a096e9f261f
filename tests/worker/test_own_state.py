"""What is the user's own in a job (`state`): in checkpoints, handed to ranks that join, refused where it cannot be."""

import json
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elche.errors import InvalidJob
from elche_worker import this_rank
from elche_worker.model.own_state import OwnState, build_own_state, packed, unpacked
from elche_worker.rank.replica import Replica
from elche_worker.run.alone import train_alone
from elche_worker.user.kept import kept_aside_notice, other_optimizers_notice
from elche_worker.user.loading import UserCodeRaised
from support.replicas import Make, Rank, written
from support.solo import JOB

TRAINING = '{"version": 2, "samples": 8}'


def own(model: nn.Module) -> dict[str, Any]:
    return {"ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)), "seen": {"rounds": 0, "versions": ()}}


def after_round(model: nn.Module, version: int) -> None:
    state = this_rank().state
    state["ema"].update_parameters(model)
    state["seen"].update(rounds=state["seen"]["rounds"] + 1, versions=(*state["seen"]["versions"], version))


def values(rank: Rank) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    objects = rank.replica.own_state.objects
    return {name: one.clone() for name, one in objects["ema"].state_dict().items()}, dict(objects["seen"])


def test_a_checkpoint_has_it_as_it_is_after_the_round_and_a_resume_goes_on_with_it(world: Make) -> None:
    first = world(1, averaging="blocking", state=own, after_round=after_round)
    first.round(1)
    first.ranks[0].train(2)
    first.ranks[0].enter(2, may_be_checkpoint=True)
    first.ranks[0].replica.apply_result()
    ema, seen = values(first.ranks[0])
    assert seen == {"rounds": 1, "versions": (2,)}, "nothing is trained in the first"
    loaded = written(first.ranks[0].replica, 2, TRAINING)
    again = world(1, averaging="blocking", state=own, after_round=after_round, loaded=loaded)
    found, found_seen = values(again.ranks[0])
    assert found_seen == seen
    assert found.keys() == ema.keys()
    assert all(torch.equal(found[name], ema[name]) for name in ema)
    again.round(3)
    assert values(again.ranks[0])[1] == seen, "nothing is trained in the first"
    again.ranks[0].train(1)
    again.round(4)
    assert values(again.ranks[0])[1] == {"rounds": 2, "versions": (2, 4)}


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_a_rank_that_joins_gets_that_of_the_others_and_then_sees_the_same_rounds(world: Make, averaging: str) -> None:
    ranks = world(3, averaging=averaging, state=own)
    old, newcomer = ranks.ranks[:2], ranks.ranks[2]
    ranks.ranks = old
    ranks.all(lambda at, rank: rank.join(2, at, 2))
    ranks.round(1)
    for rank in old:
        rank.replica.own_state.objects["seen"]["rounds"] = 17
        rank.replica.own_state.objects["ema"].n_averaged.fill_(17)
    ranks.ranks = [*old, newcomer]
    ranks.all(lambda at, rank: rank.join(3, at, 3))
    ranks.round(2)
    ema, seen = values(newcomer)
    assert seen["rounds"] == 17
    assert int(ema["n_averaged"]) == 17


def test_it_is_looked_at_for_others_only_in_rounds_in_which_some_may_join(
    world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[OwnState] = []
    ask = OwnState.storable
    monkeypatch.setattr(OwnState, "storable", lambda self: asked.append(self) or ask(self))
    ranks = world(2, averaging="blocking", state=own)
    ranks.round(1)
    assert len(asked) == 2
    for round_id in (2, 3):
        for rank in ranks.ranks:
            rank.train(1)
        ranks.round(round_id)
    assert len(asked) == 2
    ranks.all(lambda at, rank: rank.join(2, at, 2))
    ranks.round(4)
    assert len(asked) == 4


def test_what_is_tried_before_training_leaves_it_as_it_was(world: Make) -> None:
    def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
        this_rank().state["seen"]["rounds"] += 1
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    rank = world(1, state=own, train_step=train_step).ranks[0]
    rank.replica.rehearse(warms_up=True)
    assert values(rank)[1]["rounds"] == 0


def test_a_job_without_a_coordinator_has_it_too() -> None:
    seen = []
    job = replace(
        JOB, epochs=2, state=lambda model: {"epochs": {"begun": 0}},
        epoch_fn=lambda rank, epoch: this_rank().state["epochs"].update(begun=epoch + 1),
        metrics_fn=lambda metrics: seen.append(dict(this_rank().state["epochs"])),
    )  # fmt: skip
    train_alone(job, device="cpu")
    assert seen == [{"begun": 1}, {"begun": 2}]


def test_a_job_without_a_coordinator_knows_its_progress() -> None:
    seen = []
    job = replace(
        JOB, epochs=2,
        epoch_fn=lambda rank, epoch: seen.append(rank.progress.fraction),
        metrics_fn=lambda metrics: seen.append(this_rank().progress.fraction),
    )  # fmt: skip
    train_alone(job, device="cpu")
    assert seen == [0.0, 0.5, 0.5, 1.0]


# Refused, before training


class Foreign:
    def __init__(self) -> None:
        self.thing = object()

    def state_dict(self) -> dict[str, Any]:
        return {"thing": self.thing}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Stubborn:
    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("b")


class Broken(Stubborn):
    def state_dict(self) -> dict[str, Any]:
        raise AttributeError("no such thing")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (lambda model: [1], "train.py: state() must return a dict of objects by name, not list"),
        (lambda model: {1: {}}, "train.py: state() must give names that are strings, not 1"),
        (
            lambda model: {"memory": deque()},
            "train.py: state() gives 'memory', a deque without state_dict() and load_state_dict(): give it these "
            "methods, or keep it in a dict",
        ),
        (
            lambda model: {"mine": Foreign()},
            "train.py: state() gives 'mine': mine['thing'] is of type object, which a checkpoint cannot hold: keep "
            "numbers, strings and tensors in it",
        ),
        (
            lambda model: {"mine": Stubborn()},
            "train.py: 'mine' of state() does not take the state that a checkpoint has of it: KeyError: 'b'",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(state: Any, said: str) -> None:
    with (
        pytest.raises(InvalidJob) as error,
        build_own_state(replace(JOB, state=state), nn.Linear(1, 1), "train.py").on_trial(),
    ):
        pass
    assert str(error.value) == said


def test_a_mistake_in_it_is_shown_where_it_is() -> None:
    for state in (lambda model: {"a": model.nothing}, lambda model: {"a": Broken()}):
        with pytest.raises(UserCodeRaised, match=r"no such thing|nothing"):
            build_own_state(replace(JOB, state=state), nn.Linear(1, 1), __file__).storable()


def test_a_rank_refuses_it_before_it_is_ready(world: Make) -> None:
    replica: Replica = world(1, state=lambda model: {"mine": Foreign()}).ranks[0].replica
    with pytest.raises(InvalidJob, match=r"mine\['thing'\] is of type object"):
        replica.rehearse(warms_up=False)


def test_a_state_that_nobody_asks_for_or_that_does_not_fit_is_refused_and_a_new_one_begins_anew(
    world: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    first = world(1, averaging="blocking", state=own)
    first.ranks[0].enter(1, may_be_checkpoint=True)
    first.ranks[0].replica.apply_result()
    loaded = written(first.ranks[0].replica, 1, TRAINING)
    with pytest.raises(InvalidJob) as error:
        world(1, loaded=loaded)
    assert str(error.value) == (
        f"the checkpoint {loaded.path} has the state of 'ema', and state() in the job gives nothing of that name: "
        "return it there, or an empty dict, 'ema': {}, if it is not used any more"
    )
    with pytest.raises(
        InvalidJob, match=r"'ema' of state\(\) does not take the state that the checkpoint .* has of it"
    ):
        world(1, loaded=loaded, state=lambda model: {"ema": AveragedModel(nn.Linear(7, 7)), "seen": {}})
    dropped = world(1, loaded=loaded, state=lambda model: {"ema": {}, "seen": {}, "more": {"a": 1}})
    assert dropped.ranks[0].replica.own_state.objects["more"] == {"a": 1}
    assert "elche: the checkpoint has no state of 'more', which starts fresh" in capsys.readouterr().out


# On the way


def test_what_is_handed_over_is_what_comes() -> None:
    value = {
        "rates": {"factor": 0.5},
        "own": {"x": (1, torch.arange(3), [None, True, "é", float("inf")]), 3: torch.ones(())},
    }
    found = unpacked(packed(value))
    assert json.dumps(found["rates"]) == json.dumps(value["rates"])
    assert torch.equal(found["own"]["x"][1], torch.arange(3))
    assert found["own"]["x"][2] == [None, True, "é", float("inf")]
    assert torch.equal(found["own"][3], torch.ones(()))
    assert unpacked(packed({})) == {}


# Said, where it is kept aside

counted = 0


def counts(model: nn.Module, version: int) -> None:
    global counted
    counted += 1


def test_functions_that_set_variables_outside_of_them_are_named() -> None:
    best, epochs = 1.0, 0

    def metrics_fn(metrics: Any) -> None:
        nonlocal best
        best = min(best, metrics.loss)

    def epoch_fn(rank: Any, epoch: int) -> None:
        own = epochs
        (lambda: own)()

    job = replace(JOB, metrics_fn=metrics_fn, epoch_fn=epoch_fn, after_round=counts, checkpoint_fn=print)
    assert kept_aside_notice(job) == (
        "metrics_fn changes best and after_round changes counted: no checkpoint has that, and it starts fresh when "
        "training is resumed or a rank is started again. What is to go on belongs to state=lambda model: {...}, and is "
        "found in this_rank().state"
    )
    assert kept_aside_notice(JOB) == ""
    assert best == 1.0


def test_an_optimizer_beside_the_jobs_is_named() -> None:
    """A critic that train_step trains itself became another one on each rank, in silence."""
    critic, own = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))

    def train_critic() -> None:
        critic.step()

    def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
        train_critic()
        return torch.tensor(own.param_groups[0]["lr"])

    job = replace(JOB, train_step=train_step)
    assert other_optimizers_notice(job, [own]).startswith("train_step uses critic, which optimizer() does not return:")
    assert other_optimizers_notice(job, [own, critic]) == ""
    assert other_optimizers_notice(replace(JOB, train_step=len), [own]) == ""
