"""What a rank that goes on from a checkpoint has of it, beside the model and the moments."""

import copy
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from elche.errors import InvalidJob
from elche_worker.device.rng import capture_rng_state
from elche_worker.model.optimizer_state import check_is_alike, in_order_of, names_of, other_options
from elche_worker.model.savable import check_state
from elche_worker.model.step import Built
from elche_worker.rank.checkpoint_capture import CheckpointCapture
from elche_worker.user.schedule import LearningRates
from support.replicas import Make, written


def resumed(
    rank: int, *, written_by: int = 0, lr: float = 0.5, kind: Any = torch.optim.SGD
) -> tuple[torch.optim.SGD, dict[str, Any], list[float]]:
    """The optimizer, the scaler's state and the next random numbers of a rank that has restored a checkpoint, which was
    written when the rate was 0.1.
    """
    model = nn.Linear(2, 1)
    then, now = (kind(model.parameters(), lr=one) for one in (0.1, lr))
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


class Around(torch.optim.Optimizer):
    """Holds another optimizer, as Lookahead does, and saves it in a form of its own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.inner = torch.optim.SGD(parameters, lr=lr)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, {}
        self.num_steps = int(lr * 10)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


def test_a_state_of_an_optimizers_own_form_is_restored() -> None:
    """KeyError: 'param_groups': no checkpoint of it could be resumed."""
    optimizer: Any = resumed(0, kind=Around)[0]
    assert optimizer.num_steps == 1


class Lookahead(torch.optim.Optimizer):
    """As in public scripts: it does not call torch's `__init__`, and has groups and state of the optimizer in it."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state = base, base.param_groups, base.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class Slow(Lookahead):
    """Keeps a state of its own, and loads both, after which the groups are its own."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base)
        self.state, self.fast_state = defaultdict(dict), base.state

    def state_dict(self) -> dict[str, Any]:
        return {**self.base.state_dict(), "slow": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"state": state["slow"], "param_groups": state["param_groups"]})
        self.base.load_state_dict({"state": state["state"], "param_groups": state["param_groups"]})
        self.fast_state = self.base.state


class Apart(Lookahead):
    """Has a state of its own, which is all that torch's `state_dict` saves."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base)
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> Any:
        for parameter in (one for group in self.param_groups for one in group["params"]):
            self.state[parameter]["slow"] = parameter.detach().clone()
        return super().step(closure)


class Copied(Slow):
    """Saves copies."""

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(super().state_dict())


