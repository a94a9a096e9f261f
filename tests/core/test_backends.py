"""By which backend a job's ranks average, and that ranks with different models do not meet."""

from dataclasses import replace

import pytest
from core.test_scaling import joins, submit

from elche_coordinator.core.describe import describe_training
from elche_coordinator.core.messages.commands import SendFormGroup, SendSyncNow
from elche_coordinator.core.messages.events import RankReady
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.messages.spec import Architecture, Build
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.core.rounds.backends import BACKENDS, Choice, choose_backend, nccl_obstacle
from support.stories import in_mid_training
from support.watched import WatchedSimulation, ranks

GPU = Build(device_type="cuda", torch="2.6.0", cuda="12.4", nccl="2.21.5")
CPU = Build(torch="2.6.0")


def built(*builds: Build) -> dict[Rank, Build]:
    """One rank per build."""
    return {Rank(rank): build for rank, build in enumerate(builds)}


def choose(asked: str, builds: dict[Rank, Build], num_hosts: int = 2) -> Choice:
    return choose_backend(asked, builds, num_hosts)


def gpus(num_ranks: int, **changes: str) -> list[Build]:
    """Ranks that each have a GPU of their own; the last one is changed."""
    each = [replace(GPU, device_id=f"GPU-{rank}") for rank in range(num_ranks)]
    return [*each[:-1], replace(each[-1], **changes)]


# Choosing


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_auto_is_nccl_when_every_rank_has_a_gpu_of_its_own_and_the_same_builds(num_ranks):
    choice = choose("auto", built(*gpus(num_ranks)))
    assert choice.backend == "nccl"
    assert "a GPU of its own" in choice.reason


OBSTACLES = {
    "the last rank is on a CPU": (gpus(3, device_type="cpu"), ["rank 2", "cpu"]),
    "the first rank is on a CPU": ([CPU, *gpus(2)], ["rank 0", "cpu"]),
    "a rank is on another kind of accelerator": (gpus(2, device_type="mps"), ["rank 1", "mps"]),
    "a rank has no NCCL": (gpus(3, nccl=""), ["rank 2", "NCCL"]),
    "no rank has NCCL": ([replace(build, nccl="") for build in gpus(2)], ["rank 0", "NCCL"]),
    "another PyTorch": (gpus(3, torch="2.7.1"), ["ranks 0 and 2", "PyTorch", "2.6.0", "2.7.1"]),
    "another CUDA": (gpus(3, cuda="11.8"), ["ranks 0 and 2", "CUDA", "12.4", "11.8"]),
    "another NCCL": (gpus(3, nccl="2.18.1"), ["ranks 0 and 2", "NCCL", "2.21.5", "2.18.1"]),
    "one GPU for two ranks": (gpus(3, device_id="GPU-1"), ["ranks 1 and 2", "one GPU"]),
}


@pytest.mark.parametrize(("builds", "words"), OBSTACLES.values(), ids=OBSTACLES.keys())
def test_auto_is_gloo_when_nccl_cannot_work_and_says_why(builds, words):
    choice = choose("auto", built(*builds))
    assert choice.backend == "gloo"
    assert all(word in choice.reason for word in words), choice.reason
    assert choice.reason in str(choice)


@pytest.mark.parametrize(("builds", "words"), OBSTACLES.values(), ids=OBSTACLES.keys())
def test_nccl_that_cannot_work_is_refused_with_the_reason_and_what_to_do(builds, words):
    with pytest.raises(ValueError) as refused:
        choose("nccl", built(*builds))
    missing = [word for word in ["nccl", *words, "gloo", "auto"] if word not in str(refused.value)]
    assert not missing, refused.value


def test_nccl_that_can_work_is_taken_as_asked():
    assert choose("nccl", built(*gpus(2))).backend == "nccl"


@pytest.mark.parametrize("asked", ["gloo", "cpu"])
@pytest.mark.parametrize("builds", [gpus(2), [CPU, CPU], gpus(2, nccl="2.18.1")], ids=["GPUs", "CPUs", "mixed"])
def test_gloo_and_cpu_are_taken_as_asked(asked, builds):
    choice = choose(asked, built(*builds))
    assert (choice.backend, choice.reason) == (asked, "as the job says")


@pytest.mark.parametrize("asked", ["mpi", "", "NCCL"])
def test_an_unknown_backend_names_the_known_ones(asked):
    with pytest.raises(ValueError, match=f"unknown backend '{asked}'") as refused:
        choose(asked, built(*gpus(2)))
    assert all(name in str(refused.value) for name in BACKENDS)


