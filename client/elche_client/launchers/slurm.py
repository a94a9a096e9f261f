"""Agents as jobs of Slurm: an array of single-node jobs, each of which offers its devices once it has its node.

Before its time limit Slurm signals the job's shell (`--signal`), which has the agent leave and then requeues the job;
the same when the job is preempted, or the machine will be interrupted. Slurm itself requeues a job whose node is lost.
"""

import getpass
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from elche_client.launchers.fleet import AgentFleet, AgentState, BadFleet, FleetAgent

NOTICE_S = 120
"""Seconds before its time limit at which a job is signalled. Slurm may be up to 60 s early."""
LIMIT_S = 60.0
LINE = "%i|%T|%N|%r"

SCRIPT = """\
#!/bin/bash
{options}
{environment}

# One agent on each node of the job. When it has left, and nobody has cancelled the job, that goes back to the
# queue: before its time ends (the signal), in the time that preemption gives it, or on a notice of the machine.
srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 {command} &
agents=$!
leave() {{ scancel --signal=TERM "$SLURM_JOB_ID.0"; }} # srun itself would take SIGTERM for an order to kill
trap leave USR1 TERM
wait "$agents"
code=$?
while kill -0 "$agents" 2>/dev/null; do wait "$agents"; code=$?; done # a signal ends a wait
if [ "$code" = 0 ] && scontrol show job "$SLURM_JOB_ID" | grep -q ' JobState=RUNNING'; then
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
fi
exit "$code"
"""

STATES = {
    "PENDING": AgentState.WAITING,
    "REQUEUED": AgentState.WAITING,
    "REQUEUE_HOLD": AgentState.WAITING,
    "SUSPENDED": AgentState.WAITING,
    "CONFIGURING": AgentState.WAITING,
    "RUNNING": AgentState.RUNNING,
    "COMPLETING": AgentState.LEAVING,
    "SIGNALING": AgentState.LEAVING,
}


class Slurm:
    """The cluster of the Slurm commands on this machine."""

    def __init__(self, options: Sequence[str] = ()) -> None:
        """`options` are for sbatch, and precede elche's own."""
        self._options = tuple(options)

    def up(self, fleet: AgentFleet) -> None:
        if fleet.num_agents is None:
            raise BadFleet("say how many: elche up --on slurm --agents 4")
        there = [one for one in self.members(fleet.name) if one.state in (AgentState.WAITING, AgentState.RUNNING)]
        if lacking := max(0, fleet.num_agents - len(there)):
            _run(["sbatch", *self._options], script_of(fleet, lacking))
        # Those that wait come first: their end costs nothing.
        too_many = sorted(there, key=lambda one: one.state is AgentState.RUNNING)[: len(there) - fleet.num_agents]
        if not lacking and too_many:
            _run(["scancel", *(one.id for one in too_many)])

    def members(self, name: str) -> list[FleetAgent]:
        listed = _run(
            # Without --array, squeue shows all elements of an array that wait as one line.
            ["squeue", "--noheader", "--array", f"--user={getpass.getuser()}", f"--name={name}", f"--format={LINE}"]
        )
        return [
            FleetAgent(id, STATES.get(state, AgentState.GONE), host, "" if why == "None" else why)
            for id, state, host, why in (line.split("|", 3) for line in listed.splitlines())
        ]

    def down(self, name: str) -> None:
        _run(["scancel", f"--user={getpass.getuser()}", f"--name={name}"])


def script_of(fleet: AgentFleet, num_agents: int) -> str:
    """The batch script."""
    options = [
        f"--job-name={fleet.name}",
        f"--array=1-{num_agents}",
        "--nodes=1",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={fleet.gpus_per_agent}"] if fleet.gpus_per_agent else []),
        "--requeue",
        "--no-kill",
        f"--signal=B:USR1@{NOTICE_S}",
        "--open-mode=append",
        f"--output={fleet.name}-%A_%a.log",
    ]
    variables = {name: str(Path(path).resolve()) for name, path in fleet.environment.items()}
    return SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in options),
        environment="\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        command=fleet.command,
    )


def _run(command: list[str], script: str = "") -> str:
    """Runs a command of Slurm and returns its output. Raises `BadFleet` with its error."""
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except FileNotFoundError:
        raise BadFleet(f"{command[0]} is not found: run this where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise BadFleet(f"{command[0]} does not answer within {LIMIT_S:.0f} s") from None
    if done.returncode:
        raise BadFleet(f"{command[0]}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'failed'}")
    return done.stdout
