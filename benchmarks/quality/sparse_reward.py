"""REINFORCE with a reward for one action in twenty: most batches have no gradient at first, few at the end."""

import torch
from quality._common import Samples, fall, sgd
from torch import Tensor, nn
from torch.nn.functional import log_softmax, one_hot, softmax
from torch.utils.data import TensorDataset
from virtual_tasks import Task

from elche_worker import TrainingJob

NUM_STATES, NUM_ACTIONS = 6, 20
NUM_EPISODES = 3200


def right(states_n: Tensor) -> Tensor:
    return (states_n * 7 + 3) % NUM_ACTIONS


def build_model() -> nn.Module:
    torch.set_num_threads(1)
    policy = nn.Linear(NUM_STATES, NUM_ACTIONS)
    for one in policy.parameters():
        nn.init.zeros_(one)
    return policy


def loss(policy: nn.Module, batch: Samples) -> Tensor:
    (states_n,) = batch
    logits = policy(one_hot(states_n, NUM_STATES).float())
    actions_n = (logits.detach() - torch.rand_like(logits).log().neg().log()).argmax(1)  # drawn by their probabilities
    rewards_n = (actions_n == right(states_n)).float()
    return -(rewards_n * log_softmax(logits, 1).gather(1, actions_n[:, None]).squeeze(1)).mean()


def failures(policy: nn.Module) -> dict[str, float]:
    states = torch.arange(NUM_STATES)
    probabilities = softmax(policy(one_hot(states, NUM_STATES).float()), 1)
    return {"failures": 1 - probabilities[states, right(states)].mean().item()}


def job(rate: float, seed: int, length: float) -> TrainingJob:
    states = torch.randint(NUM_STATES, (round(NUM_EPISODES * length),), generator=torch.Generator().manual_seed(seed))
    return TrainingJob(
        model=build_model,
        optimizer=sgd(rate),
        dataset=lambda: TensorDataset(states),
        train_step=loss,
        evaluate=failures,
        schedule=fall,
        batch_size=8,
        epochs=1,
    )


TASK = Task(title="sparse reward", metric="failures", rate=10.0, job=job, is_share=True)
