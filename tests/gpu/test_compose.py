"""The compose file for GPUs asks for them as Docker does, for a worker that there is, whose image can compile."""

from pathlib import Path
from typing import Any

import pytest
import yaml

DOCKER = Path(__file__).resolve().parents[2] / "docker"


def services(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / name).read_text())["services"])


@pytest.fixture
def requests() -> dict[str, list[dict[str, Any]]]:
    """By service, the devices that it asks for."""
    gpu = services("compose.gpu.yaml")
    return {name: one["deploy"]["resources"]["reservations"]["devices"] for name, one in gpu.items()}


def test_only_workers_of_the_other_file_are_given_gpus(requests: dict[str, list[dict[str, Any]]]) -> None:
    known = services("compose.yaml")
    assert requests
    assert all(known[name]["image"] == "elche-worker" for name in requests)
    assert any(one["image"] == "elche-worker" for name, one in known.items() if name not in requests), "one on the CPU"


def test_a_request_is_one_that_docker_takes(requests: dict[str, list[dict[str, Any]]]) -> None:
    """As the Compose specification has it: with capabilities, and either count or device_ids."""
    for devices in requests.values():
        for one in devices:
            assert one["driver"] == "nvidia"
            assert one["capabilities"] == ["gpu"]
            assert ("count" in one) != ("device_ids" in one)
            assert set(one) <= {"driver", "capabilities", "count", "device_ids", "options"}
            assert one.get("count", "all") == "all"


def test_the_worker_s_image_has_a_compiler() -> None:
    assert "install -q -y --no-install-recommends g++ " in (DOCKER / "worker.Dockerfile").read_text()
