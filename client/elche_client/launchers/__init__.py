"""Engines that start agents: machines reached by ssh, Slurm, Ray. Each is a module with a `Launcher`."""

from elche_client.launchers.fleet import BadFleet, Fleet, Launcher, Member, State
from elche_client.launchers.names import ENGINES, launcher_of

__all__ = ["ENGINES", "BadFleet", "Fleet", "Launcher", "Member", "State", "launcher_of"]
