"""Trainings of Hugging Face's `Trainer` and of Lightning on two processes leave behind what they do on one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.real_processes import Mark

pytestmark = pytest.mark.slow(reason="every test starts PyTorch and a framework in two processes")

TWO_RANKS = Path(__file__).resolve().parents[1] / "support" / "two_ranks.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
LIMIT_S = 400.0

NET = """
import json
import os
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from elche.errors import Misuse
from elche_worker.integrations.transformers import ElcheCallback


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x, labels=None):
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}
"""

HUGGING_FACE = (
    NET
    + """


class Notes(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        asks = elche.rank == 1 and state.global_step == 4  # as the coordinator does; one rank hears of it first
        elche._elche._iterations.take_requests = lambda: (0.0, float(asks), 0.0, 0.0)

    def on_optimizer_step(self, args, state, control, **_):  # gradients are averaged and clipped
        self.norm = torch.cat([one.grad.flatten() for one in trainer.model.parameters()]).norm().item()

    def on_log(self, args, state, control, logs, **_):
        wrote.append(state.is_world_process_zero)
        if "grad_norm" in logs:
            norms.append([self.norm, logs["grad_norm"], state.log_history[-1]["grad_norm"]])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(samples)


def metrics(worse):  # the first evaluation is the best one
    counts["evaluations"] += 1
    return {"good": -counts["evaluations"]}


x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
samples = [{"x": one, "labels": (one[0] > 0).long()} for one in x]
wrote, norms, counts = [], [], {"evaluations": 0}
os.environ["ELCHE_CHECKPOINT_DIR"] = "asked"
elche = ElcheCallback(on_rank_loss="fail")
torch.manual_seed(0)
arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, num_train_epochs=3, eval_strategy="epoch", save_strategy="epoch",
    load_best_model_at_end=True, metric_for_best_model="good", report_to="none", disable_tqdm=True, use_cpu=True,
    learning_rate=0.1, max_grad_norm=0.5, logging_steps=1,
)
trainer = Trainer(
    Net(), arguments, train_dataset=elche.part(samples), eval_dataset=Stream(), compute_metrics=metrics,
    callbacks=[elche, Notes()],
)
trainer.train()
at_end = {name: value.tolist() for name, value in trainer.model.state_dict().items()}
trainer.save_model(f"final-{elche.rank}")
told = {"wrote": sorted(set(wrote)), "best": trainer.state.best_model_checkpoint, "model": at_end,
        "norm": arguments.max_grad_norm, "norms": norms}
os.environ["ELCHE_RESUME"] = "nowhere"  # as where `elche resume` has started the script
try:
    trainer.train()
except Misuse as error:
    told["refused"] = str(error)
arguments.num_train_epochs = 4
trainer.train(resume_from_checkpoint="out/checkpoint-12")
told["steps"] = trainer.state.global_step
Path(f"rank-{elche.rank}.json").write_text(json.dumps(told))
"""
)

LIGHTNING = """
import json
import os
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from elche.errors import Misuse
from elche_worker.integrations.lightning import ElcheCallback

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, index):
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("loss", cross_entropy(self.net(batch[0]), batch[1]))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Twice(Model):  # makes two steps with each batch
    automatic_optimization = False

    def training_step(self, batch, index):
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(cross_entropy(self.net(batch[0]), batch[1]))
            self.optimizers().step()


