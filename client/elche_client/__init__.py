"""Submits training jobs to an elche coordinator and watches them."""
