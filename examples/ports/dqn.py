"""Like PyTorch's DQN tutorial: an epsilon-greedy player, a replay memory, a target network that follows. Each rank
plays and remembers for itself, and samples as many transitions as `trainer.shares` says; memory, game and target
network are registered, so that a resumed training goes on with them. A cart pole in PyTorch stands for Gymnasium's
CartPole-v1.
"""

import argparse
import math
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from elche_worker import Trainer, TrainerConfig

GAMMA, TAU, EPS_START, EPS_END, EPS_DECAY = 0.99, 0.01, 0.9, 0.05, 500
BATCH_SIZE, CAPACITY, NUM_CARTS, LONGEST = 128, 10_000, 4, 200


def cart_pole(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """The next states (N, 4) of carts that are pushed to the left (0) or right (1), and which have fallen."""
    _, x_dot, theta, theta_dot = state.unbind(1)
    pushed = (20.0 * action - 10.0 + 0.05 * theta_dot**2 * theta.sin()) / 1.1
    theta_acc = (9.8 * theta.sin() - theta.cos() * pushed) / (0.5 * (4 / 3 - 0.1 * theta.cos() ** 2 / 1.1))
    x_acc = pushed - 0.05 * theta_acc * theta.cos() / 1.1
    state = state + 0.02 * torch.stack([x_dot, x_acc, theta_dot, theta_acc], dim=1)
    return state, (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.2095)


class Player:
    """Carts that are in the middle of a game, and the memory of moves: state, action, next state, has fallen."""

    def __init__(self) -> None:
        self.state = 0.1 * torch.rand(NUM_CARTS, 4) - 0.05
        self.memory = torch.zeros(CAPACITY, 10)
        self.played = 0

    def state_dict(self) -> dict[str, Tensor | int]:
        return {"state": self.state, "memory": self.memory, "played": self.played}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        self.state, self.memory, self.played = state["state"], state["memory"], state["played"]

    @torch.no_grad()
    def play(self, policy: nn.Module) -> None:
        """One move of each cart; a cart that falls begins anew, and some others do."""
        epsilon = EPS_END + (EPS_START - EPS_END) * math.exp(-self.played / NUM_CARTS / EPS_DECAY)
        action = torch.where(
            torch.rand(NUM_CARTS) < epsilon, torch.randint(2, (NUM_CARTS,)), policy(self.state).argmax(1)
        )
        following, has_fallen = cart_pole(self.state, action)
        places = (self.played + torch.arange(NUM_CARTS)) % CAPACITY
        self.memory[places] = torch.cat([self.state, action[:, None], following, has_fallen[:, None]], dim=1)
        self.played += NUM_CARTS
        begins = has_fallen | (torch.rand(NUM_CARTS) < 1 / LONGEST)
        self.state = torch.where(begins[:, None], 0.1 * torch.rand(NUM_CARTS, 4) - 0.05, following)

    def sample(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = self.memory[torch.randint(min(self.played, CAPACITY), (count,))]
        return rows[:, :4], rows[:, 4].long(), rows[:, 5:9], rows[:, 9]


@torch.no_grad()
def mean_length(policy: nn.Module) -> float:
    """Of 50 greedy games, the same ones each time and on every rank, at most 200 moves."""
    state = 0.1 * torch.rand(50, 4, generator=torch.Generator().manual_seed(0)) - 0.05
    is_alive, total = torch.ones(50, dtype=torch.bool), 0
    for _ in range(LONGEST):
        total += int(is_alive.sum())
        state, has_fallen = cart_pole(state, policy(state).argmax(1))
        is_alive &= ~has_fallen
    return total / 50


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    policy = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    target = deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, amsgrad=True)
    with Trainer.setup(policy, optimizer, TrainerConfig(device="cpu")) as trainer:
        torch.manual_seed(options.seed + trainer.rank)  # each rank plays other games
        player = Player()
        trainer.register_state(player=player, target=target)
        for batch_size in trainer.shares(BATCH_SIZE, num_steps=options.steps):
            player.play(policy)
            state, action, following, has_fallen = player.sample(batch_size)
            with torch.no_grad():
                wanted = 1.0 + GAMMA * target(following).max(1).values * (1 - has_fallen)
            smooth_l1_loss(policy(state).gather(1, action[:, None]).squeeze(1), wanted).backward()
            trainer.step()
            with torch.no_grad():
                for of_target, of_policy in zip(target.parameters(), policy.parameters(), strict=True):
                    of_target.lerp_(of_policy, TAU)
            if trainer.num_steps % 200 == 0 or trainer.num_steps == options.steps:
                length = mean_length(policy)
                trainer.report(length=length)
                if trainer.rank == 0:
                    print(f"step {trainer.num_steps}: a greedy game has {length:.1f} moves", flush=True)
        if trainer.rank == 0:
            torch.save(policy.state_dict(), "policy.pt")


if __name__ == "__main__":
    main()
