"""The best weights of a job, from a host that has them: of the final model, or before that of the best checkpoint."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from elche.artifacts import BEST
from elche.errors import ElcheError, InvalidJob
from elche_coordinator.agents import Agents
from elche_coordinator.artifacts import Artifacts
from elche_coordinator.catalogue import JobCatalogue
from elche_coordinator.core.describe import JobView
from elche_coordinator.transfers import Transfers


async def best_weights(
    catalogue: JobCatalogue, agents: Agents, transfers: Transfers, artifacts: Artifacts, view: JobView
) -> AsyncGenerator[bytes]:
    """Yields chunks of the file. Raises `InvalidJob` when there is no best checkpoint or no connected host has it."""
    result = catalogue.result(view.job_id)
    if result is not None and result.model_is and result.best_epoch is not None and not result.best_problem:
        transfer = transfers.begin()
        is_asked = agents.ask_for_model(view.job_id, result, transfer, best=True)
        if not is_asked:
            transfers.drop(transfer)
        if is_asked or artifacts.has(view.job_id, BEST):
            async with aclosing(artifacts.from_host(transfer if is_asked else "", view.job_id, BEST, "")) as chunks:
                async for data in chunks:
                    yield data
            return
    best = next((one for one in view.checkpoints if one.is_best), None)
    if best is None:
        raise InvalidJob(f"job {view.job_id} has no best checkpoint: that needs `monitor`, and an epoch's evaluation")
    if "://" in best.path:
        files = "model.safetensors (ema.safetensors of a job with ema)"
        raise InvalidJob(f"the best checkpoint of job {view.job_id} is {best.path}: read its {files} there")
    problem: ElcheError = InvalidJob(
        f"no host of job {view.job_id} is here any more; its best checkpoint is {best.path} there"
    )
    for agent_id in agents.hosts_of(view):
        transfer = transfers.begin()
        agents.ask_for_checkpoint(view.job_id, agent_id, best.path, transfer)
        has_begun = False
        try:
            async for data in transfers.chunks(transfer):
                has_begun = True
                yield data
            return
        except ElcheError as error:
            if has_begun:
                raise
            problem = error
    if (stored := artifacts.weights_of(view.job_id, best.path)) is None:
        raise problem
    async with aclosing(artifacts.chunks(view.job_id, stored)) as chunks:
        async for data in chunks:
            yield data
