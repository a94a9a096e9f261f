"""The examples, trained in small by two ranks; and their model read where elche is not installed."""

import json
import random
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.real_processes import Command, Mark, command

pytestmark = pytest.mark.slow(reason="whole examples are trained")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = {"ELCHE_EXAMPLE_SIZE": "small"}
LIMIT_S = 400.0

BITS_OF_SINGLE_BYTES = 4.6
"""Per byte of the library's text, when only how frequent each byte is is known. An untrained model takes 8 and more."""
NUM_IMAGES = 40
CIFAR10_FILES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
RESNET20_PARAMETERS = 269_722

LONG = pytest.mark.long(reason="beside one in the gate that goes the same way")
WITHOUT_ELCHE = """
import runpy, sys
sys.modules.update(elche=None, elche_worker=None, elche_client=None, elche_coordinator=None)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """What an example defines, in small."""
    monkeypatch.setenv("ELCHE_EXAMPLE_SIZE", "small")
    return lambda name: runpy.run_path(str(EXAMPLES / name))


@pytest.fixture(scope="module")
def trained_gpt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The result of an epoch of bytes_gpt.py."""
    mark, folder = Mark(), tmp_path_factory.mktemp("bytes_gpt")
    arguments = ("run", str(EXAMPLES / "bytes_gpt.py"), "--ranks", "2", "--device", "cpu", "--epochs", "1", "--json")
    done = command(mark, "elche_client", *arguments, cwd=folder, env=SMALL, limit_s=LIMIT_S)
    assert done.code == 0, done.err
    yield json.loads(done.out)
    mark.assert_none_left()


def test_bytes_gpt_learns(trained_gpt: dict[str, Any]) -> None:
    assert trained_gpt["metrics"]["bits_per_byte"] < BITS_OF_SINGLE_BYTES - 0.8
    assert trained_gpt["committed_samples"] == [trained_gpt["dataset_size"]]
    assert all(rank["batches"] > 0 for rank in trained_gpt["ranks"])


def test_its_model_is_the_same_without_elche(
    trained_gpt: dict[str, Any], example: Callable[[str], dict[str, Any]]
) -> None:
    model = example("load_without_elche.py")["load"](trained_gpt["model"])
    with torch.no_grad():
        metrics = example("bytes_gpt.py")["evaluate"](model)
    assert metrics == pytest.approx(trained_gpt["metrics"], rel=1e-4)


