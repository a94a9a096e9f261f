"""Engines that start agents: machines reached by ssh, Slurm, Ray. Each is a module with a `Launcher`."""

from elche_client.launchers.fleet import AgentFleet, AgentState, BadFleet, FleetAgent, Launcher
from elche_client.launchers.names import ENGINES, launcher_of

__all__ = ["ENGINES", "AgentFleet", "AgentState", "BadFleet", "FleetAgent", "Launcher", "launcher_of"]
