"""A strict stand-in for PyTorch's `ProcessGroupNCCL`, whose values go over gloo: what NCCL does to code without a GPU.

It is as strict as the real one is: each rule names the function of PyTorch that it follows. `ProcessGroupNCCL.cpp` was
read in a copy of 2025 in which `Watchdog` and `HeartbeatMonitor` are classes of their own, as the headers declare them
that PyTorch 2.13 is installed with; `ProcessGroupNCCL.hpp`, `NCCLUtils.hpp` and `Utils.hpp` are 2.13's. `NCCLUtils.cpp`
and NCCL's `init.cc` were read in older copies, for their words. That nothing bounds `ncclCommInitRank`, and what
`ncclCommAbort` leaves in memory, is what is known of NCCL, and has not been read. "PG" stands for `ProcessGroupNCCL`.

- `group`: the process group and its collectives
- `operations`: what tensors it takes, and how gloo computes them
- `work`: what a collective returns
- `communicator`: a communicator, its queue of kernels, and its abort
- `bootstrap`: how ranks meet
- `watchdog`: the two threads that end processes
- `settings`, `words`: the environment, and what is said
- `process_groups`: the group within those of `init_process_group`
- `installed`: puts it in PyTorch's place, in a test or in a whole process (`support.gpus`)
- `forked`: processes for tests of what ends processes

A group works on tensors of the simulated device (`support.simulated_cuda`). What follows on a stream after a collective
runs when that has ended (`support.late_streams`), so that the host goes on meanwhile.

Not here: `send` and `recv`, coalesced collectives, `split` and `merge`, of non-blocking communicators
(`TORCH_NCCL_USE_COMM_NONBLOCKING`) all but their making, more than 128 ranks, the flight recorder's files, and what
NCCL itself notices of a peer that has gone (it does over sockets, also while ranks meet; between GPUs of one host it
does not): here a lost peer is silence.
"""

from support.nccl.group import ProcessGroupNCCL
from support.nccl.installed import nccl_in_use

__all__ = ["ProcessGroupNCCL", "nccl_in_use"]
