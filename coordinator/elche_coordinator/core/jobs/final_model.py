"""The model that a job leaves: the last one, and the best one beside it or in its place."""

from elche_coordinator.core.messages.commands import SendKeepBest
from elche_coordinator.core.messages.events import BestKept, FinalStateSaved
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord
from elche_coordinator.core.results.training import Training


class FinalModel:
    """Where the model is, and which one it is."""

    def __init__(self, job_id: JobId, outbox: Outbox) -> None:
        self.path = ""
        self.agent_id = AgentId("")
        """The host that has it."""
        self.folder = ""
        """Identifies the work folder of that host."""
        self.model_is = ""
        """True if it is the best one or the last, once that is known."""
        self.best_problem = ""
        """Why the best model is not beside it."""
        self._job_id = job_id
        self._outbox = outbox
        self._saver: RankRecord | None = None
        """The rank that has written the last model."""
        self._awaits_best = False
        """True if that rank is to say that the best model is kept."""

    def on_saved(self, record: RankRecord, event: FinalStateSaved) -> None:
        """The last model is on disk."""
        self.path, self._saver = event.path, record
        self.agent_id, self.folder = record.agent_id, record.folder

    def awaits_best_of(self, record: RankRecord) -> bool:
        """True if the rank still has to confirm that the best model is stored."""
        return self._awaits_best and record is self._saver

    def on_best_kept(self, event: BestKept, training: Training) -> None:
        """The best model is beside the last one or in its place, or why it cannot be."""
        self._awaits_best, self.best_problem, self.model_is = False, event.error, "last"
        if training.settings.restore == "best" and not event.error:
            self.model_is = f"best of epoch {training.evaluations.best_epoch}"

    def lose(self, lost: RankRecord) -> None:
        """The rank is gone: what it was to put beside the model is not there."""
        if self._awaits_best and lost is self._saver:
            self._awaits_best, self.model_is = False, "last"
            self.best_problem = f"rank {lost.rank}, which was to put it there, is gone"

    def complete(self, training: Training) -> bool:
        """True if all is written; if not, orders what is missing."""
        if self._saver is None or not training.is_idle:
            return False
        if not self.model_is and not self._awaits_best:
            self._keep_best(training, self._saver)
        return not self._awaits_best

    def _keep_best(self, training: Training, saver: RankRecord) -> None:
        """Has the best model put beside the last one, or in its place. Every version that was judged has a checkpoint,
        unless it is the last one, or could not be written.
        """
        best = training.evaluations.best_version
        checkpoint = training.checkpoints.of(best)
        if best is None:
            self.model_is = "last"
        elif best != training.version and checkpoint is None:
            self.model_is, self.best_problem = "last", "the best model has no checkpoint, which could not be written"
        else:
            path = checkpoint.path if checkpoint is not None and best != training.version else ""
            restores = training.settings.restore == "best"
            self._outbox.add(SendKeepBest(**saver.address(self._job_id), checkpoint=path, restores=restores))
            self._awaits_best = True