@pytest.mark.parametrize("builds", [gpus(2), [CPU, CPU], [GPU, CPU]], ids=["GPUs", "CPUs", "mixed"])
def test_hosts_that_need_encryption_average_through_the_coordinator_unless_asked_otherwise(builds):
    sealed = built(replace(builds[0], needs_encryption=True), *builds[1:])
    choice = choose("auto", sealed)
    assert (choice.backend, "--interface" in choice.reason) == ("cpu", True)
    assert choose("gloo", sealed).backend == "gloo"
    assert choose("auto", sealed, num_hosts=1) == choose("auto", built(*builds), num_hosts=1)
    assert choose("auto", built(*builds)).backend != "cpu"


def test_devices_without_a_name_are_no_obstacle():
    assert nccl_obstacle(built(GPU, GPU)) is None


def test_one_rank_that_differs_is_found_wherever_it_stands():
    other = replace(GPU, device_id="GPU-other", nccl="2.18.1")
    for position in range(4):
        builds = gpus(3)
        builds.insert(position, other)
        obstacle = nccl_obstacle(built(*builds))
        assert obstacle is not None
        assert f"ranks 0 and {max(1, position)}" in obstacle


# Through the core


def with_ready_changed(simulation: WatchedSimulation, *changes: dict[str, object]) -> None:
    """Each rank says something else about itself when it is ready; `settings` changes only the named ones."""
    tell = simulation.handle

    def tell_another(event):
        if isinstance(event, RankReady):
            change = changes[event.rank]
            settings = replace(event.settings, **change.get("settings", {}))
            event = replace(event, **(change | {"settings": settings}))
        tell(event)

    simulation.handle = tell_another


def backends_sent(simulation: WatchedSimulation) -> list[str]:
    return [command.backend for command in simulation.sent(SendFormGroup)]


def test_ranks_of_different_builds_form_a_gloo_group_and_the_job_says_why(simulate):
    simulation = simulate(ranks(5, 5, 5), dataset_size=300)
    with_ready_changed(simulation, *({"build": build} for build in gpus(3, torch="2.7.1")))
    simulation.run_until(lambda: simulation.job.phase is JobPhase.TRAINING)
    assert backends_sent(simulation) == ["gloo"] * 3
    shown = describe_training(simulation.job, 0.0).backend
    assert shown == "gloo (ranks 0 and 2 have PyTorch 2.6.0 and 2.7.1)"
    assert simulation.run().outcome is Outcome.SUCCEEDED


def test_ranks_that_are_alike_form_an_nccl_group(simulate):
    simulation = simulate(ranks(5, 5), dataset_size=300)
    with_ready_changed(simulation, *({"build": build} for build in gpus(2)))
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert backends_sent(simulation) == ["nccl", "nccl"]
    assert describe_training(simulation.job, 0.0).backend.startswith("nccl (every rank")


@pytest.mark.parametrize("backend", ["gloo", "cpu"])
def test_a_job_gets_the_backend_that_it_asks_for(simulate, backend):
    simulation = simulate(ranks(5, 5), dataset_size=300, backend=backend)
    with_ready_changed(simulation, *({"build": build} for build in gpus(2)))
    assert describe_before_ranks_meet(simulation) == ""
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert backends_sent(simulation) == [backend, backend]
    assert describe_training(simulation.job, 0.0).backend == f"{backend} (as the job says)"


def describe_before_ranks_meet(simulation: WatchedSimulation) -> str:
    simulation.run_until(lambda: simulation.job.phase is JobPhase.STARTING)
    return describe_training(simulation.job, 0.0).backend


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("nccl", ["nccl", "rank 1 is on cpu", "gloo"]),
        ("mpi", ["backend must be one of", "not 'mpi'", "nccl", "gloo", "cpu"]),
    ],
)
def test_a_job_whose_backend_cannot_be_fails_as_invalid_before_a_group_is_formed(simulate, backend, words):
    simulation = simulate(ranks(5, 5), backend=backend)
    with_ready_changed(simulation, {"build": gpus(1)[0]}, {"build": CPU})
    result = simulation.run(limit_s=5)
    assert (result.outcome, result.invalid) == (Outcome.FAILED, True)
    assert all(word in result.error for word in words), result.error
    assert simulation.sent(SendFormGroup) == []


def test_a_host_that_comes_later_and_needs_encryption_changes_how_all_average(simulate):
    simulation = simulate(ranks(5, 5, 5), dataset_size=8000, build_ms=10.0)
    with_ready_changed(simulation, *({"build": replace(CPU, needs_encryption=True)} for _ in range(3)))
    submit(simulation, num_ranks=3, min_ranks=2, num_slots=2)
    in_mid_training(simulation)
    assert set(backends_sent(simulation)) == {"gloo"}, "on one host nothing leaves it"
    joins(simulation, "elsewhere", 1)
    simulation.run_until(lambda: backends_sent(simulation)[2:] == ["cpu"] * 3)
    assert describe_training(simulation.job, 0.0).backend_name == "gloo", "so they average until all have met"
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert backends_sent(simulation) == ["gloo", "gloo", "cpu", "cpu", "cpu"]
    assert describe_training(simulation.job, 0.0).backend_name == "cpu"


