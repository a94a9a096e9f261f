"""Contexts with seeded random generators, which leave those of devices as they were."""

from types import SimpleNamespace

import pytest
import torch

from elche_worker.device import rng
from elche_worker.device.rng import kept_random, seeded
from elche_worker.user.callbacks import Callbacks


class Generator(SimpleNamespace):
    """A device's generators, as PyTorch's module of its kind has them."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rng, "BUILT_FOR_CPU", False)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.in_use)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(self.states))
        monkeypatch.setattr(torch.cuda, "set_rng_state_all", self.seed)
        monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: self.seed([seed]))

    def seed(self, states: list[int]) -> None:
        self.states = states


@pytest.fixture(params=[True, False])
def generator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator:
    one = Generator(in_use=request.param, states=[0])
    one.install(monkeypatch)
    return one


def test_devices_go_on_with_their_own_random_numbers_after_a_seeded_context(generator: Generator) -> None:
    """Of a GPU that is not in use yet, PyTorch keeps the seed with which it begins: the context's, on all ranks."""
    torch.manual_seed(1234)
    if generator.in_use:
        generator.states = [99, 98]
    before = generator.states
    with seeded(7):
        assert generator.states == [7]
    assert generator.states == before


def test_the_random_state_of_a_rank_on_the_cpu_is_without_the_hosts_gpus(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking a GPU begins to use it: a rank on the CPU did, for its first callback."""
    drawn: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: drawn.append("state of the GPU") or torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: drawn.append("restored"))
    with kept_random():
        torch.rand(1)
    assert drawn == (["state of the GPU", "restored"] if generator.in_use else [])


def test_a_build_without_devices_keeps_no_seeds_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps each with the stack, formatted, for as long as the process lives."""
    monkeypatch.setattr(rng, "BUILT_FOR_CPU", True)
    num_kept = len(torch.cuda._queued_calls)
    with seeded(7):
        drawn = torch.rand(3)
    rng.seed_all(7)
    assert torch.equal(torch.rand(3), drawn)
    assert len(torch.cuda._queued_calls) == num_kept


def test_what_a_callback_draws_on_one_rank_does_not_change_its_training() -> None:
    """A resumed job, which does not call it again for the same epoch, trained with other random numbers."""
    drawn: list[float] = []

    def metrics_fn() -> None:
        drawn.append(torch.rand(()).item())

    torch.manual_seed(7)
    expected = [torch.rand(()).item() for _ in range(2)]
    torch.manual_seed(7)
    callbacks = Callbacks(kept_random)
    callbacks.call(metrics_fn)
    callbacks.call(metrics_fn, on_every_rank=True)
    assert drawn == [expected[0], expected[0]]
    assert torch.rand(()).item() == expected[1]
