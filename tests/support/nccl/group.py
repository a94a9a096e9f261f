"""The process group, and its collectives over gloo."""

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from support.late_streams import Latch, start_thread
from support.nccl import bootstrap, operations, watchdog, words
from support.nccl.communicator import Communicator, Kernel, Plain
from support.nccl.settings import Settings
from support.nccl.work import WorkNCCL
from support.simulated_cuda import Stream, device

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""`kProcessGroupNCCLDefaultTimeout`."""
_number_of_groups = itertools.count()
"""`process_group_id`."""


class Options:
    """`ProcessGroupNCCL::Options`."""

    backend = "nccl"

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self._timeout = DEFAULT_TIMEOUT
        self.is_high_priority_stream = is_high_priority_stream
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.split_from: Any = None
        self.split_color = -2


class ProcessGroupNCCL:
    """`ProcessGroupNCCL`. Making it reads nothing of the store, and connects nothing (its constructor)."""

    Options = Options

    def __init__(
        self, store: Any, rank: int, size: int, options: Any = None, *, timeout: timedelta = DEFAULT_TIMEOUT
    ) -> None:
        if not torch.cuda.device_count():
            raise ValueError(words.NO_GPUS)
        self.bound_device_id: torch.device | None = None
        self.options: Any = options or Options()
        if options is None:
            self.options._timeout = timeout
        self._rank, self._size = rank, size
        self._shared = watchdog.Shared(
            store=store,
            rank=rank,
            number=next(_number_of_groups),
            settings=Settings.read(),
            name=self.options.group_name,
        )
        self._streams: dict[str, Stream] = {}
        self._num_communicators = self._seq = 0
        self._making: Latch | None = None
        self._watchdog = watchdog.start(self._shared)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "nccl"

    @property
    def uid(self) -> int:
        return self._shared.number

    @property
    def supports_splitting(self) -> bool:
        return True

    def _set_sequence_number_for_group(self) -> None:
        """`PG::setSequenceNumberForGroup`: NCCL begins at 0."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    set_timeout = _set_default_timeout

    def _is_initialized(self) -> bool:
        """`PG::isInitialized`."""
        return bool(self._shared.communicators)

    # Communicators

    def eager_connect_single_device(self, on: torch.device) -> None:
        """`PG::eagerConnectSingleDevice`: makes the communicator now. A non-blocking one is returned at once, and a
        collective waits for it (`NCCLComm::getNcclComm`).
        """
        if self._shared.settings.blocks_in_making:
            self._new_communicator(torch.device(on))
        else:
            self._making = Latch()
            start_thread(self._make_aside, (torch.device(on), self._making))

    def _make_aside(self, on: torch.device, made: Latch) -> None:
        self._new_communicator(on)
        made.set()

    def _communicator(self, on: torch.device) -> Communicator:
        """`PG::getNCCLComm`, and `PG::initNCCLComm` at the first collective, also of a single rank, and after an abort
        that has found none.
        """
        if self._making is not None:
            self._making.wait()
        with self._shared.lock:
            found = self._shared.communicators.get(str(on.index))
        return found or self._new_communicator(on)

    def _new_communicator(self, on: torch.device) -> Communicator:
        """`PG::initNCCLComm`."""
        if self.bound_device_id is not None and self.bound_device_id != on:
            raise dist.DistBackendError(words.OTHER_DEVICE)
        unique_id = self._share_unique_id() if self._shared.settings.shares_id else b""
        made = Communicator(unique_id, self._rank, self._size)
        key = str(on.index)
        self._streams.setdefault(key, Stream(name=f"nccl {self._shared.number}.{self._rank}.{key}"))
        with self._shared.lock:
            return self._shared.communicators.setdefault(key, made)

    def _share_unique_id(self) -> bytes:
        """`PG::broadcastUniqueNCCLID`: rank 0 sets the key "0" ("1" for a second communicator, ...), the others get it,
        within the store's own timeout. Rank 0's errors are the store's. Nothing deletes the key.
        """
        store, key = self._shared.store, str(self._num_communicators)
        self._num_communicators += 1
        if self._rank == 0:
            unique_id = bootstrap.new_unique_id()
            store.set(key, unique_id)
            return unique_id
        try:
            unique_id = bytes(store.get(key))
            if len(unique_id) != bootstrap.UNIQUE_ID_BYTES:
                raise dist.DistBackendError(words.BAD_ID)
        except Exception as error:
            raise dist.DistBackendError(words.no_id(self._rank, key, error)) from None
        return unique_id

    def abort(self) -> None:
        """`PG::abort`: ends the watchdog, aborts what communicators there are, and returns. It says nothing, and
        communicators that are being made go on being made.
        """
        self._shared.terminated.set()
        self._shared.abort_communicators()
        self._shared.monitor_ends.set()

    _abort = abort

    def shutdown(self) -> None:
        """`PG::shutdown`: waits, without bound, for all that is queued and for the watchdog."""
        with self._shared.lock:
            communicators = list(self._shared.communicators.values())
        for one in communicators:
            one.finish()
        self._shared.terminated.set()
        if self._watchdog is not None:
            self._watchdog.wait()
        self._shared.monitor_ends.set()
        for one in communicators:
            one.abort()  # `NCCLComm::destroy`: nothing is queued any more

    _shutdown = shutdown

    def __del__(self) -> None:
        """`PG::~PG`: aborts, unless it was aborted or shut down, and waits for the watchdog, which may be asleep."""
        if not hasattr(self, "_watchdog"):
            return
        if not self._shared.terminated.is_set():
            self.abort()
        self._shared.monitor_ends.set()
        if self._watchdog is not None:
            self._watchdog.wait()

    # Collectives

    def allreduce(self, tensors: Any, options: Any = None) -> WorkNCCL | None:
        tensor = operations.only(tensors)
        operations.check(tensor)
        reduce = operations.reduction(options, self._size)
        return self._collective("ALLREDUCE", [tensor], [tensor], lambda gloo, own: [reduce(gloo, own[0])], options)

    def broadcast(self, tensors: Any, options: Any = None) -> WorkNCCL | None:
        tensor = operations.only(tensors)
        operations.check(tensor)
        root = options if isinstance(options, int) else options.rootRank + options.rootTensor if options else 0
        return self._collective(
            "BROADCAST", [tensor], [tensor], lambda gloo, own: [operations.broadcast(gloo, own[0], root)], options
        )

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> WorkNCCL | None:
        """`PG::allgather`: of the input alone is asked that it is dense and contiguous."""
        tensor, received, size = operations.only(inputs), list(outputs[-1]), self._size
        operations.check(tensor)
        return self._collective(
            "ALLGATHER", [tensor], received, lambda gloo, own: operations.gather(gloo, own[0], size), options
        )

    def _allgather_base(self, output: Any, tensor: Any, options: Any = None) -> WorkNCCL | None:
        size = self._size
        operations.check(tensor)
        operations.check(output)
        if output.numel() != tensor.numel() * size:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        return self._collective(
            "_ALLGATHER_BASE",
            [tensor],
            [output],
            lambda gloo, own: [torch.cat([one.reshape(-1) for one in operations.gather(gloo, own[0], size)])],
            options,
        )

    def _reduce_scatter_base(self, output: Any, tensor: Any, options: Any = None) -> WorkNCCL | None:
        operations.check(output)
        operations.check(tensor)
        rank, size = self._rank, self._size
        if tensor.numel() != output.numel() * size:
            raise ValueError("input tensor must be the same size as output size times world size")
        reduce = operations.reduction(options, size)
        return self._collective(
            "_REDUCE_SCATTER_BASE",
            [tensor],
            [output],
            lambda gloo, own: [reduce(gloo, own[0]).reshape(-1).chunk(size)[rank]],
            options,
        )

    def alltoall_base(
        self, output: Any, tensor: Any, output_sizes: Sequence[int], sizes: Sequence[int], options: Any = None
    ) -> WorkNCCL | None:
        operations.check(output)
        operations.check(tensor)
        if not sizes and not output_sizes and output.shape[0] % self._size:
            raise RuntimeError(words.NOT_DIVISIBLE)

        def exchange(gloo: Any, own: list[Plain]) -> list[Plain]:
            received = torch.empty(output.shape, dtype=own[0].dtype)
            gloo.alltoall_base(received, own[0], list(output_sizes), list(sizes)).wait()
            return [received]

        return self._collective("ALLTOALL_BASE", [tensor], [output], exchange, options)

    def barrier(self, options: Any = None) -> WorkNCCL | None:
        """`PG::barrier`: an all-reduce of one number; that of `wait` blocks the host."""
        tensor = torch.zeros(1, device=self.bound_device_id or torch.device("cuda", torch.cuda.current_device()))
        reduce = operations.reduction(None, self._size)
        return self._collective("BARRIER", [tensor], [tensor], lambda gloo, own: [reduce(gloo, own[0])], options)

    def _collective(
        self,
        kind: str,
        inputs: list[Any],
        outputs: list[Any],
        compute: Callable[[Any, list[Plain]], list[Plain]],
        options: Any,
    ) -> WorkNCCL | None:
        """`PG::collective`: makes the communicator if there is none, queues a kernel and returns. With `asyncOp`, which
        is the options' default, it runs on the communicator's own stream, after what is queued on the current one;
        without, on the current one, and there is nothing to wait for.
        """
        communicator = self._communicator(inputs[0].device)
        self._seq += 1
        is_async = options is None or isinstance(options, int) or options.asyncOp
        current: Any = torch.cuda.current_stream()
        stream = self._streams[str(inputs[0].device.index)] if is_async else current
        stream.wait_stream(current)
        communicator.check()
        operations.check_type(inputs[0])
        given, targets = [one.inner for one in inputs], [one.inner for one in outputs]

        def run(gloo: Any) -> list[tuple[Plain, Plain]]:
            values = compute(gloo, [one.clone() for one in given])
            return [(to, one.view(to.shape)) for to, one in zip(targets, values, strict=True)]

        scratch = [] if outputs[0] is inputs[0] else targets
        kernel = Kernel(kind=kind, compute=run, outputs=targets, seed=self._seq, scratch=scratch)
        kernel.after, end = device().launch(f"nccl::{kind.lower()}", inputs, outputs, stream, kernel.ended)
        communicator.launch(kernel)
        work = WorkNCCL(
            kind,
            rank=self._rank,
            seq=self._seq,
            communicator=communicator,
            kernel=kernel,
            end=end,
            outputs=outputs,
            num_in=sum(one.numel() for one in inputs),
            timeout=self.options._timeout,
            blocks=self._shared.settings.blocks_in_wait,
        )
        if not self._shared.terminated.is_set() and not self._shared.settings.blocks_in_wait:  # `PG::workEnqueue`
            with self._shared.lock:
                self._shared.works.append(work.copied())
        return work if is_async else None
