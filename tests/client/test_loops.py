"""What `elche run` gives the processes of a loop."""

import pytest

from elche_client.script_run import _visible


@pytest.mark.parametrize(
    ("devices", "known", "visible"),
    [
        (("cpu", "cpu"), None, ""),
        (("cuda:0", "cuda:1"), None, "0,1"),
        (("cuda:0", "cuda:2"), None, "0,2"),
        (("cuda:1",), "", "1"),
        (("cuda:0", "cuda:2"), "GPU-a, 5,7", "GPU-a,7"),
    ],
)
def test_a_rank_finds_its_own_device_also_where_one_is_left_out(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], known: str | None, visible: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if known is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", known)
    assert _visible(devices) == visible
