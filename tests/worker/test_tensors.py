"""Files that the safetensors library reads, and nested state that comes back as it was."""

import hashlib
import json
import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from elche_worker.model.tensors import DTYPES, copied, flattened, unflattened, write_tensors


def test_the_library_reads_every_type(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"none": torch.empty(0, 4), "one": torch.tensor(2.5), "ünïcode": torch.ones(1)}
    digest = write_tensors(tmp_path / "all.safetensors", tensors)
    assert digest == hashlib.sha256((tmp_path / "all.safetensors").read_bytes()).hexdigest()
    found = load_file(tmp_path / "all.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_a_type_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"z is torch.complex128, which no safetensors file"):
        write_tensors(tmp_path / "no", {"z": torch.zeros(1, dtype=torch.complex128)})


def test_an_optimizers_state_comes_back_as_it_was() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    state = {"optimizers": [optimizer.state_dict()], "python": random.getstate(), "none": None, (1, "a"): True}
    tensors: dict[str, torch.Tensor] = {}
    back = unflattened(flattened(state, tensors), tensors)
    assert back["python"] == state["python"]
    assert back[1, "a"] is True
    other = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    other.load_state_dict(back["optimizers"][0])
    assert other.param_groups[0]["betas"] == (0.8, 0.9)
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_named_tuples_keep_their_fields() -> None:
    class Transition(NamedTuple):
        state: torch.Tensor
        reward: float

    tensors: dict[str, torch.Tensor] = {}
    flat = json.dumps(flattened(copied({"memory": [Transition(torch.ones(2), 0.5)]}), tensors))
    (back,) = unflattened(json.loads(flat), tensors)["memory"]
    assert back.state.tolist() == [1, 1]
    assert Transition(*back).reward == back.reward == 0.5


def test_what_is_no_plain_value_is_refused() -> None:
    with pytest.raises(ValueError, match="is of type set, which a checkpoint cannot hold"):
        flattened({"a": {1, 2}}, {})


def test_copies_use_the_memory_of_earlier_ones_where_it_fits() -> None:
    first = copied({"a": torch.ones(3), "b": [torch.zeros(2)], "c": 5})
    second = copied({"a": torch.full((3,), 2.0), "b": [torch.ones(4)], "c": 6}, first)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second["a"].tolist() == [2, 2, 2]
    assert second["b"][0].tolist() == [1, 1, 1, 1]
    assert second["c"] == 6


def test_a_copy_is_contiguous_and_its_own() -> None:
    source = torch.arange(6.0).reshape(2, 3).t()
    copy = copied(source)
    assert copy.is_contiguous()
    source.zero_()
    assert copy.tolist() == [[0, 3], [1, 4], [2, 5]]
