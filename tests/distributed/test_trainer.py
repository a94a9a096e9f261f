"""Loops of the user's own on real processes: buffers, tags and traces, tasks of one's own, memory, one process."""

import copy
import os
import weakref
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from elche.errors import Misuse
from elche_worker.trainer import LossContext, Trainer, TrainerConfig
from support.loops import (
    NAMES,
    Recurrent,
    TwoInputs,
    close,
    dicts,
    flat,
    new_model,
    new_optimizer,
    samples,
    train_alone,
)
from support.worlds import Worlds

# Gradients


def test_gradients_from_before_setup_are_not_in_the_first_step() -> None:
    """Those of a search for the learning rate were, if the loop's `zero_grad()` had come first, and was left out."""
    models = [new_model(), new_model()]
    models[1].load_state_dict(models[0].state_dict())
    inputs, labels = samples(8).tensors
    for model, is_left in zip(models, (False, True), strict=True):
        if is_left:
            cross_entropy(model(inputs), labels).backward()
        trainer = Trainer.setup(model, new_optimizer(model))
        cross_entropy(model(inputs), labels).backward()
        trainer.step()
        trainer.close()
    assert torch.equal(flat(models[0]), flat(models[1]))


def set_many_loaders() -> int:
    model = new_model()
    with redirect_stderr(StringIO()) as told:
        trainer = Trainer.setup(model, new_optimizer(model))
        for epoch in range(3):
            trainer.set_data_loader(DataLoader(samples(16), batch_size=8), names=NAMES)
            for batch in trainer.epoch(epoch):
                cross_entropy(model(batch["inputs"]), batch["labels"]).backward()
                trainer.step()
    return told.getvalue().count("ranks divide every batch by their speed")


def test_a_loader_for_each_epoch_is_not_told_each_time(worlds: Worlds) -> None:
    """As in a curriculum, whose data set grows."""
    assert worlds.run(2, set_many_loaders) == [1, 0]


# Buffers


def norm_buffers() -> tuple[torch.Tensor, torch.Tensor]:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    trainer = Trainer.setup(model, new_optimizer(model))
    inputs, labels = samples(16).tensors
    own = slice(dist.get_rank() * 8, dist.get_rank() * 8 + 8)
    cross_entropy(model(inputs[own]), labels[own]).backward()
    before = model[1].running_mean.clone()
    trainer.step()
    assert model[1].num_batches_tracked == 1
    return before, model[1].running_mean


def test_buffers_are_those_of_rank_0(worlds: Worlds) -> None:
    (own, after), (other, other_after) = worlds.run(2, norm_buffers)
    assert not torch.equal(own, other)
    assert torch.equal(own, after)
    assert torch.equal(own, other_after)


def catch(with_loss_fn: bool, el_che: bool) -> dict[str, Any]:
    model = Recurrent()
    config = TrainerConfig(anchor=2, max_anchor=2, speed_hint=(1, 2.0)) if el_che else TrainerConfig(max_anchor=0)
    trainer = Trainer.setup(model, new_optimizer(model), config)
    dataset = TensorDataset(*samples(24).tensors, torch.arange(24))
    loader = DataLoader(dataset, batch_size=4)
    trainer.set_data_loader(loader, forward_input="inputs", names=(*NAMES, "number"))
    trainer.capture(tags=["encoder"], traces=["cell"])
    alive: list[bool] = []

    def loss_fn(context: LossContext) -> torch.Tensor:
        alive.append(context.tags["encoder"].requires_grad and len(context.traces["cell"]) == 3)
        return cross_entropy(context.output, context.batch["labels"]) + 0.1 * context.tags["encoder"].square().mean()

    if with_loss_fn:
        trainer.set_loss_fn(loss_fn)
    before = copy.deepcopy(model)
    batch = next(trainer.epoch(0))
    output = trainer.forward_batch(batch)
    if not with_loss_fn:
        cross_entropy(output, batch["labels"]).backward()
    gathered = trainer.gather()
    trainer.step()
    forgotten = trainer.tags == trainer.traces == {}
    inputs = dataset.tensors[0][gathered.batch["number"]]
    return {
        "order": gathered.batch["number"].tolist(),
        "output": close(gathered.output, before(inputs)),
        "tag": close(gathered.tags["encoder"], before.encoder(inputs)),
        "trace": close(gathered.traces["cell"][0], before.cell(before.encoder(inputs))),
        "calls": len(gathered.traces["cell"]),
        "detached": not any(one.requires_grad for one in (gathered.output, *gathered.traces["cell"])),
        "alive": alive,
        "forgotten": forgotten,
    }


