"""Like jayroxis/PINNs (Raissi's PINN in PyTorch): a network whose second derivative solves an equation, by LBFGS. The
loop is the original's, but LBFGS makes one iteration a step, so that the gradients of all ranks are averaged before
each; ranks take parts of the same points, by `trainer.shares`. Poisson's equation on a line stands for Burgers'.
"""

import argparse
import math

import torch
from torch import Tensor, nn

from elche_worker import Trainer

NUM_POINTS = 128


class PINN(nn.Module):
    """Positions (N, 1) from 0 to 1 to the solution there, 0 at both ends."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        u: Tensor = self.net(x) * x * (1 - x)
        return u


def solution(x: Tensor) -> Tensor:
    return torch.sin(math.pi * x) + 0.25 * torch.sin(4 * math.pi * x)


def source(x: Tensor) -> Tensor:
    """The solution's second derivative."""
    return -(math.pi**2) * (torch.sin(math.pi * x) + 4 * torch.sin(4 * math.pi * x))


def residual_loss(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    u = model(x)
    (u_x,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    return (u_xx - source(x)).square().mean()


@torch.no_grad()
def relative_error(model: nn.Module, device: torch.device) -> float:
    x = torch.linspace(0, 1, 1001, device=device).unsqueeze(1)
    return ((model(x) - solution(x)).norm() / solution(x).norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    model = PINN()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=1, history_size=50)
    with Trainer.setup(model, optimizer) as trainer:
        points = torch.linspace(0, 1, NUM_POINTS, device=trainer.device).unsqueeze(1)
        for num_points in trainer.shares(NUM_POINTS, num_steps=options.steps):
            first = sum(trainer.shard_sizes[: trainer.rank])
            loss = residual_loss(model, points[first : first + num_points])
            loss.backward()
            trainer.average_gradients()
            optimizer.step(lambda loss=loss: loss)  # LBFGS wants a closure; the gradients are there already
            trainer.finish_step()
            if trainer.num_steps % 50 == 0 or trainer.num_steps == options.steps:
                error = relative_error(model, trainer.device)
                trainer.report(error=error)
                if trainer.rank == 0:
                    print(f"step {trainer.num_steps}: loss {loss.item():.2e}, error {error:.2e}", flush=True)
        if trainer.rank == 0:
            torch.save(model.state_dict(), "pinn.pt")


if __name__ == "__main__":
    main()