class Two(Model):  # an optimizer for each of two parts
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 2)

    def training_step(self, batch, index):
        for part, optimizer in zip((self.net, self.other), self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(cross_entropy(part(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.Adam(self.other.parameters(), lr=0.1)]


class Asks(pl.Callback):
    def on_train_batch_start(self, trainer, *_):
        asks = RANK == 1 and trainer.global_step == 4  # as the coordinator does; one rank hears of it first
        elche._elche._iterations.take_requests = lambda: (0.0, float(asks), 0.0, 0.0)


x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
samples = TensorDataset(x, (x[:, 0] > 0).long())
held_out = DataLoader(samples, batch_size=64)
pl.seed_everything(0, verbose=False)
os.environ["ELCHE_CHECKPOINT_DIR"] = "asked"
kept = ModelCheckpoint(dirpath="kept", monitor="loss", save_last=True)
elche = ElcheCallback(on_rank_loss="fail")


def new_trainer(*callbacks):
    return pl.Trainer(
        devices=1, accelerator="cpu", plugins=[LightningEnvironment()], callbacks=[elche, *callbacks], max_epochs=2,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=kept in callbacks,
    )


trainer = new_trainer(kept, Asks())
sampler = DistributedSampler(samples, num_replicas=WORLD_SIZE, rank=RANK, seed=0)
model = Model()
trainer.fit(model, DataLoader(samples, batch_size=8, sampler=sampler), held_out)
told = {"best": kept.best_model_path, "last": kept.last_model_path, "is_first": trainer.is_global_zero}
told["validated"] = trainer.validate(model, held_out, verbose=False)[0]["loss"]
told["tested"] = trainer.test(model, held_out, ckpt_path="best", verbose=False, weights_only=False)[0]["loss"]
os.environ["ELCHE_RESUME"] = "nowhere"  # as where `elche resume` has started the script
told["is_kept"] = os.path.isfile(kept.best_model_path)  # until the next fit finds a better one
trainer.fit_loop.max_epochs = 3
trainer.fit(model, DataLoader(samples, batch_size=8, sampler=sampler), held_out)
told["steps"] = trainer.global_step
del os.environ["ELCHE_CHECKPOINT_DIR"]
again = new_trainer()
again.fit(model, DataLoader(samples, batch_size=8, sampler=sampler), ckpt_path="asked/lightning-step-00000007.ckpt")
told["again"] = again.global_step
twice, manual = Twice(), new_trainer()
manual.fit(twice, DataLoader(samples, batch_size=8, sampler=sampler))
told["twice"] = [manual.global_step, twice.net.weight.tolist()]
two, manual = Two(), new_trainer()
before = [one.detach().clone() for one in two.parameters()]
manual.fit(two, DataLoader(samples, batch_size=8, sampler=sampler))
told["two"] = [manual.global_step, *(one.tolist() for one in two.parameters())]
told["moved"] = [not torch.equal(*both) for both in zip(before, two.parameters())]
try:
    new_trainer(LearningRateFinder()).fit(Model(), DataLoader(samples, batch_size=8, sampler=sampler))
except Misuse as error:
    told["refused"] = str(error)
trainer.save_checkpoint(f"final-{RANK}.ckpt")
Path(f"rank-{RANK}.json").write_text(json.dumps(told))
"""

INTERRUPTED = (
    NET
    + """


class Impatient(TrainerCallback):
    is_new = True

    def on_step_end(self, args, state, control, **_):
        is_new, Impatient.is_new = Impatient.is_new, False
        if is_new:
            raise KeyboardInterrupt


samples = [{"x": one, "labels": torch.tensor(0)} for one in torch.randn(8, 4)]
elche = ElcheCallback()
arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, num_train_epochs=1, save_strategy="no", report_to="none", use_cpu=True,
    disable_tqdm=True, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.001,
)
trainer = Trainer(Net(), arguments, train_dataset=elche.part(samples), callbacks=[elche, Impatient()])
try:
    trainer.train()
except KeyboardInterrupt:
    print("interrupted")
before = torch.cat([one.detach().flatten() for one in trainer.model.parameters()])
trainer.train()
after = torch.cat([one.detach().flatten() for one in trainer.model.parameters()])
print("moved", (after - before).norm().item() <= 0.0011, "norm", arguments.max_grad_norm)
"""
)


def told_by(script: str, folder: Path, mark: Mark, *, ranks: bool = True) -> str:
    """Runs the script in the folder, on two ranks or alone; returns its output."""
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, *([str(TWO_RANKS)] if ranks else []), "train.py"],
        cwd=folder,
        env=mark.environment(ENVIRONMENT),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.gate
def test_of_hugging_face_only_rank_0_writes_and_all_ranks_end_with_its_best_model(mark: Mark, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    told_by(HUGGING_FACE, tmp_path, mark)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert (first["wrote"], second["wrote"]) == ([True], [False])
    assert first["norms"]
    for clipped, logged, kept in first["norms"]:
        assert min(logged, 0.5) == pytest.approx(clipped, rel=1e-4)
        assert kept == logged
    assert not (tmp_path / "final-1").exists()
    stored = torch.load(tmp_path / "out" / "checkpoint-4" / "training_args.bin", weights_only=False)
    assert stored.max_grad_norm == 0.5
    best = load_file(tmp_path / "out" / "checkpoint-4" / "model.safetensors")
    for one in (first, second):
        assert one["best"] == "out/checkpoint-4"
        assert one["norm"] == 0.5
        assert "go on with trainer.train(resume_from_checkpoint=...)" in one["refused"]
        assert one["steps"] == 4 * 4
    assert (tmp_path / "out" / "checkpoint-7" / "trainer_state.json").is_file()  # two steps after it was asked for
    assert (tmp_path / "asked" / "step-00000007" / "manifest.json").is_file()
    for one in (first, second):
        assert {name: torch.tensor(value) for name, value in one["model"].items()}.keys() == best.keys()
        for name, value in best.items():
            assert torch.equal(torch.tensor(one["model"][name]), value), name


def test_a_training_of_hugging_face_that_was_interrupted_clips_gradients_when_it_is_begun_again(
    mark: Mark, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    assert "moved True norm 0.001" in told_by(INTERRUPTED, tmp_path, mark, ranks=False)


def test_of_lightning_only_rank_0_writes_and_all_ranks_validate_test_and_fit_afterwards(
    mark: Mark, tmp_path: Path
) -> None:
    pytest.importorskip("pytorch_lightning")
    told_by(LIGHTNING, tmp_path, mark)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert (first.pop("is_first"), second.pop("is_first")) == (True, False)
    assert first == second
    assert first["steps"] == 3 * 4
    assert first["again"] == 2 * 4
    assert first["twice"][0] == 2 * 2 * 4
    assert first["two"][0] == 2 * 2 * 4
    assert first["moved"] == [True] * 4
    assert first["refused"].startswith("LearningRateFinder would find another value in each process")
    assert first["is_kept"]
    assert first["validated"] >= first["tested"]
    assert (tmp_path / "final-0.ckpt").is_file()
    assert not (tmp_path / "final-1.ckpt").exists()
    assert not list((tmp_path / "kept").glob("*-v1.ckpt"))
