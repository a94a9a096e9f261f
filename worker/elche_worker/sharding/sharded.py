"""Shards a module in place with PyTorch's `fully_shard`, and returns a handle for training and saving."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from elche.errors import Misuse
from elche_worker.collectives.consistency import check_alike
from elche_worker.collectives.world import World
from elche_worker.sharding.mesh import build_mesh
from elche_worker.sharding.units import check_parameters, check_units, choose_units, compare_first_forward
from elche_worker.user.strategy import Strategy


def shard(
    module: nn.Module,
    strategy: Strategy = Strategy.FULL_SHARD,
    *,
    process_group: dist.ProcessGroup | None = None,
    units: Iterable[nn.Module] | None = None,
) -> "Sharded":
    """Shards the module over the group's ranks, in place; build the optimizer afterwards. Collective.

    All ranks begin with rank 0's parameters and buffers. Parameters are split by rows (dimension 0), as evenly as
    possible; a rank may get no row of a small one. Those of shape () are whole on every rank.

    `units` are submodules that are gathered and freed one by one while forward and backward pass through them. They
    must run on all ranks in the same order. By default they are the entries of the outermost module lists
    (`choose_units`); `units=()` gathers the whole model at once, for a forward that runs different layers on different
    ranks.

    Raises `Misuse` on every rank if the strategy does not fit the world, a parameter cannot be sharded, or ranks
    bring different models, before anything is changed.
    """
    if not dist.is_initialized():
        raise Misuse("no process group: call torch.distributed.init_process_group() on every rank before shard()")
    group = process_group or cast(dist.ProcessGroup, dist.group.WORLD)
    if dist.get_rank(group) < 0:
        raise Misuse("this rank is not a member of the given process group")
    has_nccl = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")
    world = World(group, device)

    fault, num_shards, named_units = "", 0, {}
    try:
        named_units = choose_units(module) if units is None else check_units(module, units)
        num_shards = strategy.num_shards(group.size())
        check_parameters(module, named_units)
    except Misuse as error:
        fault = str(error)
    world.agree(fault)
    check_alike(module, world)
    asked = world.gather_texts(f"{strategy} with units {list(named_units)}")
    for rank, other in enumerate(asked):
        if other != asked[0]:
            raise Misuse(f"rank {rank} shards with {other}, and rank 0 with {asked[0]}; ask for the same on every rank")

    mesh = build_mesh(group, num_shards, device.type)
    _copy_from_first(module.buffers(), group, device)
    for part in (*named_units.values(), module):  # one at a time, so that the device never holds the whole model
        _copy_from_first((p for p in part.parameters() if not isinstance(p, DTensor)), group, device)
        scalars = {parameter for parameter in part.parameters() if not parameter.dim()}
        fully_shard(
            part, mesh=mesh, reshard_after_forward=strategy.reshards_after_forward, ignored_params=scalars or None
        )
    # Otherwise ranks whose loss uses different parameters would call one reduce-scatter with different lengths.
    cast(FSDPModule, module).set_reduce_scatter_unused_params(True)
    if named_units and group.size() > 1:
        compare_first_forward(module, named_units, world)
    return Sharded(module, strategy, group, [cast(FSDPModule, part) for part in (module, *named_units.values())])


class Sharded:
    """A module sharded over ranks, which `shard` makes. Calling it calls the module.

    Gradients are means over all ranks. They are reduced while backward runs, so that the training step is the usual
    one; where a parameter has no gradient, it counts as zeros. All methods except accessors are collective, and raise
    `Misuse` after `into_inner`.
    """

    def __init__(
        self, module: nn.Module, strategy: Strategy, process_group: dist.ProcessGroup, parts: list[FSDPModule]
    ) -> None:
        self.strategy = strategy
        self.process_group = process_group
        self._inner: nn.Module | None = module
        self._parts = parts
        # Kept, because the optimizer has these parameters, and a gathered module registers others.
        self._parameters = list(module.parameters())
        self._scalars = [parameter for parameter in self._parameters if parameter.requires_grad and not parameter.dim()]
        self._is_averaging_due = False
        """True from the beginning of a backward pass until scalars' gradients are averaged at its end."""
        self._prefetches: list[UnshardHandle] = []
        """Gathers that were begun for the next forward pass."""
        self._was_reduced = False
        """True if backward has reduced a gradient since the last `sync_gradients`."""
        self._step_watch: RemovableHandle | None = None
        """Hook on all optimizers while gathered parameters are kept."""
        self._is_stale = False
        """True if an optimizer has changed the shards of gathered parameters."""
        # Prepended: `fully_shard`'s own hook takes parameters that are gathered already as they are, stale ones too.
        self._hooks = [module.register_forward_pre_hook(self._before_forward, prepend=True)]
        if not strategy.reshards_after_forward:
            self._hooks.append(module.register_forward_hook(self._watch_steps))
        if self._scalars and self.world_size > 1:
            self._hooks.append(module.register_forward_hook(self._await_backward))
        for parameter in self._parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._reduced))  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output. Parameters are gathered before and freed after, by the strategy."""
        return self.module(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The module that was sharded."""
        self._check_held()
        return cast(nn.Module, self._inner)

    @property
    def backend(self) -> str:
        """The process group's backend, such as "gloo"."""
        return dist.get_backend(self.process_group)

    @property
    def world_size(self) -> int:
        """Number of ranks that share the module."""
        return self.process_group.size()

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.process_group)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, for the optimizer and `clip_grad_norm_`: DTensors of the full shape, except scalars."""
        self._check_held()
        return list(self._parameters)

    def into_inner(self) -> nn.Module:
        """Ends this handle and returns the module, which stays sharded and trains on as one of `fully_shard`'s.

        Call `full_state_dict` before it for the whole weights.
        """
        self.reshard()
        module = self.module
        for hook in self._hooks:
            hook.remove()
        self._inner = None
        return module

    def sync_gradients(self) -> None:
        """Checks that backward has reduced the gradients since the last call, and fills missing ones with zeros.

        A parameter of a unit that ran on no rank gets zeros. Without this call it has no gradient, and optimizers skip
        it. Raises `Misuse` if there was no forward and backward.
        """
        self._check_held()
        if not self._was_reduced:
            raise Misuse("no gradients to synchronise: run the module and loss.backward() before sync_gradients()")
        self._was_reduced = False
        for parameter in self._parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def prefetch_forward_params(self) -> None:
        """Begins to gather all parameters for the next forward.

        Takes the memory of the whole model until then. Call it after `optimizer.step()`: a step invalidates it. Raises
        `Misuse` unless the strategy is FULL_SHARD, or when the last prefetch was not used yet.
        """
        self._check_held()
        if self.strategy != Strategy.FULL_SHARD:
            raise Misuse(f"prefetch_forward_params() is for Strategy.FULL_SHARD, not {self.strategy}")
        if self.has_pending_prefetch:
            raise Misuse("prefetch_forward_params() was called twice without a forward between")
        self._gather()

    @property
    def has_pending_prefetch(self) -> bool:
        """True if parameters were prefetched for the next forward."""
        return self.strategy == Strategy.FULL_SHARD and bool(self._prefetches) and not self._is_stale

    def broadcast_updated_params(self) -> None:
        """Gathers the updated parameters after `optimizer.step()` under SHARD_GRAD_OP, so that the next forward need
        not.

        Does nothing under other strategies. Optional: training is correct without it.
        """
        self._check_held()
        if self.strategy == Strategy.SHARD_GRAD_OP:
            self._gather()
            for prefetch in self._prefetches:
                prefetch.wait()

    def update_shards(self, flat: torch.Tensor) -> None:
        """Sets this rank's shards from one flat tensor: its rows of each of `parameters()`, concatenated.

        Every rank calls it. Raises `Misuse`, and changes nothing, if the size is not that of the shards.
        """
        self._check_held()
        shards = [one.to_local() if isinstance(one, DTensor) else one for one in self._parameters]
        num_values = sum(shard.numel() for shard in shards)
        if flat.shape != (num_values,):
            raise Misuse(
                f"update_shards() got a tensor of shape {tuple(flat.shape)}; "
                f"the shards of rank {self.rank} have {num_values} values, in shape ({num_values},)"
            )
        self.reshard()
        with torch.no_grad():
            for shard, values in zip(shards, torch.split(flat, [shard.numel() for shard in shards]), strict=True):
                shard.copy_(values.view(shard.shape))

    def full_state_dict(self) -> dict[str, Any]:
        """The module's state with whole, plain tensors in host memory, on every rank; copies."""
        self.reshard()
        state = {}
        for name, value in self.module.state_dict().items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            state[name] = whole.detach().to("cpu", copy=True) if isinstance(whole, torch.Tensor) else whole
        return state

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the module's state from whole tensors, the same on every rank; each rank keeps its shards.

        Raises `Misuse`, and changes nothing, if names or shapes are not the module's.
        """
        self.reshard()
        targets = self.module.state_dict()
        for name in sorted(targets.keys() ^ state.keys()):
            raise Misuse(f"the state {'lacks' if name in targets else 'has an unknown'} {name!r}")
        sharded = dict(state)
        for name, target in targets.items():
            if isinstance(target, torch.Tensor) and target.shape != state[name].shape:
                there, here = tuple(state[name].shape), tuple(target.shape)
                raise Misuse(f"{name!r} has shape {there} in the state and {here} in the module")
            if isinstance(target, DTensor):
                whole = state[name].to(target.device)
                sharded[name] = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
        self.module.load_state_dict(sharded)

    def _check_held(self) -> None:
        if self._inner is None:
            raise Misuse("into_inner() has ended this handle: use the module that it returned")

    def _gather(self) -> None:
        self.reshard()
        gathered = (part.unshard(async_op=True) for part in self._parts)
        self._prefetches = [cast(UnshardHandle, handle) for handle in gathered]
        self._watch_steps()

    def reshard(self) -> None:
        """Frees gathered parameters: the module has its shards until the next forward gathers them again."""
        self._check_held()
        for prefetch in self._prefetches:
            prefetch.wait()
        for part in self._parts:
            part.reshard()
        self._forget()

    def _forget(self) -> None:
        self._prefetches = []
        self._is_stale = False
        if self._step_watch is not None:
            self._step_watch.remove()
            self._step_watch = None

    def _watch_steps(self, *_: Any) -> None:
        """Marks gathered parameters stale at optimizer steps, which change the shards. Version counters cannot tell: a
        fused optimizer does not raise them.
        """
        weak = weakref.ref(self)  # the hook is global, and must not keep a model alive

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (handle := weak()) is not None:
                own = {id(parameter) for parameter in handle._parameters}
                handle._is_stale |= any(id(p) in own for group in optimizer.param_groups for p in group["params"])

        if self._step_watch is None:
            self._step_watch = register_optimizer_step_post_hook(stepped)

    def _await_backward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Has scalars' gradients, which `fully_shard` does not reduce, averaged at the end of backward."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, _: torch.Tensor) -> None:
        if not self._is_averaging_due:
            self._is_averaging_due = True
            engine: Any = torch.autograd.Variable._execution_engine  # as fully_shard ends its own backward
            engine.queue_callback(self._average_scalars)

    @torch.no_grad()
    def _average_scalars(self) -> None:
        """Averages the scalars' gradients over the ranks in one all-reduce, in float32 or wider."""
        self._is_averaging_due = False
        wide = torch.float32
        for parameter in self._scalars:
            wide = torch.promote_types(wide, parameter.dtype)
        own = [torch.zeros_like(one) if one.grad is None else one.grad for one in self._scalars]
        means = torch.stack([gradient.to(wide) for gradient in own])
        dist.all_reduce(means, group=self.process_group)
        means /= self.world_size
        for parameter, mean in zip(self._scalars, means, strict=True):
            parameter.grad = mean.to(parameter.dtype)

    def _before_forward(self, *_: Any) -> None:
        # A backward pass that has raised leaves it True, and the next one would not average the scalars.
        self._is_averaging_due = False
        if self._is_stale:
            self.reshard()
        self._forget()

    def _reduced(self, _: torch.Tensor) -> None:
        """Notes that backward has reduced a parameter's gradient."""
        self._was_reduced = True


def _copy_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Broadcasts rank 0's values, through contiguous tensors on the group's device."""
    for tensor in tensors:
        values = tensor.detach().to(device).contiguous()
        if values.numel():
            dist.broadcast(values.view(-1).view(torch.uint8), group=group, group_src=0)  # bytes: gloo has few dtypes
        tensor.data = values
