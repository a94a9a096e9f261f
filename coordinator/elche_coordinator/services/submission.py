"""Checks of a submitted job."""

import json
from collections.abc import Mapping

from elche.artifacts import check_known, check_place
from elche.bundle import check_name, check_path
from elche.errors import InvalidJob
from elche.requirements import check_requirements
from elche.script import (
    MAX_PRIORITY,
    MAX_SOURCE_BYTES,
    check_arguments,
    check_environment,
    check_module,
    check_project,
    check_secrets,
)
from elche.selector import check_conditions
from elche.settings import SETTINGS
from elche.v1 import job_pb2

MAX_ECHO = 100
"""Longest text of a client, in characters, that an error repeats."""


def check_spec(spec: job_pb2.JobSpec) -> None:
    """Raises `InvalidJob` for a spec that no agent could run."""
    if not spec.source.strip():
        raise InvalidJob("the job's file is empty")
    if len(spec.source.encode()) > MAX_SOURCE_BYTES:
        raise InvalidJob(f"the job's file is larger than {MAX_SOURCE_BYTES >> 20} MiB")
    for name in ("name", "file_name", "output_dir", "resume"):
        if "\0" in getattr(spec, name):
            raise InvalidJob(f"{name} contains a zero byte")
    if not -MAX_PRIORITY <= spec.priority <= MAX_PRIORITY:
        raise InvalidJob(f"the priority is from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {spec.priority}")
    check_project(spec.project)
    check_place(spec.artifacts)
    check_known(spec.artifacts)
    check_conditions(spec.conditions)
    check_requirements(spec.requirements)
    if spec.bundle:
        check_name(spec.bundle)
        check_path(spec.file_name)
    _check_slow(spec)
    check_settings(spec.settings)
    if spec.is_loop and (spec.settings or spec.min_ranks or spec.verify_rounds or spec.replay or spec.module):
        raise InvalidJob("a script with its own loop takes no settings, least number of ranks, check, replay or module")
    check_arguments(spec.arguments)
    check_environment(spec.environment)
    check_secrets(spec.secrets, spec.environment)
    if spec.module:
        check_module(spec.module)
        if not spec.bundle:
            raise InvalidJob("a job of a module needs the folder that the module is in")


def _check_slow(spec: job_pb2.JobSpec) -> None:
    for rank, factor in spec.slow_factors.items():
        if not 1.0 <= factor < 1e6:
            raise InvalidJob(f"rank {rank} cannot be slowed {factor} times: the factor must be at least 1")
        if spec.num_ranks and rank >= spec.num_ranks:
            raise InvalidJob(f"there is no rank {rank} to slow: the job has {spec.num_ranks} ranks, from 0")


def check_settings(settings: Mapping[str, str]) -> None:
    """Raises `InvalidJob` for an unknown setting or a value, as JSON, outside its range."""
    for name, text in settings.items():
        if name not in SETTINGS:
            raise InvalidJob(f"there is no setting {_shortened(name)!r}; known are {', '.join(SETTINGS)}")
        try:
            SETTINGS[name].check(json.loads(text))
        except (ValueError, RecursionError):
            raise InvalidJob(f"the setting {name} is {_shortened(text)!r}, which is not a JSON value") from None


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_ECHO else f"{text[:MAX_ECHO]}..."
