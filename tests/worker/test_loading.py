"""What a file that defines no job is told."""

import json
import sys
from pathlib import Path

import pytest
import torch

from elche.errors import HelpShown, InvalidJob
from elche_worker.model.checkpoint import CheckpointData, CheckpointTarget
from elche_worker.model.savable import check_state
from elche_worker.rank.check import check
from elche_worker.user.loading import UserCodeRaised, load_job
from support.checkpoint_writer import ABOUT

TORCHRUN = """
import os
import torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    raise AssertionError("it is refused before it is run")

main()
"""


SMALL = """
import torch
from elche_worker import TrainingJob

job = TrainingJob(
    model=lambda: torch.nn.Linear(1, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    dataset=lambda: torch.utils.data.TensorDataset(torch.zeros(8, 1)),
    train_step=lambda model, batch: model(batch[0]).sum(),
    batch_size=4,
    epochs=1,
)
"""


def test_a_script_for_torchrun_is_told_what_to_change_before_it_is_run() -> None:
    with pytest.raises(
        InvalidJob, match=r"^train.py: line 6 makes a process group, .* Trainer.setup\(model, optimizer\)"
    ):
        load_job(TORCHRUN, "train.py")
    with pytest.raises(InvalidJob, match="line 2 makes a process group"):
        load_job("from torch.distributed import init_process_group\ninit_process_group('gloo')", "train.py")


def test_a_script_that_never_mentions_elche_is_refused_before_it_trains() -> None:
    """It trained alone to its end, and only then was told that it defines no job."""
    with pytest.raises(InvalidJob, match=r"^train.py: it was not run, .* `job`: .* elche_worker.Trainer"):
        load_job("import torch\nraise AssertionError('it has begun')", "train.py")


def test_a_missing_package_is_told_with_what_to_do() -> None:
    with pytest.raises(UserCodeRaised, match=r"No module named 'einopps' \(train.py, line 1\); install it, .*--req"):
        load_job("import einopps\njob = 1", "train.py")


OF_OTHER_NAMES = """
from elche_worker import TrainingJob

given = dict.fromkeys(("model", "optimizer", "dataset", "train_step"), print)
small = large = TrainingJob(**given, batch_size=1, epochs=1)
"""


def test_jobs_of_other_names_are_named() -> None:
    with pytest.raises(InvalidJob, match="names its job small and large, and defines no `job`: write `job ="):
        load_job(OF_OTHER_NAMES, "train.py")


@pytest.mark.parametrize("job", ["job = 1", "from os import path as job", "from train_step import *"])
def test_a_file_that_may_have_a_job_is_run_whatever_it_calls(job: str) -> None:
    with pytest.raises(UserCodeRaised, match="AssertionError: it is refused before it is run"):
        load_job(TORCHRUN.replace("    dist.init", "    if 0: dist.init") + f"\n{job}", "train.py")


def test_a_loop_in_a_file_that_is_run_for_its_job_does_not_train() -> None:
    """It trained once, on one device, and was told then that it has no job."""
    loop = (
        "import torch\nTrainer = __import__('elche_worker').Trainer\nmodel = torch.nn.Linear(2, 2)\n"
        "Trainer.setup(model, torch.optim.SGD(model.parameters(), 0.1))\nraise AssertionError('it has begun')"
    )
    with pytest.raises(InvalidJob, match=r"^train.py: Trainer.setup\(\) is for a script with a loop of its own"):
        load_job(loop, "train.py")


def test_a_job_that_its_own_file_trains_is_not_trained_while_the_file_is_loaded() -> None:
    """Each rank trained all of it first, alone."""
    file = (
        "from elche_worker import TrainingJob\n"
        "job = TrainingJob(model=int, optimizer=int, dataset=int, train_step=int, batch_size=1, epochs=1)\njob.run()"
    )
    with pytest.raises(InvalidJob, match=r"^train.py: job.run\(\) must stand under `if __name__"):
        load_job(file, "train.py")


def test_a_file_that_ends_itself_is_told_where_its_arguments_belong() -> None:
    """argparse says which it lacks; a traceback of argparse said no more."""
    with pytest.raises(InvalidJob, match=r"^train.py ended itself \(SystemExit: 2\) .* arguments come after --"):
        load_job("raise SystemExit(2)\njob = 1", "train.py")


def test_a_file_whose_main_has_ended_it_in_order_is_told_to_let_it_return() -> None:
    """typer's and click's do so, with arguments that were right: the advice was about these."""
    with pytest.raises(InvalidJob, match=r"\(SystemExit: 0\) .* return, as in `job = main\(standalone_mode=False\)`"):
        load_job("job = 1\nraise SystemExit(0)", "train.py")


