"""The stand-in for NCCL is as strict as PyTorch's own: each rule of `support.nccl`, seen from outside.

Ranks are threads of this process on the simulated device; what ends processes is in `test_strict_nccl_watchdog`.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from support.nccl import ProcessGroupNCCL, bootstrap, nccl_in_use
from support.nccl.communicator import Pace
from support.simulated_cuda import CUDA, Device, Stream

SOON_S = 20.0
"""For what happens within milliseconds where the machine is free."""


class Noting(dist.Store):
    """A store that notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dist.HashStore()
        self.calls: list[str] = []

    def set(self, key: str, value: Any) -> None:
        self.calls.append(f"set {key} {len(value)}")
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.calls.append(f"get {key}")
        return bytes(self.inner.get(key))

    def check(self, keys: list[str]) -> bool:  # the monitor's, once a second
        return bool(self.inner.check(keys))


@pytest.fixture(autouse=True)
def pace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pace]:
    with Device().in_use(monkeypatch), torch.cuda.stream(Stream(name="compute")), nccl_in_use(monkeypatch) as pace:
        yield pace


def groups(size: int = 2, store: Any = None, timeout: timedelta = timedelta(minutes=10)) -> list[ProcessGroupNCCL]:
    store = store or dist.HashStore()
    return [ProcessGroupNCCL(store, rank, size, timeout=timeout) for rank in range(size)]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Each rank's call on a thread and a stream of its own."""

    def on_a_stream(call: Callable[[], Any]) -> Any:
        with torch.cuda.stream(Stream()):
            return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(on_a_stream, calls))


def full(value: float, size: int = 4) -> Any:
    return torch.full((size,), float(value), device=CUDA)


def connected(size: int = 2) -> list[ProcessGroupNCCL]:
    made = groups(size)
    together(*(lambda one=one: one.eager_connect_single_device(CUDA) for one in made))
    return made


def test_nothing_is_read_of_the_store_before_the_first_collective_also_by_one_rank() -> None:
    store = Noting()
    (group,) = groups(1, PrefixStore("1/1/0", store))
    assert store.calls == []
    assert not group._is_initialized()
    group.allreduce([full(1)])
    assert store.calls == ["set 1/1/0/0 128"]
    assert group._is_initialized()


def test_the_others_get_the_id_of_rank_0_once() -> None:
    store = Noting()
    first, second = groups(2, PrefixStore("g", store))
    for _ in range(2):
        together(lambda: first.allreduce([full(1)]), lambda: second.allreduce([full(1)]))
    assert sorted(store.calls) == ["get g/0", "set g/0 128"]


def test_a_store_of_which_python_has_let_go_fails_at_the_first_collective() -> None:
    """What happens to a store that only a `PrefixStore` holds: its C++ half has no Python half any more."""

    def made() -> ProcessGroupNCCL:
        store = Noting()
        return groups(1, PrefixStore("1/1/0", store))[0]

    group = made()
    gc.collect()
    with pytest.raises(RuntimeError, match="Not implemented"):
        group.allreduce([full(1)])


def test_an_eager_connection_is_made_at_once() -> None:
    store = Noting()
    (group,) = groups(1, store)
    group.eager_connect_single_device(CUDA)
    assert store.calls == ["set 0 128"]


def test_another_device_than_the_one_of_init_is_refused() -> None:
    (group,) = groups(1)
    group.bound_device_id = torch.device("cuda:1")
    with pytest.raises(dist.DistBackendError, match="tensor not on device passed to init_process_group"):
        group.allreduce([full(1)])


def test_a_missing_rank_0_lasts_as_long_as_the_stores_timeout() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    group = ProcessGroupNCCL(store, 1, 2)
    with pytest.raises(dist.DistBackendError, match=r"\[1\] is setting up NCCL communicator .* by key '0'"):
        group.allreduce([full(1)])


