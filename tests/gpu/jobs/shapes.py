"""Which of four directions a noisy point lies in, learnt by a small network; HOW says in what unusual way it trains."""

import os
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from elche_worker import TrainingJob

HOW = os.environ.get("HOW", "")
NUM_SAMPLES, BATCH_SIZE = 4096, 32


class Points(torch.utils.data.Dataset[Any]):
    """Fetched one by one, so that batches come through the host's memory."""

    def __init__(self, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (NUM_SAMPLES,), generator=generator)
        centres = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)) * 2
        self.points = centres[self.labels] + torch.randn(NUM_SAMPLES, 16, generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], self.labels[index]


def build_model() -> nn.Module:
    norm = nn.BatchNorm1d(64) if HOW != "graph" else nn.LayerNorm(64)
    frozen = nn.Linear(64, 64).requires_grad_(False)
    return nn.Sequential(nn.Linear(16, 64), norm, nn.ReLU(), frozen, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def train_step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    points, labels = batch
    return cross_entropy(model(points), labels)


class Graphed:
    """The whole of forward and backward as one CUDA graph, for batches of full size."""

    def __init__(self, model: nn.Module, points: torch.Tensor, labels: torch.Tensor) -> None:
        self.points, self.labels = points.clone(), labels.clone()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                cross_entropy(model(self.points), self.labels).backward()
        torch.cuda.current_stream().wait_stream(aside)
        model.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # other threads copy meanwhile
            self.loss = cross_entropy(model(self.points), self.labels)
            self.loss.backward()
        self.gradients = {p: p.grad for p in model.parameters() if p.grad is not None}

    def replay(self, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.points.copy_(points)
        self.labels.copy_(labels)
        self.graph.replay()
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        return self.loss.detach().clone()


GRAPHED: list[Graphed] = []


def graphed_step(model: nn.Module, batch: list[torch.Tensor], optimizer: Any) -> torch.Tensor:
    points, labels = batch
    if points.is_cuda and len(points) == BATCH_SIZE:
        if not GRAPHED:
            GRAPHED.append(Graphed(model, points, labels))
        loss = GRAPHED[0].replay(points, labels)
    else:
        loss = cross_entropy(model(points), labels)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def synchronous_is_an_error(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Forward and backward may not make the host wait for the device."""
    if batch[0].is_cuda:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return train_step(model, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return train_step(model, batch)


def evaluate(model: nn.Module) -> dict[str, float]:
    device, held_out = next(model.parameters()).device, Points(seed=2)
    hits = (model(held_out.points.to(device)).argmax(1) == held_out.labels.to(device)).float().mean()
    return {"accuracy": hits.item()}


warnings.filterwarnings("ignore")
job = TrainingJob(
    model=build_model,
    optimizer=lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3),
    dataset=Points,
    train_step={"graph": graphed_step, "no waiting": synchronous_is_an_error}.get(HOW, train_step),
    manual_optimization=HOW == "graph",
    evaluate=evaluate,
    batch_size=BATCH_SIZE,
    epochs=3,
    anchor=8,
)

if __name__ == "__main__":
    import json

    state = job.run(device=os.environ["ELCHE_TEST_DEVICE"])
    trained = build_model()
    trained.load_state_dict({**state.params, **state.buffers})
    print(json.dumps(evaluate(trained.eval())))
