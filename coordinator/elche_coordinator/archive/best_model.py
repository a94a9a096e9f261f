"""The best weights of a job, from a host that has them: of the final model, or before that of the best checkpoint."""

from collections.abc import AsyncGenerator
from functools import partial

from elche.artifacts import BEST
from elche.errors import InvalidJob
from elche_coordinator.archive.artifacts import Artifacts
from elche_coordinator.archive.catalogue import JobCatalogue
from elche_coordinator.core.describe import JobView
from elche_coordinator.core.messages.ids import AgentId
from elche_coordinator.streams.agents import Agents
from elche_coordinator.streams.transfers import Rest


def best_weights(
    catalogue: JobCatalogue, agents: Agents, artifacts: Artifacts, view: JobView, rest: Rest
) -> AsyncGenerator[bytes]:
    """The chunks of the file, or of the rest of it. Raises `InvalidJob` when there is no best checkpoint or no
    connected host has it.
    """
    result = catalogue.result(view.job_id)
    if result is not None and result.model_is and result.best_epoch is not None and not result.best_problem:
        holders = agents.holders(view.job_id, AgentId(result.model_agent_id), result.model_folder)
        if holders or artifacts.has(view.job_id, BEST):
            ask = partial(agents.ask_for_model, view.job_id, result, rest, best=True)
            return artifacts.from_host([ask], view.job_id, BEST, "", rest=rest)
    best = next((one for one in view.checkpoints if one.is_best), None)
    if best is None:
        raise InvalidJob(f"job {view.job_id} has no best checkpoint: that needs `monitor`, and an epoch's evaluation")
    if "://" in best.path:
        files = "model.safetensors (ema.safetensors of a job with ema)"
        raise InvalidJob(f"the best checkpoint of job {view.job_id} is {best.path}: read its {files} there")
    asks = [partial(agents.ask_for_checkpoint, view.job_id, one, best.path, rest) for one in agents.hosts_of(view)]
    absent = f"no host of job {view.job_id} is here any more; its best checkpoint is {best.path} there"
    return artifacts.from_host(asks, view.job_id, artifacts.weights_of(view.job_id, best.path), absent, rest=rest)