@pytest.mark.parametrize(("kind", "num_told"), [(Lookahead, 0), (Slow, 0), (Copied, 0), (Apart, 1)])
def test_an_optimizer_of_which_the_one_that_wraps_it_saves_nothing_is_told_once(
    world: Make, kind: Any, num_told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its moments were gone after a resume, in silence."""
    made = world(1, optimizer=lambda model: kind(torch.optim.Adam(model.parameters(), lr=0.1)))
    made.ranks[0].train(2)
    check_state(made.ranks[0].replica.optimizers)
    told = capsys.readouterr().err
    assert told.count(f"{kind.__name__}.state_dict() has nothing of the Adam within it") == num_told


@pytest.mark.parametrize("kind", [Lookahead, Slow])
def test_an_optimizer_goes_on_within_the_one_that_wraps_it(world: Make, kind: Any) -> None:
    """AttributeError: `_optimizer_load_state_dict_pre_hooks`. And a wrapper of torch's own form lost the moments of the
    optimizer in it, or set rates that this one did not have.
    """
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1),
        "optimizer": lambda model: kind(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    }
    first = world(1, **parts)
    first.round(1)
    first.ranks[0].train(2)
    first.all(lambda at, rank: rank.enter(2, may_be_checkpoint=True))
    first.all(lambda at, rank: rank.replica.apply_result())
    loaded = written(first.ranks[0].replica, 2, training='{"version": 2, "samples": 8}')
    again = world(1, loaded=loaded, **parts).ranks[0].replica
    then, now = (cast(Any, one.optimizers[0]).base for one in (first.ranks[0].replica, again))
    for before, after in zip(then.param_groups[0]["params"], now.param_groups[0]["params"], strict=True):
        assert torch.equal(now.state[after]["momentum_buffer"], then.state[before]["momentum_buffer"])
    again.rates.set_lr_scale(5.0)
    assert now.param_groups[0]["lr"] == 0.5
    assert getattr(again.optimizers[0], "fast_state", now.state) is now.state


def test_the_scale_of_fp16_goes_on_where_it_was() -> None:
    assert resumed(0)[1] == {"scale": 4.0}


def test_only_the_rank_that_wrote_the_checkpoint_has_its_random_numbers_and_no_two_have_the_same() -> None:
    drawn = [tuple(resumed(rank)[2]) for rank in range(3)]
    torch.manual_seed(11)
    assert drawn[0] == tuple(torch.rand(4).tolist())
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("knows_names", [True, False])
def test_moments_go_to_the_parameters_of_their_names(knows_names: bool) -> None:
    """Groups that are made of sets have another order in each process: a resumed job failed in its first step, or had
    the moments of another parameter of the same shape. A checkpoint of before has no names.
    """
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    then = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    now = torch.optim.SGD([*model.parameters()][::-1], lr=0.1, momentum=0.9)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(number))
    then.step()
    saved, present = (names_of(model, one) if knows_names else [] for one in (then, now))
    now.load_state_dict(in_order_of(then.state_dict(), saved, present))
    expected = [0.0, 1.0, 2.0, 3.0] if knows_names else [3.0, 2.0, 1.0, 0.0]
    assert [now.state[one]["momentum_buffer"].max().item() for one in model.parameters()] == expected


def test_moments_of_a_parameter_that_the_optimizer_does_not_have_any_more_are_left() -> None:
    state = {"state": {0: "of a", 1: "of b", "all": "of all"}, "param_groups": []}
    assert in_order_of(state, ["a", "b"], ["b", "c"])["state"] == {"all": "of all", 0: "of b"}


def test_a_job_goes_on_with_the_moments_of_each_parameter_whatever_its_place(world: Make) -> None:
    orders = iter([slice(None), slice(None, None, -1)])

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.parameters()][next(orders)], lr=0.01, momentum=0.9)

    parts: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)),
        "optimizer": optimizer,
    }
    first = world(1, **parts)
    first.round(1)
    first.ranks[0].train(2)
    first.all(lambda at, rank: rank.enter(2, may_be_checkpoint=True))
    first.all(lambda at, rank: rank.replica.apply_result())
    loaded = written(first.ranks[0].replica, 2, training='{"version": 2, "samples": 8}')
    again = world(1, loaded=loaded, **parts)
    before, after = (one.ranks[0].replica for one in (first, again))
    for then, now in zip(before.model.parameters(), after.model.parameters(), strict=True):
        momentum = before.optimizers[0].state[then]["momentum_buffer"]
        assert torch.equal(after.optimizers[0].state[now]["momentum_buffer"], momentum)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]


def test_an_option_that_the_file_has_changed_is_told_with_what_it_goes_on() -> None:
    """As the rates are the file's, one would take that of others; what the optimizer itself counts there is none."""
    then = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9).state_dict()["param_groups"]
    then[0]["k"] = 7
    now = torch.optim.SGD(parameters(), lr=0.2, momentum=0.9, weight_decay=0.5)
    now.param_groups[0]["k"] = 0
    check_is_alike(now, then, "epoch-0001")
    assert other_options(now, then) == "weight_decay=0 (the job has 0.5)"
    assert other_options(torch.optim.SGD(parameters(), lr=0.1, momentum=0.9), then) == ""


def test_another_kind_of_optimizer_is_refused_before_the_first_step() -> None:
    then = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9).state_dict()["param_groups"]
    with pytest.raises(InvalidJob, match="had dampening, momentum, nesterov, and the job's Adam has amsgrad, betas"):
        check_is_alike(torch.optim.Adam(parameters()), then, "epoch-0001")


def test_other_groups_of_parameters_are_refused() -> None:
    then = torch.optim.SGD(parameters(), lr=0.1).state_dict()["param_groups"]
    groups = torch.optim.SGD([{"params": [one]} for one in parameters()], lr=0.1)
    with pytest.raises(InvalidJob, match="its groups had 2 parameters, and the job's have 1, 1"):
        check_is_alike(groups, then, "epoch-0001")


def test_what_one_version_of_an_optimizer_has_more_is_no_change() -> None:
    then = torch.optim.AdamW(parameters()).state_dict()["param_groups"]
    then[0]["initial_lr"] = 0.1
    del then[0]["foreach"]
    check_is_alike(torch.optim.Adam(parameters()), then, "epoch-0001")
