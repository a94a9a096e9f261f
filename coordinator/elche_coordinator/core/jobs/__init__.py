"""Trainings: allocation of slots, membership of ranks, and ranks that die or leave."""
