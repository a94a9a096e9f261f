"""The final model of a job: the last one, and the best one beside it or instead of it."""

from elche_coordinator.core.messages.commands import SendKeepBest
from elche_coordinator.core.messages.events import BestKept, FinalStateSaved
from elche_coordinator.core.messages.ids import AgentId
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord
from elche_coordinator.core.results.training import Training


class FinalModel:
    """The place of the final model, and which model it is."""

    def __init__(self, outbox: Outbox) -> None:
        self.path = ""
        """The file on the host of the rank that wrote it; empty: not written yet."""
        self.agent_id = AgentId("")
        """The agent that has it."""
        self.folder = ""
        """Id of that agent's work folder."""
        self.model_is = ""
        """"last", or "best of epoch N", once that is known."""
        self.best_problem = ""
        """The reason why the best model is not stored."""
        self._outbox = outbox
        self._saver: RankRecord | None = None
        """The rank that has written the last model."""
        self._awaits_best = False
        """True if that rank still has to confirm that the best model is stored."""

    def on_saved(self, record: RankRecord, event: FinalStateSaved) -> None:
        """Records that the last model is on disk."""
        self.path, self._saver = event.path, record
        self.agent_id, self.folder = record.agent_id, record.folder

    def awaits_best_of(self, record: RankRecord) -> bool:
        """True if the rank still has to confirm that the best model is stored."""
        return self._awaits_best and record is self._saver

    def on_best_kept(self, event: BestKept, training: Training) -> None:
        """Records that the best model is stored, or the reason why it is not."""
        self._awaits_best, self.best_problem, self.model_is = False, event.error, "last"
        if training.settings.restore == "best" and not event.error:
            self.model_is = f"best of epoch {training.evaluations.best_epoch}"

    def lose(self, lost: RankRecord, training: Training) -> None:
        """Records that the rank is lost. If it had still to store the best model, the rank that is asked for the last
        one instead stores that too; without such a rank the last model is the final one.
        """
        is_wanted = self._awaits_best or (not self.model_is and training.evaluations.best_version is not None)
        if lost is not self._saver or not is_wanted:
            return
        if training.saver != lost.rank:
            self._saver, self._awaits_best = None, False
        elif self._awaits_best:
            self._awaits_best, self.model_is = False, "last"
            self.best_problem = f"rank {lost.rank}, which was to store it, is gone"

    def complete(self, training: Training) -> bool:
        """Returns True if all is written; else orders what is missing."""
        if self._saver is None or not training.is_idle:
            return False
        if not self.model_is and not self._awaits_best:
            self._keep_best(training, self._saver)
        return not self._awaits_best

    def _keep_best(self, training: Training, saver: RankRecord) -> None:
        """Orders the best model to be stored beside the last one, or instead of it, from its checkpoint. Every judged
        version has a checkpoint, except the last one, and one that could not be written.
        """
        best = training.evaluations.best_version
        checkpoint = training.checkpoints.of(best)
        if best is None:
            self.model_is = "last"
        elif best != training.version and checkpoint is None:
            self.model_is, self.best_problem = "last", "the best model has no checkpoint, which could not be written"
        else:
            # The last version is in the final state itself, whether or not it became a checkpoint, too.
            path = checkpoint.path if checkpoint is not None and best != training.version else ""
            restores = training.settings.restore == "best"
            self._outbox.add(SendKeepBest(**saver.address, checkpoint=path, restores=restores))
            self._awaits_best = True
