"""The engines by name."""

from collections.abc import Sequence
from pathlib import Path

from elche_client.launchers.fleet import BadFleet, Launcher

ENGINES = ("ssh", "slurm", "ray")


def launcher_of(engine: str, target: str, options: Sequence[str]) -> Launcher:
    """The engine of a name. `target` is the file with the hosts for ssh, the cluster's address for Ray, and empty for
    others. `options` are for the engine's own command, ssh or sbatch.
    Raises `BadFleet`.
    """
    if engine == "ssh":
        from elche_client.launchers.ssh import Ssh

        if not target:
            raise BadFleet("name the file with the hosts: elche up --on ssh hosts.txt")
        return Ssh(Path(target), options)
    if engine == "slurm":
        from elche_client.launchers.slurm import Slurm

        if target:
            raise BadFleet(
                f"Slurm's own configuration says where it is, not {target!r}; sbatch's options come after --"
            )
        return Slurm(options)
    if engine == "ray":
        from elche_client.launchers.ray import Ray

        if options:
            raise BadFleet(f"Ray takes no options of its own, such as {options[0]!r}")
        return Ray(target)
    raise BadFleet(f"there is no engine {engine!r}; there are {', '.join(ENGINES)}")
