"""Callbacks for trainers of others, each in a module that imports its framework: `lightning`, `transformers`."""