def test_a_missing_peer_makes_rank_0_wait_and_an_abort_does_not_end_that() -> None:
    first, second = groups()
    connecting = threading.Thread(target=first.eager_connect_single_device, args=(CUDA,), daemon=True)
    connecting.start()
    first._shared.store.wait(["0"])
    first.abort()
    assert connecting.is_alive()
    second.eager_connect_single_device(CUDA)  # it is the peer that ends it
    connecting.join(SOON_S)
    assert not connecting.is_alive()


def test_an_abort_that_found_no_communicator_does_not_keep_one_from_being_made() -> None:
    (group,) = groups(1)
    group.abort()
    assert group.allreduce([full(1)]) is not None


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (lambda group, one: group.allreduce([one]), [3.0] * 4),
        (lambda group, one: group.broadcast([one], root(1)), [2.0] * 4),
        (lambda group, one: group.alltoall_base(one, one.clone(), [], []), None),
    ],
    ids=["allreduce", "broadcast", "alltoall"],
)
def test_values_are_those_of_the_collective(call: Any, values: list[float] | None) -> None:
    tensors = [full(1), full(2)]

    def run(group: ProcessGroupNCCL, one: Any) -> list[float]:
        call(group, one).wait()
        return one.tolist()  # type: ignore[no-any-return]

    found = together(
        *(lambda group=group, one=one: run(group, one) for group, one in zip(groups(), tensors, strict=True))
    )
    assert found == [values or [1.0, 1.0, 2.0, 2.0]] * 2


def root(rank: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = rank, 0
    return options


def test_rows_are_gathered_in_order_of_rank() -> None:
    def run(group: ProcessGroupNCCL, own: float) -> list[Any]:
        rows = [full(0), full(0)]
        group.allgather([rows], [full(own)]).wait()  # type: ignore[union-attr]
        return [row.tolist() for row in rows]

    first, second = groups()
    assert together(lambda: run(first, 1), lambda: run(second, 2)) == [[[1.0] * 4, [2.0] * 4]] * 2


def test_wait_orders_the_stream_and_the_host_goes_on(pace: Pace) -> None:
    (group,) = connected(1)
    pace.hold()
    rows = [full(7)]
    work = group.allgather([rows], [full(1)])
    assert work is not None
    assert work.wait()
    assert not work.is_completed()
    assert torch.isnan(rows[0].inner).any()  # the old values at best
    rows[0].mul_(2)  # queued behind it
    assert torch.isnan(rows[0].inner).any()
    pace.may_run.set()
    assert rows[0].tolist() == [2.0] * 4
    assert work.is_completed()


def test_a_stream_that_does_not_wait_sees_what_is_there(pace: Pace) -> None:
    (group,) = connected(1)
    pace.hold()
    rows = [full(7)]
    work = group.allgather([rows], [full(1)])
    assert torch.isnan((rows[0] * 2).inner).any()
    pace.may_run.set()
    assert work is not None
    work.wait()
    assert rows[0].tolist() == [1.0] * 4


def test_inputs_are_read_when_the_kernel_runs(pace: Pace) -> None:
    (group,) = connected(1)
    pace.hold()
    given, rows = full(1), [full(0)]
    work = group.allgather([rows], [given])
    given.fill_(5)  # nothing orders that
    pace.may_run.set()
    assert work is not None
    work.wait()
    assert rows[0].tolist() == [5.0] * 4


def test_a_synchronous_collective_runs_on_the_current_stream_and_returns_nothing() -> None:
    (group,) = connected(1)
    options = dist.AllreduceOptions()
    options.asyncOp = False
    tensor = full(3)
    assert group.allreduce([tensor], options) is None
    assert tensor.tolist() == [3.0] * 4


def test_an_abort_is_silent_and_leaves_garbage_and_what_follows_raises(pace: Pace) -> None:
    first, _ = connected()
    numbers = torch.ones(64, dtype=torch.int64, device=CUDA)
    rows = [torch.zeros_like(numbers) for _ in range(2)]
    values = full(1.0, 8)
    works = [first.allgather([rows], [numbers]), first.allreduce([values])]  # the other rank never comes
    for work in works:
        assert work is not None
        assert work.wait()
    first.abort()
    for work in works:
        assert work is not None
        assert work.is_completed()
        assert work.wait()
    assert len(set(rows[1].tolist())) > 8
    assert torch.isnan(values.cpu()).any()
    with pytest.raises(dist.DistBackendError, match=r"NCCL communicator was aborted on rank 0\. "):
        first.allreduce([values])


def test_an_abort_is_not_noticed_by_the_other_rank() -> None:
    first, second = connected()
    work = second.allreduce([full(1)])
    first.abort()
    assert work is not None
    assert not work.kernel.ended.wait(0.05)
    second.abort()


def test_wait_with_a_timeout_blocks_and_then_aborts() -> None:
    first, _ = connected()
    work = first.allreduce([full(1)])
    assert work is not None
    with pytest.raises(
        dist.DistBackendError, match=r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=1"
    ):
        work.wait(timedelta(milliseconds=20))
    with pytest.raises(dist.DistBackendError, match="aborted"):
        first.allreduce([full(1)])


def test_waits_block_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    first, second = groups(timeout=timedelta(milliseconds=50))
    assert first._watchdog is None
    together(lambda: first.eager_connect_single_device(CUDA), lambda: second.eager_connect_single_device(CUDA))
    work = first.allreduce([full(1)])
    assert work is not None
    with pytest.raises(dist.DistBackendError, match="Timeout"):
        work.wait()


def test_a_value_of_the_environment_that_is_neither_yes_nor_no_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "off")
    with pytest.raises(RuntimeError, match="Invalid value for environment variable: TORCH_NCCL_ENABLE_MONITORING"):
        groups(1)


