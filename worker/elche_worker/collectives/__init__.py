"""Collectives of ranks, over gloo, NCCL or the coordinator, and averaging on top of them.

A round of a job: `averaging` runs it, `header` opens it, `reduction` computes the result (with `compression` and
`gains`), over one of the implementations of `operations`: `process_group` (gloo, and `nccl` for values on GPUs) or
`relay` (through the coordinator). A loop of the user's own averages `gradients` over its `world`.
"""
