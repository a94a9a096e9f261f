"""The agent: one process per host, which offers the host's devices, starts rank processes and reports their exits."""
