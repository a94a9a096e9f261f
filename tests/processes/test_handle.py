"""`job.start()`: a training beside the program that started it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from support.real_processes import Mark

JobFile = Callable[..., Path]

MAIN = """
if __name__ == "__main__":
    import json, sys
    from elche.errors import ElcheError
    out = dict()
    try:
        handle = dataclasses.replace(job, {changes}).start(ranks=2, slow={{1: 2.0}}, out="started")
        out["polled"] = handle.poll_metrics() is not None
        out["devices"], out["world_size"] = handle.devices, handle.world_size
        out["epochs"] = []
        while (metrics := handle.next_metrics()) is not None:
            speeds = metrics.rank_samples_per_s
            out["epochs"].append([metrics.epoch, sorted(metrics.metrics), metrics.samples, len(speeds)])
            if {cancels}:
                handle.cancel()
        out["after"] = handle.next_metrics()
        state = handle.join()
        out["state"] = [sorted(state.params), sorted(state.buffers)]
    except ElcheError as error:
        out["error"] = str(error)
        out["traceback"] = getattr(error, "traceback", "")
    print(json.dumps(out))
"""


def run(mark: Mark, path: Path, *arguments: str, executes: bool = False) -> "subprocess.CompletedProcess[str]":
    """Runs the file, beside which is one with the name of a package that elche imports, as only a new Python would."""
    (path.parent / "click.py").write_text("raise ImportError('this is no package')\n")
    return subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", str(path), *arguments],
        cwd=path.parent,
        env=mark.environment({"TEST_EXECUTES": "1"} if executes else None),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def started(mark: Mark, path: Path, *arguments: str, executes: bool = False) -> Any:
    done = run(mark, path, *arguments, executes=executes)
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning: unclosed file <_io" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main_of(changes: str, *, cancels: bool = False) -> tuple[str, str]:
    return "import dataclasses", MAIN.format(changes=changes, cancels=cancels)


@pytest.mark.long(reason="client/test_api.py reads them")
def test_metrics_come_epoch_by_epoch_and_then_the_state(mark: Mark, job_file: JobFile) -> None:
    out = started(mark, job_file("linear.py", *main_of("epochs=4")))
    assert out["devices"] == ["cpu", "cpu"]
    assert out["world_size"] == 2
    assert out["epochs"] == [[epoch, ["mse"], 500, 2] for epoch in range(4)]
    assert out["after"] is None
    assert out["state"] == [["bias", "weight"], []]
    assert out["polled"] is False


def test_what_the_users_code_raises_comes_back(mark: Mark, job_file: JobFile) -> None:
    broken = "def train_step(model, batch):\n    raise ValueError('it is Monday')"
    path = job_file("linear.py", broken, "import dataclasses\njob = dataclasses.replace(job, train_step=train_step)")
    path.write_text(path.read_text() + "\n".join(main_of("epochs=2")))
    out = started(mark, path)
    assert "ValueError: it is Monday" in str(out["error"])
    assert "it is Monday" in str(out["traceback"])
    assert out["epochs"] == []


def test_a_start_that_is_not_guarded_is_refused(mark: Mark, job_file: JobFile) -> None:
    path = job_file("linear.py", "job.start(ranks=1).join()")
    done = run(mark, path)
    assert done.returncode == 1
    assert "must stand under `if __name__ == '__main__':`" in done.stderr


def test_the_ranks_get_the_programs_arguments(mark: Mark, job_file: JobFile) -> None:
    """`python train.py --lr 0.1` would train with the file's default on each rank, and succeed."""
    read = "import sys\nif sys.argv[1:] != ['--lr', '0.1 x']:\n    raise SystemExit(f'not these: {sys.argv}')"
    path = job_file("linear.py", read)
    path.write_text(path.read_text() + "\n".join(main_of("epochs=1")))
    assert "error" not in started(mark, path, "--lr", "0.1 x", executes=True)


@pytest.mark.parametrize("setting", ["seed=-1", "policy='weekly'"])
def test_a_wrong_setting_is_refused_before_anything_is_started(mark: Mark, job_file: JobFile, setting: str) -> None:
    out = started(mark, job_file("linear.py", *main_of(setting)))
    assert "must be" in str(out["error"])


@pytest.mark.parametrize(
    ("end", "tells"),
    [
        ("", True),
        ("raise RuntimeError", False),
        (
            'os.environ["ELCHE_RANK"] = "0"\nif __name__ == "__main__":\n    dataclasses.replace(job, epochs=1).run()',
            False,
        ),
    ],
    ids=["nothing", "an error", "a training"],
)
def test_a_jobs_file_started_as_a_program_says_that_it_has_trained_nothing(
    mark: Mark, job_file: JobFile, end: str, tells: bool
) -> None:
    """`python train.py` ended with 0 and without a word."""
    done = run(mark, job_file("linear.py", "import dataclasses", end))
    told = "linear.py defines a training job, and nothing was trained: train it with `elche run linear.py`"
    assert (done.returncode, told in done.stderr) == (int("raise" in end), tells), done.stderr


ADAPTED = """
def model():
    built = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    built[0].requires_grad_(False)
    return built

import dataclasses
job = dataclasses.replace(job, model=model, seed=7)

if __name__ == "__main__":
    import json
    state = dataclasses.replace(job, save_frozen=False).start(ranks=1, out="started").join()
    torch.manual_seed(7)
    print(json.dumps([sorted(state.params), torch.equal(state.params["0.weight"], model()[0].weight)]))
"""


def test_a_model_whose_frozen_parameters_were_not_saved_comes_back_whole(mark: Mark, job_file: JobFile) -> None:
    path = job_file("linear.py", ADAPTED)
    assert started(mark, path) == [["0.bias", "0.weight", "1.bias", "1.weight"], True]
    assert load_file(path.parent / "started" / "model.safetensors").keys() == {"1.bias", "1.weight"}


DRAWING = """
import dataclasses

job = dataclasses.replace(
    job,
    model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)),
    train_step=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    epochs=2,
)

if __name__ == "__main__":
    import json
    alone, started = job.run(), job.start(ranks=1).join()
    print(json.dumps([torch.equal(value, started.params[name]) for name, value in alone.params.items()]))
"""


def test_a_rank_alone_has_bit_for_bit_the_dropout_that_run_has(mark: Mark, job_file: JobFile) -> None:
    assert started(mark, job_file("linear.py", DRAWING)) == [True] * 4