@pytest.mark.parametrize("with_loss_fn", [True, False])
def test_tags_and_traces_are_gathered_batch_by_batch_in_the_order_of_the_targets(
    worlds: Worlds, with_loss_fn: bool
) -> None:
    for told in worlds.run(2, catch, with_loss_fn, True):
        batches = [[0, 16], [4, 20], [8], [12]]  # rank 0 has four batches, from 0 on, and rank 1 two, from 16 on
        assert told["order"] == [start + one for starts in batches for start in starts for one in range(4)]
        assert told["calls"] == 3
        assert all(told[name] for name in ("output", "tag", "trace", "detached", "forgotten"))
        assert all(told["alive"])


def test_tags_and_traces_of_shards(worlds: Worlds) -> None:
    for told in worlds.run(2, catch, True, False):
        assert told["order"] == [0, 1, 2, 3]
        assert all(told[name] for name in ("output", "tag", "trace"))
        assert told["calls"] == 3
        assert told["alive"] == [True]


# One process


def test_modules_that_the_script_has_put_into_eval_mode_stay_so() -> None:
    """A frozen teacher in the model was trained on: its dropout and its statistics went on."""
    model = nn.ModuleDict({"teacher": nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).eval(), "student": new_model()})
    with Trainer.setup(model, new_optimizer(model["student"]), TrainerConfig(device="cpu")):
        assert [name for name, one in model.named_children() if one.training] == ["student"]
        assert not model["teacher"][1].training


def test_on_one_process_nothing_is_added(capsys: pytest.CaptureFixture[str]) -> None:
    model = new_model()
    model.eval()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    assert model.training
    assert capsys.readouterr().err.startswith("elche: 1 device")
    assert not trainer.is_distributed
    assert (trainer.world_size, trainer.rank, trainer.has_el_che) == (1, 0, False)
    assert trainer.devices == trainer.chunk_ratios == trainer.throughput == trainer.shard_sizes == []
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    trainer.set_data_loader(DataLoader(samples(30), batch_size=8), forward_input="inputs", names=NAMES)
    assert (trainer.data_num_batches, trainer.data_batch_size) == (4, 8)
    for batch in trainer.epoch(0):
        cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
        trainer.step()
    assert torch.equal(flat(model), train_alone(samples(30), [8, 8, 8, 6]))
    assert torch.equal(trainer.forward_scattered(samples(4).tensors[0]), model(samples(4).tensors[0]))
    trainer.set_lr(0.5)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5
    assert trainer.num_steps == 4


def test_on_one_process_a_loss_function_and_tags_work_alike() -> None:
    model = Recurrent()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    trainer.set_data_loader(DataLoader(samples(8), batch_size=8), forward_input="inputs", names=NAMES)
    trainer.capture(tags=["encoder"], traces=["cell"])
    assert not trainer.has_loss_fn
    trainer.set_loss_fn(lambda context: mse_loss(context.tags["encoder"], torch.zeros(8, 4)))
    assert trainer.has_loss_fn
    for batch in trainer.epoch(0):
        output = trainer.forward_batch(batch)
        assert not output.requires_grad
        assert len(trainer.gather().traces["cell"]) == 3
        assert model.head.weight.grad is None
        assert model.encoder.weight.grad is not None
        trainer.step()
        assert model.encoder.weight.grad is None


class Head:
    """A task head: a model, and what belongs to it."""

    def __init__(self) -> None:
        self.net = new_model()
        self.names = ["a", "b", "c"]

    def compute_loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.net(inputs), labels)


