"""Like pytorch/examples reinforcement_learning/reinforce.py: whole episodes, discounted returns, one step. Of 16
episodes a step each rank plays as many as `trainer.shares` says, all at once; the running reward is registered, so
that it is in checkpoints. A cart pole in a few lines of PyTorch stands for Gymnasium's CartPole-v1.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from elche_worker import Trainer, TrainerConfig

GAMMA, EPISODES, LONGEST = 0.99, 16, 200


class RunningReward:
    """A moving average of episodes' lengths, as the original prints it."""

    def __init__(self) -> None:
        self.value = 10.0

    def add(self, reward: float) -> None:
        self.value = 0.9 * self.value + 0.1 * reward

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def cart_pole(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """The next states (N, 4) of carts that are pushed to the left (0) or right (1), and which have fallen."""
    _, x_dot, theta, theta_dot = state.unbind(1)
    force = 20.0 * action - 10.0
    pushed = (force + 0.05 * theta_dot**2 * theta.sin()) / 1.1
    theta_acc = (9.8 * theta.sin() - theta.cos() * pushed) / (0.5 * (4 / 3 - 0.1 * theta.cos() ** 2 / 1.1))
    x_acc = pushed - 0.05 * theta_acc * theta.cos() / 1.1
    changes = torch.stack([x_dot, x_acc, theta_dot, theta_acc], dim=1)
    state = state + 0.02 * changes
    return state, (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.2095)


def build_policy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))


def play(policy: nn.Module, num_episodes: int) -> tuple[Tensor, Tensor]:
    """Log probabilities of the actions (T, N), and which of these were made before the end (T, N)."""
    state, is_alive = 0.1 * torch.rand(num_episodes, 4) - 0.05, torch.ones(num_episodes, dtype=torch.bool)
    log_probs, alive = [], []
    while is_alive.any() and len(alive) < LONGEST:
        choice = Categorical(logits=policy(state))
        action = choice.sample()
        log_probs.append(choice.log_prob(action))
        alive.append(is_alive)
        state, has_fallen = cart_pole(state, action)
        is_alive = is_alive & ~has_fallen
    return torch.stack(log_probs), torch.stack(alive).float()


def policy_loss(log_probs: Tensor, alive: Tensor) -> Tensor:
    """The mean over episodes; returns are normalised over all of this rank's."""
    returns = torch.zeros_like(alive)
    following = torch.zeros(alive.shape[1])
    for step in reversed(range(len(alive))):
        following = returns[step] = alive[step] * (1.0 + GAMMA * following)
    of_alive = returns[alive > 0]
    returns = (returns - of_alive.mean()) / (of_alive.std() + 1e-6)
    return -(log_probs * returns * alive).sum(0).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=543)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    policy, running = build_policy(), RunningReward()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    with Trainer.setup(policy, optimizer, TrainerConfig(device="cpu")) as trainer:
        trainer.register_state(running=running)
        torch.manual_seed(options.seed + trainer.rank)  # each rank plays other episodes
        for num_episodes in trainer.shares(EPISODES, num_steps=options.steps):
            log_probs, alive = play(policy, num_episodes)
            policy_loss(log_probs, alive).backward()
            trainer.step()
            length = alive.sum(0).mean().item()
            running.add(trainer.mean({"length": length}, weight=num_episodes)["length"])
            if trainer.num_steps % 10 == 0 or trainer.num_steps == options.steps:
                trainer.report(running_reward=running.value)
                if trainer.rank == 0:
                    print(f"step {trainer.num_steps}: running reward {running.value:.1f}", flush=True)
        if trainer.rank == 0:
            torch.save(policy.state_dict(), "policy.pt")


if __name__ == "__main__":
    main()
