"""Runs the core with synthetic ranks in virtual time: as many as you like, as unequal, and always the same."""

from elche_coordinator.simulator.simulation import RankModel, Simulation

__all__ = ["RankModel", "Simulation"]
