"""Trainings: who gets slots, which ranks train together, and what becomes of a rank that dies or leaves."""