def test_muon_and_adamw_share_its_parameters(
    example: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELCHE_EXAMPLE_OPTIMIZER", "muon")
    job = example("bytes_gpt.py")["job"]
    model = job.model()
    muon, adamw = ([one for group in each.param_groups for one in group["params"]] for each in job.optimizer(model))
    assert {id(one) for one in muon}.isdisjoint({id(one) for one in adamw})
    assert len(muon) + len(adamw) == len(list(model.parameters()))
    assert len(muon) == 4 * len(model.blocks)


@pytest.mark.long(reason="two optimizers are stepped in tests/worker/test_step.py")
def test_bytes_gpt_learns_with_muon(elche: Callable[..., Command]) -> None:
    env = {**SMALL, "ELCHE_EXAMPLE_OPTIMIZER": "muon"}
    arguments = ("run", str(EXAMPLES / "bytes_gpt.py"), "--ranks", "2", "--device", "cpu", "--json")
    done = elche(*arguments, env=env, limit_s=LIMIT_S)
    assert done.code == 0, done.err
    assert json.loads(done.out)["metrics"]["bits_per_byte"] < BITS_OF_SINGLE_BYTES - 0.8


@pytest.mark.long(reason="that the model is the same is shown in less time")
def test_its_model_writes_without_elche(trained_gpt: dict[str, Any]) -> None:
    arguments = [str(EXAMPLES / "load_without_elche.py"), trained_gpt["model"], "def main("]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ELCHE, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def main(")
    assert len(done.stdout) > 100


def test_another_models_file(example: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    load, path = example("load_without_elche.py")["load"], tmp_path / "model.safetensors"
    save_file({"0.weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="is not a model of bytes_gpt"):
        load(path)
    save_file({"positions": torch.ones(8, 32)}, path)
    with pytest.raises(ValueError, match=r"lacks .*embedding.weight"):
        load(path)


def test_a_size_that_is_none(elche: Callable[..., Command]) -> None:
    done = elche("run", str(EXAMPLES / "bytes_gpt.py"), env={"ELCHE_EXAMPLE_SIZE": "huge"})
    assert done.code == 2
    assert "ELCHE_EXAMPLE_SIZE must be one of small, medium, full, not 'huge'" in done.complaint


def record(label: int, source: random.Random) -> bytes:
    """An image of noise, as CIFAR-10 has them: 0 is bluish, 1 is reddish."""
    bright, any_value, dark = (source.randbytes(1024) for _ in range(3))
    bright, dark = bytes(value | 128 for value in bright), bytes(value & 127 for value in dark)
    return bytes([label]) + b"".join([bright, any_value, dark] if label else [dark, any_value, bright])


@pytest.fixture
def cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in CIFAR-10's format, with two colours for images."""
    folder, source = tmp_path / "cifar-10-batches-bin", random.Random(0)
    folder.mkdir()
    for name in CIFAR10_FILES:
        (folder / f"{name}.bin").write_bytes(b"".join(record(index % 2, source) for index in range(NUM_IMAGES)))
    monkeypatch.setenv("CIFAR10_DIR", str(folder))
    return folder


@pytest.mark.long(reason="it trains for long, and its parts are shown one by one")
def test_resnet20_trains(cifar10: Path, elche: Callable[..., Command]) -> None:
    arguments = ("run", str(EXAMPLES / "resnet20_cifar10.py"), "--ranks", "2", "--device", "cpu", "--json")
    done = elche(*arguments, env=SMALL, limit_s=LIMIT_S)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["metrics"]["accuracy"] > 0.9
    assert result["committed_samples"] == [5 * NUM_IMAGES] * 7
    assert all(rank["batches"] > 0 for rank in result["ranks"])


def test_resnet20_is_that_of_the_paper(cifar10: Path, example: Callable[[str], dict[str, Any]]) -> None:
    model = example("resnet20_cifar10.py")["build_model"]()
    weighted = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(weighted) == 20
    assert sum(parameter.numel() for parameter in model.parameters()) == RESNET20_PARAMETERS
    assert model[:-3](torch.zeros(2, 3, 32, 32)).shape == (2, 64, 8, 8)


def test_resnet20_reads_the_binary_format(cifar10: Path, example: Callable[[str], dict[str, Any]]) -> None:
    dataset = example("resnet20_cifar10.py")["build_dataset"]()
    content = (cifar10 / "data_batch_2.bin").read_bytes()[3 * 3073 :][:3073]
    image, label = dataset[NUM_IMAGES + 3]
    assert len(dataset) == 5 * NUM_IMAGES
    assert int(label) == content[0] == 1
    assert [int(image[0, 0, 1]), int(image[1, 2, 0]), int(image[2, 31, 31])] == [
        content[1 + 1],
        content[1 + 1024 + 64],
        content[-1],
    ]


def test_resnet20_moves_and_mirrors(cifar10: Path, example: Callable[[str], dict[str, Any]]) -> None:
    images = torch.rand(12, 3, 32, 32)
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    for index, image in enumerate(example("resnet20_cifar10.py")["augment"](images)):
        crops = [padded[index, :, down : down + 32, right : right + 32] for down in range(9) for right in range(9)]
        assert sum(torch.equal(image, crop) or torch.equal(image, crop.flip(2)) for crop in crops) == 1


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(shutil.rmtree, "there is no file {}/data_batch_1.bin", marks=LONG),
        pytest.param(
            lambda folder: (folder / "test_batch.bin").unlink(), "there is no file {}/test_batch.bin", marks=LONG
        ),
        (
            lambda folder: (folder / "data_batch_3.bin").write_bytes(b"0123"),
            "{}/data_batch_3.bin has 4 bytes instead of 122,920",
        ),
    ],
    ids=["no folder", "no file", "wrong size"],
)
def test_resnet20_without_the_data_set(
    cifar10: Path, elche: Callable[..., Command], tmp_path: Path, damage: Callable[[Path], Any], said: str
) -> None:
    damage(cifar10)
    done = elche("run", str(EXAMPLES / "resnet20_cifar10.py"), env=SMALL)
    assert done.code == 2
    assert said.format(cifar10) in done.complaint
    assert "https://www.cs.toronto.edu/~kriz/cifar.html" in done.complaint
    assert "tar -xzf" in done.complaint
    assert not (tmp_path / "runs").exists()
