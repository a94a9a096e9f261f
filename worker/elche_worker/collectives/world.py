"""The processes of a user-owned loop, and the values that they exchange on the host."""

import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout

from elche.errors import Misuse, PeerLost
from elche_worker.collectives.calls import END_S, Calls, CallsDiffer
from elche_worker.collectives.meeting import STORE_OF_TORCHRUN, Meeting
from elche_worker.collectives.sockets import Address, ShutConnections, listening
from elche_worker.device.discovery import Unusable, own_device
from elche_worker.device.faults import Cause, fault_of
from elche_worker.device.kinds import NAMES, kind_of
from elche_worker.model.tensors import flattened, unflattened

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun, and `elche run`, set for each process."""
OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Set by torchrun, which ends all processes when one has ended."""
ON_ONE_GPU = "Duplicate GPU detected"
"""NCCL's words, in src/init.cc."""
BUILD_TIMEOUT = timedelta(seconds=30)
"""Time in which a new group must form, whose members are all present."""
_calls_of: "WeakKeyDictionary[Any, Calls]" = WeakKeyDictionary()
"""The calls of each process group. Several loops of one process may share a group; their calls are counted together."""


class World:
    """One process per device. A single process has size 1 and no process group, and its calls return at once.

    Numbers and texts are exchanged on the host, over gloo; no pickle is sent.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device, meeting: Meeting | None = None) -> None:
        """`meeting`: where the group was formed, if that was here."""
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.number = self.rank
        """This process's rank at the start; `rank` changes when others leave."""
        self.members = tuple(range(self.size))
        """The numbers of all processes, in order of rank."""
        self.generation = 0
        """0 for the first group; that of `regroup` for a later one."""
        self._given_up = -1
        """Generation of the newest group that was given up. Written from any thread; it only rises."""
        self._meeting = meeting
        self._met = meeting.members if meeting is not None else ()
        """The numbers, in the script, of the processes that formed the first group."""
        self._is_own = meeting is not None
        """True if the group was made here, and is to be destroyed here."""
        self._own: set[Address] = set()
        """Addresses on which gloo accepts connections of this process's groups."""
        self._others: set[Address] = set()
        """The same of the other processes."""
        self._shut = ShutConnections()
        self._host_group: Any = None
        if group is not None and self.size > 1:
            check_default_device()
            has_gloo = "gloo" in str(dist.get_backend_config(group))
            self._host_group = group if has_gloo else self._new_group("gloo")
        known = _calls_of.get(group) if group is not None else None
        self.calls = known or Calls(self.number)
        if known is None:
            self._follow_calls()
        self._loop = self.calls.open()

    def _follow_calls(self) -> None:
        """Starts comparing the calls of the ranks in the present group."""
        self.calls.follow(_store_of(self.group), self.members)
        own = ref(self)  # weak: loops share `calls`, which must not keep one of them alive
        self.calls.end_call = lambda: world.give_up(world.generation) if (world := own()) is not None else None
        if self.group is not None:
            _calls_of[self.group] = self.calls

    @contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Wraps a call that all ranks make together. Raises `CallsDiffer` where others make a different one."""
        self.calls.begin(call)
        try:
            yield
        except PeerLost:
            self.calls.end()
            self.check_calls()
            raise
        finally:
            self.calls.end()

    def check_calls(self) -> None:
        """After another rank was lost, raises `CallsDiffer` if the ranks' published calls differ: then the script is at
        fault, and the lost connection follows from that.
        """
        is_told = self._meeting is None or self.generation > 0 or self._meeting.is_there
        if found := self.calls.difference or (self.calls.look() if is_told else ""):
            raise CallsDiffer(found)

    @classmethod
    def join(cls, process_group: ProcessGroup | None = None, device: str = "auto") -> Self:
        """The world of a process group: the given one, the default one, one made of torchrun's environment, or none.

        Raises `Misuse` when that environment is incomplete, or the device is not there.
        """
        own_device = choose_device(device)
        if process_group is not None:
            return cls(process_group, own_device)
        if dist.is_available() and dist.is_initialized():
            return cls(dist.group.WORLD, own_device)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(None, own_device)
        missing = [name for name in NEEDED if name not in os.environ]
        if missing:
            raise Misuse(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the environment lacks {', '.join(missing)}; "
                "start the script with torchrun or `elche run`"
            )
        meeting = Meeting.of_environment()
        if len(meeting.members) == 1:  # the others have died
            return cls(None, own_device)
        backend = "cpu:gloo,cuda:nccl" if own_device.type == "cuda" else "gloo"
        store, members = meeting.next(), meeting.members
        before = listening()
        dist.init_process_group(backend, store=store, rank=members.index(meeting.number), world_size=len(members))
        world = cls(dist.group.WORLD, own_device, meeting)
        world._exchange_addresses(before)
        return world

    def another_group(self) -> Any:
        """A process group of the same ranks, for collectives whose order relative to others differs between ranks."""
        assert self.group is not None
        before = listening()
        group = self._new_group(str(dist.get_backend_config(self.group)))
        self._exchange_addresses(before)
        return group

    def _new_group(self, backend: str) -> Any:
        assert self.group is not None
        ranks = dist.get_process_group_ranks(self.group)
        timeout = BUILD_TIMEOUT if self.generation else _timeout_of(self.group)
        with lost_peers_named():
            # Otherwise all processes of the script would have to make this call, also those that are not of this loop.
            group = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
        if self.generation:
            _set_timeout(group)
        return group

    # What follows when a process has died

    @property
    def can_regroup(self) -> bool:
        """True if the processes can go on without one that has died: their group was made here, over gloo, and not
        under torchrun, which ends all processes.
        """
        return self._is_own and self.device.type == "cpu" and OF_TORCHRUN not in os.environ

    @property
    def waits_on_device(self) -> bool:
        """True when collectives wait for other ranks where nothing in this process can end them: over NCCL."""
        return self.size > 1 and self.device.type == "cuda"

    @property
    def is_given_up(self) -> bool:
        """True if the present group was given up."""
        return self._given_up >= self.generation

    def give_up(self, generation: int) -> None:
        """Gives up this group: shuts its connections, so that collectives that wait fail. From any thread; gloo itself
        has no way to abort a collective. A later generation may be given up before it forms: see `_exchange_addresses`.
        """
        self._given_up = max(self._given_up, generation)
        if self.is_given_up:
            self._shut.add(self._own, self._others)

    def regroup(self, store: Store, *, generation: int, position: int, size: int) -> None:
        """Replaces the present group by a new one of the ranks that are left. Raises `PeerLost`."""
        # First: gloo's destructor waits until its queued collectives have ended, and these wait for the lost rank.
        self.give_up(self.generation)
        if dist.is_initialized():
            dist.destroy_process_group()
        self.group = self._host_group = None
        self.rank, self.size, self.generation = position, size, generation
        self._own, self._others, self._shut = set(), set(), ShutConnections()
        if size == 1:
            self._keep((self.number,))
            return
        before = listening()
        with lost_peers_named():
            own_keys = PrefixStore(f"loop/{generation}", store)
            dist.init_process_group("gloo", store=own_keys, rank=position, world_size=size, timeout=BUILD_TIMEOUT)
            self.group = self._host_group = dist.group.WORLD
            _set_timeout(self.group)
        self._exchange_addresses(before)
        self._keep(tuple(int(number) for (number,) in self.gather_numbers([self.number])))

    def _keep(self, members: tuple[int, ...]) -> None:
        """Notes which of the first processes are left."""
        self.members = members
        if self._meeting is not None:
            self._meeting.members = tuple(self._met[number] for number in members)
        self._follow_calls()

    def _exchange_addresses(self, before: set[Address]) -> None:
        """Exchanges the new addresses of gloo, for `give_up`. Raises `PeerLost` if that has been called."""
        if not self._is_own or self.device.type != "cpu":
            return
        new = listening() - before
        self._own |= new  # before the check: whoever gives up after it finds them
        if self.is_given_up:  # given up before `give_up` could find this group's connections
            raise PeerLost("another rank of this loop has ended")
        for rank, text in enumerate(self.gather_texts(json.dumps(sorted(new)))):
            if rank != self.rank:
                self._others |= {(host, port) for host, port in json.loads(text)}

    def close(self) -> None:
        """Destroys the process group if it was made here."""
        self.calls.close()
        if self.calls.is_open:  # the next loop has begun
            return
        if self._is_own and dist.is_initialized():
            dist.destroy_process_group()
        self._is_own = False

    def publish_end(self, text: str) -> dict[int, str]:
        """Publishes this rank's text at its loop's end, and returns the texts to compare it with, by rank. Waits for
        other ranks only if the store ends with this process, since they could not ask later. With "" there is nothing
        to compare.
        """
        if self.size == 1:
            return {self.rank: text}
        has_store = self.number == 0 and not self.generation and os.environ.get(STORE_OF_TORCHRUN) != "True"
        return self.calls.publish_end(self._loop, text, limit_s=END_S if has_store and text else 0.0)

    def agree(self, problem: str) -> None:
        """Raises `Misuse` on every rank if any rank has a problem; "" means none. A problem of all names no rank."""
        texts = self.gather_texts(problem)
        for rank, text in enumerate(texts):
            if text:
                raise Misuse(text if len(set(texts)) == 1 else f"rank {rank}: {text}")

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Each rank's numbers, as many on each, in order of rank."""
        if self.size == 1 or not numbers:
            return [list(numbers) for _ in range(self.size)]
        own = torch.tensor(numbers, dtype=torch.float64)  # exact for integers up to 2**53
        return [row.tolist() for row in self._all_gather(own)]

    def gather_texts(self, text: str) -> list[str]:
        """Each rank's text, in order of rank."""
        if self.size == 1:
            return [text]
        data = text.encode()
        lengths = [int(length) for (length,) in self.gather_numbers([len(data)])]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        rows = self._all_gather(padded)
        return [row[:length].numpy().tobytes().decode() for row, length in zip(rows, lengths, strict=True)]

    def share_text(self, text: str, source: int = 0) -> str:
        """Returns the text of rank `source` on every rank."""
        if self.size == 1:
            return text
        numbers = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8).to(torch.int64)
        return self.share_whole_numbers(numbers, source).to(torch.uint8).numpy().tobytes().decode()

    def share_whole_numbers(self, numbers: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Returns rank `source`'s int64 numbers, on the host, on every rank."""
        if self.size == 1:
            return numbers
        count = int(self.gather_numbers([numbers.numel()])[source][0])
        shared = numbers.clone() if self.rank == source else torch.empty(count, dtype=torch.int64)
        with lost_peers_named():
            dist.broadcast(shared, group=self._host_group, group_src=source)
        return shared

    def share_state(self, state: Any, source: int) -> Any:
        """Returns rank `source`'s nested value, of plain values and host tensors, on every rank."""
        tensors: dict[str, torch.Tensor] = {}
        text = ""
        if self.rank == source:
            described = flattened(state, tensors)
            kinds = {name: [str(one.dtype), list(one.shape)] for name, one in tensors.items()}
            text = json.dumps([described, kinds])
        described, kinds = json.loads(self.share_text(text, source))
        for name, (dtype, shape) in kinds.items():
            if self.rank != source:
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            with lost_peers_named():
                dist.broadcast(tensors[name].view(-1).view(torch.uint8), group=self._host_group, group_src=source)
        return unflattened(described, tensors)

    def gather_tensors(self, name: str, parts: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Each rank's parts, of any lengths in dimension 0. Raises `Misuse` if shapes or dtypes differ otherwise."""
        if self.size == 1:
            return [parts]
        lengths = [len(part) for part in parts]
        counts = [int(count) for (count,) in self.gather_numbers([len(parts)])]
        padded_lengths = lengths + [0] * (max(counts) - len(lengths))
        all_lengths = [[int(one) for one in row] for row in self.gather_numbers(padded_lengths)]
        kind = f"{tuple(parts[0].shape[1:])} {parts[0].dtype}" if parts else ""
        kinds = [kind for kind in self.gather_texts(kind) if kind]
        if len(set(kinds)) > 1:
            raise Misuse(f"{name} cannot be gathered: one sample of it is {' and '.join(sorted(set(kinds)))}")
        if not parts:
            shape, dtype = _kind_of(kinds[0]) if kinds else ((), torch.float32)
            own = torch.empty((0, *shape), dtype=dtype, device=self.device)
        else:
            own = torch.cat([part.detach() for part in parts]).to(self.device)
        rows = self.gather_rows(own, [sum(lengths) for lengths in all_lengths])
        ends = zip(rows, all_lengths, counts, strict=True)
        return [list(torch.split(row, lengths[:count])) if count else [] for row, lengths, count in ends]

    def gather_rows(self, own: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Each rank's rows, `sizes` of them; dtype and other dimensions must be equal on all ranks."""
        if self.size == 1:
            return [own]
        padded = own.new_zeros((max(sizes), *own.shape[1:]))
        padded[: len(own)] = own
        if not padded.numel():
            return [padded[:size] for size in sizes]
        sent = padded.view(torch.uint8) if padded.dtype == torch.bool else padded
        rows = [torch.empty_like(sent) for _ in sizes]
        with lost_peers_named():
            dist.all_gather(rows, sent, group=self.group)
        return [row[:size].view(own.dtype) for row, size in zip(rows, sizes, strict=True)]

    def _all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(own) for _ in range(self.size)]
        with lost_peers_named():
            dist.all_gather(rows, own, group=self._host_group)
        return rows


def check_default_device() -> None:
    """Raises `Misuse` if tensors are made on another device than the CPU by default."""
    chosen = torch.empty(0).device  # takes less time than `get_default_device`
    if chosen.type != "cpu":
        raise Misuse(
            f"torch.set_default_device('{chosen}') would put tensors there that belong to the host, and all ranks' on "
            "one device: leave it out. Trainer.setup moves the model to this rank's device, and trainer.epoch its "
            "batches; make other tensors there, too (device=trainer.device)"
        )


@contextmanager
def lost_peers_named() -> Iterator[None]:
    """Turns an error of a collective into `PeerLost`: another rank has ended, and its own error says why. Errors of
    this rank's own device stay as they are.
    """
    try:
        yield
    except RuntimeError as error:
        if ON_ONE_GPU in str(error):
            raise Misuse(
                "two ranks of this loop have the same GPU, and NCCL averages only between GPUs: give each rank its "
                "own, or let them average over gloo, with init_process_group('gloo')"
            ) from None
        if fault_of(error) in (Cause.DEVICE, Cause.MEMORY):
            raise
        raise PeerLost(
            f"another rank of this loop has ended, or cannot be reached; its own error says why ({str(error)[:300]})"
        ) from None


def choose_device(wanted: str) -> torch.device:
    """The device of this process, after a trial; "auto": the GPU of LOCAL_RANK, else the CPU.

    A single process takes another GPU where its first cannot be used; several processes do not, since each GPU belongs
    to one of them. Row T8.
    """
    index = int(os.environ.get("LOCAL_RANK", "0"))
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto" and index >= num_gpus > 0:
        raise Misuse(f"LOCAL_RANK is {index}, and this host has {num_gpus} GPUs; start fewer")
    if wanted == "auto" and not num_gpus and not is_alone:
        return torch.device("cpu")
    try:
        device = torch.device(own_device(wanted, index, may_move=is_alone).device)
    except Unusable as error:
        raise Misuse(
            f"the device {wanted!r} cannot be used: {error.label}: {error.problem}; {_advice(wanted)}"
        ) from None
    kind_of(device).select(device)
    return device


def _advice(wanted: str) -> str:
    if wanted == "auto":
        return "leave it out: name the others in CUDA_VISIBLE_DEVICES, and start a process for each of them"
    return f"use {NAMES}"


def memory_of(device: torch.device) -> int:
    """Total memory of a device in bytes; for a CPU that of the host."""
    return kind_of(device).memory(device).total


def model_name(device: torch.device) -> str:
    """The device's type, such as "H200", by which ranks compare their devices."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
    return _cpu_name() if device.type == "cpu" else device.type


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "CPU"


def _store_of(group: ProcessGroup | None) -> Store | None:
    """The store at which a group was formed; None where torch does not know it."""
    known: Any = dist.distributed_c10d._world.pg_map if group is not None else {}
    return known[group][1] if group in known else None


def _timeout_of(group: ProcessGroup) -> Any:
    """The timeout of a process group, for groups derived from it; None: torch's default."""
    for device in ("cuda", "cpu"):
        with suppress(RuntimeError, AttributeError):
            of_device: Any = group._get_backend(torch.device(device))
            return of_device.options._timeout
    return None


def _set_timeout(group: Any) -> None:
    """Sets torch's default timeout for a group's operations, once it has formed within a shorter one."""
    group._get_backend(torch.device("cpu"))._set_default_timeout(default_pg_timeout)


def _kind_of(text: str) -> tuple[tuple[int, ...], torch.dtype]:
    shape, _, dtype = text.rpartition(" ")
    sizes = [int(size) for size in shape.strip("()").split(",") if size.strip()]
    return tuple(sizes), getattr(torch, dtype.removeprefix("torch."))