def test_a_rank_that_comes_later_and_has_no_gpu_ends_nccl(simulate):
    simulation = simulate(ranks(5, 5, 5), dataset_size=8000, build_ms=10.0)
    with_ready_changed(simulation, *({"build": build} for build in [*gpus(2), CPU]))
    submit(simulation, num_ranks=3, min_ranks=2, num_slots=2)
    in_mid_training(simulation)
    joins(simulation, "elsewhere", 1)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert backends_sent(simulation) == ["nccl", "nccl", "gloo", "gloo", "gloo"]
    assert "rank 2 is on cpu" in describe_training(simulation.job, 0.0).backend


# Models

MODEL = ("0.weight float32 (10, 4) parameter", "0.bias float32 (10,) parameter", "1.mean float32 (10,) buffer")
OTHER_MODELS = {
    "another shape": (
        ("0.weight float32 (12, 4) parameter", *MODEL[1:]),
        ["0.weight float32 (10, 4) parameter", "0.weight float32 (12, 4) parameter"],
    ),
    "another type": ((MODEL[0], "0.bias float64 (10,) parameter", MODEL[2]), ["0.bias float32", "0.bias float64"]),
    "a tensor less": (MODEL[:2], [MODEL[2], "nothing more"]),
    "a tensor more": ((*MODEL, "2.weight float32 (3,) parameter"), ["nothing more", "2.weight float32 (3,)"]),
    "another order": ((MODEL[0], MODEL[2], MODEL[1]), [MODEL[1], MODEL[2]]),
}


def architecture(rank: int, tensors: tuple[str, ...], layout_hash: int) -> Architecture:
    return Architecture(rank=Rank(rank), layout_hash=layout_hash, tensors=tensors)


@pytest.mark.parametrize(("other", "words"), OTHER_MODELS.values(), ids=OTHER_MODELS.keys())
def test_the_first_tensor_that_differs_is_named_for_both_ranks(other, words):
    mine, theirs = architecture(0, MODEL, 1), architecture(3, other, 2)
    difference = mine.difference(theirs)
    assert difference is not None
    assert all(word in difference for word in ["rank 0", "rank 3", *words]), difference
    assert difference.index(words[0]) < difference.index(words[1])


def test_models_of_one_layout_do_not_differ():
    assert architecture(0, MODEL, 1).difference(architecture(1, MODEL, 1)) is None


def test_models_too_large_for_words_have_no_difference_in_words():
    assert architecture(0, (), 1).difference(architecture(1, (), 2)) is None


@pytest.mark.parametrize(("other", "words"), OTHER_MODELS.values(), ids=OTHER_MODELS.keys())
def test_ranks_whose_models_differ_fail_the_job_before_a_group_is_formed(simulate, other, words):
    simulation = simulate(ranks(5, 5, 5))
    same = {"tensors": MODEL, "settings": {"layout_hash": 1}}
    with_ready_changed(simulation, same, same, {"tensors": other, "settings": {"layout_hash": 2}})
    result = simulation.run(limit_s=5)
    assert (result.outcome, result.invalid) == (Outcome.FAILED, True)
    first = simulation.events(RankReady)[0].rank
    assert all(word in result.error for word in [f"rank {first}", "rank 2", *words]), result.error
    assert simulation.sent(SendFormGroup) == []
    assert simulation.sent(SendSyncNow) == []


def test_models_that_differ_without_words_fail_the_job_all_the_same(simulate):
    simulation = simulate(ranks(5, 5))
    with_ready_changed(simulation, {"settings": {"layout_hash": 1}}, {"settings": {"layout_hash": 2}})
    result = simulation.run(limit_s=5)
    assert result.invalid
    assert "ranks 0 and 1 differ in the model's parameters" in result.error


@pytest.mark.parametrize("different", range(3))
def test_whichever_rank_differs_the_job_names_it(simulate, different):
    simulation = simulate(ranks(5, 5, 5))
    other = OTHER_MODELS["another shape"][0]
    changes = [
        {"tensors": other, "settings": {"layout_hash": 2}}
        if rank == different
        else {"tensors": MODEL, "settings": {"layout_hash": 1}}
        for rank in range(3)
    ]
    with_ready_changed(simulation, *changes)
    result = simulation.run(limit_s=5)
    assert f"rank {different} has 0.weight float32 (12, 4)" in result.error