@pytest.mark.parametrize("call", ["raise SystemExit(1)", "job = main()"])
def test_a_main_of_hydra_is_told_to_compose_its_configuration(call: str) -> None:
    """It finds no configuration of a file that is not `__main__`, and what it calls returns None."""
    stands = "class hydra:\n    def main(run):\n        return lambda: None\n"
    file = f"{stands}@hydra.main\ndef main():\n    pass\n{call} # job"
    with pytest.raises(InvalidJob, match=r"@hydra.main returns no job: put `with hydra.initialize\(FOLDER"):
        load_job(file, "train.py")


@pytest.mark.parametrize(
    ("argument", "code", "kind"),
    [
        *[("-h", 0, HelpShown), ("-h", 1, HelpShown), ("-h", 2, InvalidJob), ("x", 0, InvalidJob)],
        *[("--version", 0, HelpShown), ("--version 2", 0, InvalidJob)],
    ],
)
def test_a_file_that_was_asked_for_its_help_and_has_shown_it_has_no_fault(
    monkeypatch: pytest.MonkeyPatch, argument: str, code: int, kind: type[Exception]
) -> None:
    """`elche run train.py -- --help` went on with a message about arguments, and ended with code 2."""
    monkeypatch.setattr(sys, "argv", ["train.py", *argument.split()])
    with pytest.raises(InvalidJob) as raised:
        load_job(f"raise SystemExit({code})\njob = 1", "train.py")
    assert type(raised.value) is kind


@pytest.mark.parametrize(("argument", "kind"), [("--help", HelpShown), ("x", InvalidJob)])
def test_a_main_that_returns_nothing_after_its_help_has_no_fault(
    monkeypatch: pytest.MonkeyPatch, argument: str, kind: type[Exception]
) -> None:
    """As click's with `standalone_mode=False`."""
    monkeypatch.setattr(sys, "argv", ["train.py", argument])
    with pytest.raises(InvalidJob) as raised:
        load_job("job = 0", "train.py")
    assert type(raised.value) is kind


def test_a_file_that_sets_a_default_device_is_told_what_to_do_instead() -> None:
    """What belongs to the host, such as the order of samples, would be put there, and fail by words of torch."""
    try:
        with pytest.raises(InvalidJob, match=r"^train.py: torch.set_default_device\('meta'\) would put .*batch.device"):
            load_job("import torch\ntorch.set_default_device('meta')\njob = 1", "train.py")
        with pytest.raises(InvalidJob, match="`job` must be a TrainingJob, not int"):
            load_job("import torch\ntorch.set_default_device('cpu')\njob = 1", "train.py")
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("other", ["lambda text, **options: {}", "lambda: 1"])
def test_a_file_that_replaces_json_is_told_so(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a KeyError of elche's own code, with its traceback."""
    monkeypatch.setattr(json, "loads", json.loads)
    with pytest.raises(InvalidJob, match=r"^train.py: the job's code has replaced json.loads or json.dumps by"):
        load_job(f"import json\njson.loads = {other}\njob = 1", "train.py")
    with pytest.raises(InvalidJob, match=r"the job's code has replaced json.loads"):
        check_state([])


def test_a_file_that_leaves_its_working_folder_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its relative path was resolved after it was run, with a traceback where the folder was deleted."""
    lines = f"""
import os
folder = {str(tmp_path / "other")!r}
os.mkdir(folder)
os.chdir(folder)
os.rmdir(folder)
"""
    (tmp_path / "leaves.py").write_text(lines + SMALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    report = check(Path("leaves.py"), 1, "cpu", runs_here=True, settings={})
    assert report["ok"]
    assert report["imports_beside"] == []


def test_a_checkpoint_that_was_just_found_whole_is_not_read_again(tmp_path: Path) -> None:
    """A large one was read by `elche resume`, by the check and by each rank, one after another."""
    (tmp_path / "train.py").write_text(SMALL)
    kept = CheckpointData({"weight": torch.zeros(1, 1)}, {"buffers": {}})
    training = {"attempt": 1, "version": 2, "ledger": {"epoch": 1}}
    CheckpointTarget(str(tmp_path)).write("1-00000002", kept, ABOUT, training)
    (tmp_path / "1-00000002/model.safetensors").unlink()

    def checked(*, is_whole: bool) -> None:
        resume = str(tmp_path / "1-00000002")
        check(tmp_path / "train.py", 1, "cpu", runs_here=True, settings={}, resume=resume, is_whole=is_whole)

    with pytest.raises(InvalidJob, match=r"model\.safetensors is missing"):
        checked(is_whole=False)
    with pytest.raises(InvalidJob, match="is of a training that is complete: it has 1 of 1 epochs"):
        checked(is_whole=True)
