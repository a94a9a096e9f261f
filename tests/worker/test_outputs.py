"""Outputs of several batches as one: any structure that a model returns on one batch, on several too."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from elche_worker.trainer.capture import detached, joined

Pair = namedtuple("Pair", "logits loss")


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    loss: torch.Tensor
    hidden: None = None


def outputs(kind: str) -> list[Any]:
    made = []
    for size, value in ((2, 1.0), (4, 4.0)):
        logits, loss = torch.full((size, 3), value, requires_grad=True), torch.tensor(value, requires_grad=True)
        made.append(
            {
                "dict": {"logits": logits, "loss": loss},
                "tuple": (logits, loss),
                "named": Pair(logits, loss),
                "dataclass": Output(logits, loss),
                "number": {"logits": logits, "loss": value},
            }[kind]
        )
    return made


def parts(output: Any) -> tuple[Any, Any]:
    if isinstance(output, dict):
        return output["logits"], output["loss"]
    return (output.logits, output.loss) if isinstance(output, Output) else tuple(output)


@pytest.mark.parametrize("kind", ["dict", "tuple", "named", "dataclass", "number"])
def test_what_is_a_number_of_each_batch_becomes_the_mean_over_samples(kind: str) -> None:
    both = joined(outputs(kind), [2, 4])
    assert type(both) is type(outputs(kind)[0])
    logits, loss = parts(both)
    assert logits.shape == (6, 3)
    assert float(torch.as_tensor(loss).detach()) == pytest.approx(3.0)
    if kind != "number":
        loss.backward()  # one number, as with one batch
    assert not parts(detached(both))[0].requires_grad


def test_what_all_batches_have_alike_stays_as_it_is() -> None:
    assert joined([Output(torch.ones(1), torch.ones(()))] * 2, [1, 1]).hidden is None
    assert joined([{"layers": 3}, {"layers": 3}], [1, 1]) == {"layers": 3}


def test_a_field_of_batches_keeps_each_number() -> None:
    assert joined([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
