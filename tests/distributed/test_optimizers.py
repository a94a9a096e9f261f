"""Loops with several optimizers, as a GAN has: each steps its own parameters, on all ranks as one process would."""

import io
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from elche.errors import Misuse
from elche_worker.trainer import Trainer, TrainerConfig
from elche_worker.trainer.optimizers import Optimizers
from support.worlds import Raised, Worlds

BATCH = 8


class Gan(nn.Module):
    """A generator and a critic; BatchNorm would see other samples on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss_of_critic(self, noise: Tensor, real: Tensor) -> Tensor:
        loss: Tensor = self.critic(self.generator(noise).detach()).mean() - self.critic(real).mean()
        return loss

    def loss_of_generator(self, noise: Tensor) -> Tensor:
        loss: Tensor = -self.critic(self.generator(noise)).mean()
        return loss


def optimizers_of(model: Gan, named: bool) -> Any:
    made = {"g": Adam(model.generator.parameters(), lr=0.01), "d": SGD(model.critic.parameters(), lr=0.1, momentum=0.9)}
    return made if named else list(made.values())


def dataset(count: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(count, 3, generator=generator), torch.randn(count, 4, generator=generator))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def train_alone(num_epochs: int, freezes: bool = False) -> Tensor:
    """Plain PyTorch on one process. Two steps of the critic and one of the generator for each batch."""
    model = Gan()
    optimizers = optimizers_of(model, True)
    for _ in range(num_epochs):
        for start in range(0, 40, BATCH):
            noise, real = dataset()[start : start + BATCH]
            for _ in range(2):
                optimizers["d"].zero_grad()
                model.loss_of_critic(noise, real).backward()
                optimizers["d"].step()
            model.critic.requires_grad_(not freezes)
            optimizers["g"].zero_grad()
            model.loss_of_generator(noise).backward()
            optimizers["g"].step()
            model.critic.requires_grad_(True)
    return flat(model)


def begin(named: bool, config: TrainerConfig | None = None) -> tuple[Gan, Any, Trainer]:
    model = Gan()
    optimizers = optimizers_of(model, named)
    return model, optimizers, Trainer.setup(model, optimizers, config or TrainerConfig(max_anchor=0))


def train_batch(model: Gan, trainer: Trainer, optimizers: Any, noise: Tensor, real: Tensor, freezes: bool) -> None:
    generator, critic = ("g", "d") if isinstance(optimizers, dict) else (0, 1)
    for _ in range(2):
        optimizers[critic].zero_grad()
        model.loss_of_critic(noise, real).backward()
        trainer.step(optimizer=critic)
    model.critic.requires_grad_(not freezes)
    model.loss_of_generator(noise).backward()
    trainer.step(optimizer=generator)
    model.critic.requires_grad_(True)


def train_gan(named: bool, freezes: bool) -> Tensor:
    """Its own loader: every rank has its half of each batch."""
    model, optimizers, trainer = begin(named)
    half = BATCH // dist.get_world_size()
    for start in range(0, 40, BATCH):
        own = slice(start + half * trainer.rank, start + half * (trainer.rank + 1))
        train_batch(model, trainer, optimizers, *dataset()[own], freezes)
    assert trainer.num_steps == 5 * 3
    return flat(model)


@pytest.mark.parametrize(("named", "freezes"), [(True, False), (False, True)])
def test_a_gan_in_a_loop_of_its_own_trains_as_on_one_process(worlds: Worlds, named: bool, freezes: bool) -> None:
    for parameters in worlds.run(2, train_gan, named, freezes):
        torch.testing.assert_close(parameters, train_alone(1, freezes), rtol=0, atol=1e-6)


def train_shared_batches(place: str) -> tuple[Tensor, Tensor, list[int]]:
    """A loader whose batches are shared three to one: both optimizers weigh by it. And again from a checkpoint."""

    def go_on(path: str, num_epochs: int) -> tuple[Gan, Trainer]:
        model, optimizers, trainer = begin(True, TrainerConfig(max_anchor=0, speed_hint=(1, 3.0)))
        loader = DataLoader(dataset(), batch_size=BATCH)
        trainer.set_data_loader(loader, forward_input="noise", names=("noise", "real"), inputs=("noise",))
        if path:
            trainer.load(path)
        for epoch in trainer.epochs(num_epochs):
            for batch in trainer.epoch(epoch):
                assert trainer.shard_sizes == [6, 2]
                train_batch(model, trainer, optimizers, batch["noise"], batch["real"], False)
        return model, trainer

    Gan.forward = lambda self, noise: self.generator(noise)  # type: ignore[method-assign,assignment]
    whole, trainer = go_on("", 1)
    trainer.save(place)
    trainer.close()
    dist.barrier()
    again, resumed = go_on(place, 2)
    return flat(whole), flat(again), [resumed.num_steps, trainer.num_steps]


def test_both_optimizers_weigh_by_the_shares_of_a_batch_and_go_on_from_a_checkpoint(
    worlds: Worlds, tmp_path: Path
) -> None:
    for once, twice, num_steps in worlds.run(2, train_shared_batches, str(tmp_path)):
        torch.testing.assert_close(once, train_alone(1), rtol=0, atol=1e-6)
        torch.testing.assert_close(twice, train_alone(2), rtol=0, atol=1e-6)
        assert num_steps == [30, 15]


def step_all() -> tuple[Tensor, Tensor]:
    """`step()` is of all optimizers; clipping is of what is stepped."""
    model, optimizers, trainer = begin(True, TrainerConfig(max_anchor=0, max_grad_norm=0.05))
    alone = Gan()
    theirs = optimizers_of(alone, True)
    for step in range(3):
        noise, real = dataset()[step * BATCH : (step + 1) * BATCH]
        own = slice(trainer.rank * 4, trainer.rank * 4 + 4)
        (model.loss_of_critic(noise[own], real[own]) + model.loss_of_generator(noise[own])).backward()
        trainer.step()
        assert all(one.grad is None for one in model.parameters())
        (alone.loss_of_critic(noise, real) + alone.loss_of_generator(noise)).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        for one in theirs.values():
            one.step()
            one.zero_grad()
    assert optimizers["g"].state
    return flat(model), flat(alone)


def test_a_step_without_a_name_is_of_all(worlds: Worlds) -> None:
    for parameters, expected in worlds.run(2, step_all):
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-6)


def step_by_habit(scales: bool) -> None:
    model, optimizers, trainer = begin(True)
    scaler = torch.amp.GradScaler("cpu", enabled=scales)
    scaler.scale(model.loss_of_generator(torch.ones(2, 3))).backward()
    trainer.average_gradients(optimizer="g")
    before = flat(model)
    try:
        optimizers["d"].step()
    finally:
        assert torch.equal(flat(model), before), "it was stepped, and then refused"


@pytest.mark.parametrize(
    ("scales", "words"), [(False, "gradients of this rank alone"), (True, "scaler.update() and trainer.finish_step()")]
)
def test_an_optimizer_whose_gradients_are_not_averaged_is_not_stepped(worlds: Worlds, scales: bool, words: str) -> None:
    for raised in worlds.run(2, step_by_habit, scales, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "Misuse"
        assert words in raised.message


class Wrapper(SGD):
    """Steps by an optimizer of its own, as Lookahead does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = SGD(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


class Delegating(SGD):
    """Has nothing of its own but the optimizer in it, hooks included, as Fabric's wrappers do."""

    def __init__(self, inner: Optimizer) -> None:
        self.__dict__["_inner"] = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def step(self, closure: Any = None) -> None:
        self.__dict__["_inner"].step()


def step_delegating(by_habit: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    model, alone = nn.Linear(3, 2), nn.Linear(3, 2)
    trainer = Trainer.setup(model, Delegating(SGD(model.parameters(), lr=0.1)))
    alone.load_state_dict(model.state_dict())
    optimizer = SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        inputs = torch.arange(6.0).view(2, 3) + step
        model(inputs[trainer.rank :][:1]).pow(2).mean().backward()
        trainer.optimizer.step() if by_habit else trainer.step()
        alone(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model), flat(alone)


def test_an_optimizer_that_steps_the_one_it_wraps_is_stepped(worlds: Worlds) -> None:
    """`trainer.step()` was refused with the advice to call it, in a loop whose optimizer `fabric.setup` had wrapped."""
    for parameters, expected in worlds.run(2, step_delegating, False):
        torch.testing.assert_close(parameters, expected)
    for raised in worlds.run(2, step_delegating, True, may_raise=True):
        assert isinstance(raised, Raised)
        assert "gradients of this rank alone" in raised.message


def step_beside(what: str) -> str:
    net, loss = nn.Linear(2, 2), nn.Linear(2, 1)
    errors = io.StringIO()
    with redirect_stderr(errors):
        trainer = Trainer.setup(net, Wrapper(net.parameters()))
        other = SGD(net.parameters() if what == "its model" else loss.parameters(), lr=0.1)
        second = Trainer.setup(loss, other) if what == "a second Trainer" else None
        for _ in range(2):
            loss(net(torch.full((1, 2), 1.0 + trainer.rank))).sum().backward()
            if what != "its model":
                trainer.step()
            if second is not None:
                second.step()
            elif what != "nothing":
                other.step()
        trainer.close()
    return errors.getvalue()


@pytest.mark.parametrize(
    ("what", "words"), [("a loss", "SGD is stepped outside the Trainer"), ("a second Trainer", ""), ("nothing", "")]
)
def test_an_optimizer_that_no_trainer_has_is_named_once(worlds: Worlds, what: str, words: str) -> None:
    """A loss with parameters of its own, or a second model, became another one on each rank in silence."""
    said = worlds.run(2, step_beside, what)
    assert [one.count("is stepped outside") for one in said] == [int(bool(words)), 0]
    assert words in said[0]


def test_a_model_that_another_optimizer_has_stepped_is_compared_at_the_end(worlds: Worlds) -> None:
    """Without one step of the Trainer each rank had a model of its own, and all ended with success."""
    ended = worlds.run(2, step_beside, "its model", may_raise=True)
    assert any(isinstance(one, Raised) and "the ranks' models differ" in one.message for one in ended)


def test_on_one_process_only_what_is_named_is_stepped_and_cleared() -> None:
    model, optimizers, trainer = begin(True, TrainerConfig(device="cpu"))
    model.loss_of_generator(torch.ones(2, 3)).backward()
    before = [one.detach().clone() for one in model.critic.parameters()]
    trainer.step(optimizer="g")
    assert all(torch.equal(*pair) for pair in zip(before, model.critic.parameters(), strict=True))
    assert all(one.grad is not None for one in model.critic.parameters())
    assert all(one.grad is None for one in model.generator.parameters())
    with pytest.raises(Misuse, match="there is no optimizer 'x'; there are 'g', 'd'"):
        trainer.step(optimizer="x")
    trainer.average_gradients(optimizer="d")
    with pytest.raises(Misuse, match=r"averaged are of \['d'\]: step these first"):
        trainer.step(optimizer="g")
    trainer.step(optimizer="d")
    trainer.set_loss_fn(lambda context: context.output.mean())
    with pytest.raises(Misuse, match="a loss function makes gradients of all optimizers"):
        trainer.step(optimizer="d")
    trainer.set_lr(0.5)
    assert {group["lr"] for one in optimizers.values() for group in one.param_groups} == {0.5}
    assert trainer.optimizer is optimizers["g"]


@pytest.mark.parametrize("clears", ["nothing", "to none", "to zero", "not needed", "a joint loss"])
def test_gradients_that_another_loss_has_left_are_named_once(clears: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Loops of GANs and actor-critics left out the zero_grad() that they had, as that of one optimizer: each step of
    the critic was made with the generator's gradients, too, in silence.
    """
    model, optimizers, trainer = begin(True, TrainerConfig(device="cpu"))
    noise, real = torch.ones(2, 3), torch.ones(2, 4)
    for _ in range(4):
        if clears == "a joint loss":
            (model.loss_of_critic(noise, real) + model.loss_of_generator(noise)).backward()
        else:
            for _ in range(2):  # accumulated
                model.loss_of_critic(noise, real).backward()
        trainer.step(optimizer="d")
        if clears != "a joint loss":
            model.critic.requires_grad_(clears != "not needed")
            for _ in range(2):
                model.loss_of_generator(noise).backward()
                trainer.step(optimizer="g")
            model.critic.requires_grad_(True)
        else:
            trainer.step(optimizer="g")
        if clears in {"to none", "to zero"}:
            optimizers["d"].zero_grad(set_to_none=clears == "to none")
    words = "step(optimizer='d') steps with the sum of two losses' gradients"
    trainer.close()
    assert capfd.readouterr().err.count(words) == (clears == "nothing")
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters()), "nothing is left at the model"


def test_an_optimizer_that_accumulates_may_be_frozen_in_the_step_of_another() -> None:
    """step() raised that a frozen parameter takes no hook."""
    model, _, trainer = begin(True, TrainerConfig(device="cpu"))
    noise, real = torch.ones(2, 3), torch.ones(2, 4)
    with trainer:
        for _ in range(2):
            model.loss_of_critic(noise, real).backward()
            model.critic.requires_grad_(False)
            model.loss_of_generator(noise).backward()
            trainer.step(optimizer="g")
            model.critic.requires_grad_(True)
        trainer.step(optimizer="d")
        assert trainer.num_steps == 3


def test_a_hook_of_the_script_may_clear_gradients() -> None:
    """Loops that step in hooks of backward do: backward raised, since a gradient was gone."""
    model, _, trainer = begin(True, TrainerConfig(device="cpu"))
    noise, clears = torch.ones(2, 3), iter([False, True, False])

    def clear(parameter: Tensor) -> None:
        if next(clears):
            parameter.grad = None

    next(model.critic.parameters()).register_post_accumulate_grad_hook(clear)  # type: ignore[no-untyped-call]
    with trainer:
        for _ in range(3):
            model.loss_of_generator(noise).backward()
            trainer.step(optimizer="g")
        assert trainer.num_steps == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "a list or dict of them, not list"),
        ({"g": 3}, "built of the model's parameters, not int"),
        ([SGD(nn.Linear(2, 2).parameters(), lr=0.1)], "2 parameters that the model does not have"),
    ],
)
def test_optimizers_that_cannot_train_the_model_are_refused(given: Any, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        Trainer.setup(Gan(), given, TrainerConfig(device="cpu"))


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    _, _, trainer = begin(True, TrainerConfig(device="cpu"))
    trainer.save(str(tmp_path))
    trainer.close()
    _, _, other = begin(False, TrainerConfig(device="cpu"))
    with pytest.raises(Misuse, match=r"does not fit: it has the optimizers \['d', 'g'\], and the loop \['0', '1'\]"):
        other.load(str(tmp_path))


def test_a_checkpoint_of_more_groups_says_how_a_script_that_adds_some_is_resumed(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    with Trainer.setup(model, SGD(model[0].parameters(), lr=0.1), TrainerConfig(device="cpu")) as trainer:
        trainer.optimizer.add_param_group({"params": list(model[1].parameters())})
        trainer.save(str(tmp_path))
    with (
        Trainer.setup(model, SGD(model[0].parameters(), lr=0.1), TrainerConfig(device="cpu")) as other,
        pytest.raises(Misuse, match=r"the job's have 2\. If the script adds groups"),
    ):
        other.load(str(tmp_path))


class Around(SGD):
    """Saves its state in a form of its own, as optimizers do that hold another one."""

    def state_dict(self) -> dict[str, Any]:
        return {"held": super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["held"])


def test_a_loop_goes_on_with_a_state_of_its_optimizers_own_form(tmp_path: Path) -> None:
    """The checkpoint did not fit: 'param_groups'. And a rank that is behind could not take it from another."""
    config = TrainerConfig(device="cpu")
    model = nn.Linear(2, 2)
    with Trainer.setup(model, Around(model.parameters(), lr=0.1, momentum=0.9), config) as trainer:
        model(torch.ones(1, 2)).sum().backward()
        trainer.step()
        trainer.save(str(tmp_path))
        moments = Optimizers(trainer.optimizer).moments()
    for takes in ("checkpoint", "moments"):
        optimizer = Around(model.parameters(), lr=0.1, momentum=0.9)
        with Trainer.setup(model, optimizer, config) as other:
            if takes == "checkpoint":
                other.load(str(tmp_path))
            else:
                own = Optimizers(optimizer)
                own.set_moments(moments, own.names(model), own.names(model))
            assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], torch.ones(2, 2))


@pytest.mark.parametrize("takes", ["checkpoint", "moments"])
def test_moments_belong_to_parameters_whose_order_in_the_optimizer_is_another(takes: str, tmp_path: Path) -> None:
    """A group that was made of a set had another parameter's moments: those of another shape ended the first step, and
    others were taken without a word.
    """
    config = TrainerConfig(device="cpu")
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with Trainer.setup(model, SGD(model.parameters(), lr=0.1, momentum=0.9), config) as trainer:
        (model[0](torch.ones(1, 2)) + 5 * model[1](torch.ones(1, 2))).sum().backward()
        trainer.step()
        trainer.save(str(tmp_path))
        saved = Optimizers(trainer.optimizer)
        moments, names = saved.moments(), saved.names(model)
    optimizer = SGD([*model.parameters()][::-1], lr=0.1, momentum=0.9)
    with Trainer.setup(model, optimizer, config) as other:
        if takes == "checkpoint":
            other.load(str(tmp_path))
        else:
            own = Optimizers(optimizer)
            own.set_moments(moments, names, own.names(model))
        for layer, gradient in zip(model, (1.0, 5.0), strict=True):
            for parameter in layer.parameters():
                assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.full_like(parameter, gradient))


def resumed_with(place: Path, build: Callable[[Iterable[nn.Parameter]], Optimizer]) -> None:
    """A loop with SGD is saved, and goes on with what `build` returns."""
    model = nn.Linear(2, 2)
    config = TrainerConfig(device="cpu")
    with Trainer.setup(model, SGD(model.parameters(), lr=0.1, momentum=0.9), config) as trainer:
        model(torch.ones(1, 2)).sum().backward()
        trainer.step()
        trainer.set_lr(0.05)
        trainer.save(str(place))
    with Trainer.setup(model, build(model.parameters()), config) as other:
        other.load(str(place))


def test_a_loop_that_goes_on_says_which_options_of_its_script_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It went on with the rate of before in silence. What the script sets as it trains, as a schedule does, is none."""
    resumed_with(tmp_path, lambda parameters: SGD(parameters, lr=0.02, momentum=0.5))
    words = (
        "goes on as in the checkpoint, with momentum=0.9 (the job has 0.5), the rates of a loop that began with lr=0.1 "
    )
    assert f"{words}(the script has 0.02;" in capsys.readouterr().err
    resumed_with(tmp_path, lambda parameters: SGD(parameters, lr=0.1, momentum=0.9))
    assert "goes on as" not in capsys.readouterr().err


def test_a_momentum_that_a_schedule_has_changed_is_no_other_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 2)
    for resumes in (False, True):
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
        with Trainer.setup(model, optimizer, TrainerConfig(device="cpu")) as trainer:
            if resumes:
                trainer.load(str(tmp_path))
            else:
                model(torch.ones(1, 2)).sum().backward()
                trainer.step()
                schedule.step()
                trainer.save(str(tmp_path))
    assert "goes on as" not in capsys.readouterr().err


def test_a_checkpoint_of_another_kind_of_optimizer_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="had dampening, momentum, nesterov, and the job's Adam has amsgrad"):
        resumed_with(tmp_path, Adam)
