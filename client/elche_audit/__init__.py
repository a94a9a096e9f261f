"""Proves or refutes, by the files that ranks write with `--audit true`, that every sample was trained once.

It imports nothing of coordinator, worker or client: it shares no code with what it checks.
"""

from elche_audit.proof import judge
from elche_audit.report import document, exit_code, lines
from elche_audit.verdict import Verdict

__all__ = ["Verdict", "document", "exit_code", "judge", "lines"]
