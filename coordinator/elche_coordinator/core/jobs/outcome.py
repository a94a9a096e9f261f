"""The training's part of a job's result."""

from dataclasses import replace

from elche_coordinator.core.jobs.final_model import FinalModel
from elche_coordinator.core.messages.ids import Epoch
from elche_coordinator.core.messages.reports import JobResult
from elche_coordinator.core.records.ranks import RankRecords
from elche_coordinator.core.results.tally import rank_result
from elche_coordinator.core.results.training import Training


def with_training(result: JobResult, training: Training, model: FinalModel, ranks: RankRecords) -> JobResult:
    """The result with epochs, samples, rounds, speeds and the model."""
    rate, bound, fraction = training.throughput()
    ledger, evaluations = training.ledger, training.evaluations
    started, committed = training.started, training.committed
    return replace(
        result,
        model=model.path,
        model_agent_id=model.agent_id,
        model_folder=model.folder,
        model_is=model.model_is,
        best_problem=model.best_problem,
        epochs=ledger.epoch,
        metrics=evaluations.metrics,
        metrics_epoch=evaluations.metrics_epoch,
        best_epoch=evaluations.best_epoch,
        best_metrics=evaluations.best_metrics,
        samples_per_s=rate,
        bound_samples_per_s=bound,
        bound_fraction=fraction,
        dataset_size=ledger.extent.dataset_size,
        committed_samples=tuple(ledger.committed_samples(Epoch(epoch)) for epoch in range(ledger.num_begun)),
        dropped_samples=(ledger.dropped_size,) * ledger.num_begun,
        rounds=training.version,
        ranks=tuple(map(rank_result, ranks.values())),
        discarded_samples=training.discarded_samples,
        checkpoints=training.checkpoints.shown(evaluations.best_version),
        ended_early=training.ended_early,
        duration_s=committed.at_s - started.at_s if started and committed else 0.0,
    )