def train_head() -> torch.Tensor:
    head = Head()
    trainer = Trainer.setup_head(head, new_optimizer(head.net))
    size, rank, dataset = dist.get_world_size(), dist.get_rank(), samples(40)
    for step in range(5):
        start = step * 8 + rank * (8 // size)
        head.compute_loss(*dataset[start : start + 8 // size]).backward()
        trainer.step()
    return flat(head.net)


def test_a_task_head_trains_with_its_own_methods(worlds: Worlds) -> None:
    for parameters in worlds.run(2, train_head):
        assert close(parameters, train_alone(samples(40), [8] * 5))


def start_states() -> tuple[torch.Tensor, torch.Tensor]:
    model = nn.Sequential(new_model(dist.get_rank()), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(dist.get_rank())
    Trainer.setup(model, new_optimizer(model))
    return flat(model), model[1].running_mean


def test_all_ranks_begin_as_rank_0(worlds: Worlds) -> None:
    (first, mean), (second, other_mean) = worlds.run(2, start_states)
    assert torch.equal(first, second)
    assert mean.tolist() == other_mean.tolist() == [0.0] * 3
    assert close(first, flat(nn.Sequential(new_model(0), nn.BatchNorm1d(3))))


def train_in_two_stages() -> torch.Tensor:
    model = new_model()
    for _ in range(2):
        trainer = Trainer.setup(model, new_optimizer(model))
        trainer.set_data_loader(DataLoader(samples(64), batch_size=8), forward_input="inputs", names=NAMES)
        for batch in trainer.epoch(0):
            cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
            trainer.step()
    return flat(model)


def test_a_model_goes_on_in_another_trainer(worlds: Worlds) -> None:
    """The former one, which nobody had closed, sent each gradient as well: refused as one added to twice in a step."""
    alone = new_model()
    for _ in range(2):
        train_alone(samples(64), [8] * 8, alone)
    assert all(close(one, flat(alone)) for one in worlds.run(2, train_in_two_stages))


def test_fields_that_match_the_inputs_go_there() -> None:
    model = TwoInputs()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    trainer.set_data_loader(DataLoader(dicts(), batch_size=4), forward_input="picture")  # type: ignore[arg-type]
    assert trainer._forward.wiring is not None
    assert (trainer._forward.wiring.primary, trainer._forward.wiring.others) == ("picture", ("scale",))
    assert trainer._forward.wiring.targets == ("labels",)
    batch = next(trainer.epoch(0))
    assert list(batch) == ["picture", "scale", "labels"]
    assert len(batch) == 3
    assert trainer.forward_batch(batch).shape == (4, 3)
    with pytest.raises(Misuse, match=r"no field 'label'; they have 'picture', 'scale', 'labels'"):
        batch["label"]
    with pytest.raises(Misuse, match="forward_input is 'image', and batches have the fields 'picture', 'scale'"):
        trainer.set_data_loader(DataLoader(dicts()), forward_input="image")  # type: ignore[arg-type]
    lacking = [{"picture": one["picture"], "labels": one["labels"]} for one in dicts()]
    for given, message in (("picture", r"forward\(\) of TwoInputs needs 'scale'"), (None, "forward_input=.*'picture'")):
        trainer.set_data_loader(DataLoader(lacking), forward_input=given)  # type: ignore[arg-type]
        batch = next(trainer.epoch(0))
        with pytest.raises(Misuse, match=message):
            trainer.forward_batch(batch)
        assert trainer.model(batch["picture"], torch.ones(1)).shape == (1, 3), "a loop may call it itself"


def graphs_alive(with_loss_fn: bool) -> int:
    """The most outputs with a graph at once, in one El Che step of three batches."""
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(anchor=3, max_anchor=3))
    trainer.set_data_loader(DataLoader(samples(24), batch_size=4), forward_input="inputs", names=NAMES)
    alive: list[Any] = []
    most = 0

    class Token:
        """Lives as long as the graph that it is in."""

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal most
            ctx.token = Token()
            alive.append(weakref.ref(ctx.token))
            most = max(most, sum(one() is not None for one in alive))
            return output.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0]

    def watch(module: nn.Module, arguments: Any, output: torch.Tensor) -> Any:
        apply: Any = Watched.apply
        return apply(output)

    model.register_forward_hook(watch)
    if with_loss_fn:
        trainer.set_loss_fn(lambda context: cross_entropy(context.output, context.batch["labels"]))
    batch = next(trainer.epoch(0))
    assert len(batch.parts) == 3
    trainer.forward_batch(batch)
    return most


def test_one_graph_is_alive_at_a_time(worlds: Worlds) -> None:
    assert worlds.run(2, graphs_alive, True) == [1, 1]
    assert worlds.run(2, graphs_alive, False) == [3, 3]


def fork_in(ends: str) -> list[int]:
    """The exit codes of processes that the script forks while the trainer is open, and its steps after them."""
    model = new_model()
    codes: list[int] = []
    with Trainer.setup(model, new_optimizer(model)) as trainer:
        for _ in range(2):
            cross_entropy(model(torch.ones(4, 6)), torch.zeros(4, dtype=torch.int64)).backward()
            trainer.step()
            pid = os.fork()
            if not pid:
                try:
                    with trainer:  # as where the script's own `with` is left
                        if ends == "uses it":
                            trainer.step()
                    trainer._close_at_exit()
                except Misuse as error:
                    os._exit(3 if "forked" in str(error) else 4)
                os._exit(0)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return [*codes, trainer.num_steps]


@pytest.mark.parametrize(("ends", "code"), [("as a script", 0), ("uses it", 3)])
def test_a_process_that_the_script_forks_leaves_the_loop_alone(worlds: Worlds, ends: str, code: int) -> None:
    """One that ended by `sys.exit()` compared models with the ranks, and waited without end."""
    assert worlds.run(2, fork_in, ends) == [[code, code, 2]] * 2
