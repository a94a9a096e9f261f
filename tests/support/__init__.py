"""What tests share; `tests/README.md` shows how a test of each kind is written.

- `watched`, `stories`, `rounds`: simulations of the core, and moments of theirs
- `real_processes`, `fakes`, `noting`, `two_ranks`: coordinators, agents, ranks and commands as processes
- `worlds`, `loops`, `sharded`: ranks of one process group, and small models to train on them
- `solo`, `simulated_cuda`, `device_ranks`: a rank's parts, a device that sees whether every read comes after its write,
  and a rank's parts on that
- `late_streams`, `nccl`, `gpus`: work that ends late on that device, a strict stand-in for NCCL, and whole processes
  that believe they have GPUs
- `scripted`, `views`: what a client is told, and what is exported and drawn
- `prometheus`, `docker_engine`: what the system's tests run against
- `effort`: how much work a call is, counted
"""