def test_two_ranks_on_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "card_of", bootstrap.own_card)

    def refused(group: ProcessGroupNCCL) -> str:
        with pytest.raises(dist.DistBackendError) as error:
            group.allreduce([full(1)])
        return str(error.value)

    first, second = groups()
    text, _ = together(lambda: refused(first), lambda: refused(second))
    assert "ncclInvalidUsage" in text
    assert "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device" in text


@pytest.mark.parametrize(
    ("tensor", "kind", "words"),
    [
        (lambda: torch.zeros(4), ValueError, "Tensors must be CUDA and dense"),
        (lambda: torch.zeros(4, 4, device=CUDA).t(), ValueError, "Tensors must be contiguous"),
        (lambda: torch.zeros(4, dtype=torch.int16, device=CUDA), TypeError, "data type is not supported for NCCL"),
    ],
    ids=["of the host", "transposed", "of 16 bits"],
)
def test_tensors_that_nccl_does_not_take_are_refused(tensor: Any, kind: type[Exception], words: str) -> None:
    store = Noting()
    (group,) = groups(1, store)
    with pytest.raises(kind, match=words):
        group.allreduce([tensor()])
    assert bool(store.calls) == (kind is TypeError)  # types are looked at when there is a communicator


def test_operations_on_bits_are_refused() -> None:
    (group,) = groups(1)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.BAND
    with pytest.raises(ValueError, match=r"Cannot use ReduceOp\.BAND with NCCL"):
        group.allreduce([full(1)], options)


def test_a_shutdown_waits_for_what_is_queued(pace: Pace) -> None:
    (group,) = connected(1)
    pace.hold()
    tensor = full(2)
    group.allreduce([tensor])
    closing = threading.Thread(target=group.shutdown, daemon=True)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    pace.may_run.set()
    closing.join(SOON_S)
    assert not closing.is_alive()


def test_a_group_that_is_let_go_is_aborted(pace: Pace) -> None:
    made = connected(1)
    pace.hold()
    work = made[0].allreduce([full(1)])
    made.clear()
    gc.collect()
    assert work is not None
    assert work.is_completed()
    assert work.communicator.is_aborted
