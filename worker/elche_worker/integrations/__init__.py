"""Callbacks for other trainers, each in a module that imports its framework: `lightning`, `transformers`."""
