"""The agent: one process per host that offers the host's devices, starts rank processes and reports their exits."""
