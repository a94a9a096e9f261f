"""One attempt of a training: its ranks start, agree, and train until there is a model or the job goes back."""

from collections.abc import Iterable
from typing import assert_never

from elche_coordinator.core.jobs.deaths import Deaths
from elche_coordinator.core.jobs.final_model import FinalModel
from elche_coordinator.core.jobs.links import LinkWatch
from elche_coordinator.core.jobs.membership import Membership
from elche_coordinator.core.jobs.notices import nothing_to_train
from elche_coordinator.core.jobs.startup import Startup
from elche_coordinator.core.messages.events import (
    BatchesTrained,
    GroupFormed,
    HeaderReported,
    RankReady,
    ReserveRecalled,
    ResultReceived,
    RoundEntered,
    RoundFailed,
)
from elche_coordinator.core.messages.ids import GenerationId
from elche_coordinator.core.messages.reports import Checkpoint, MembershipReport, UserEvent
from elche_coordinator.core.messages.spec import JobSpec, first_disagreement
from elche_coordinator.core.records.failure import Failure
from elche_coordinator.core.records.machine import Hold
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, RankRecords, num_hosts, present
from elche_coordinator.core.records.roster import Roster
from elche_coordinator.core.results.counts import Counts
from elche_coordinator.core.results.training import Training
from elche_coordinator.core.rounds.backends import Choice, choose_backend
from elche_coordinator.core.rounds.generation import Generation

RoundEvent = BatchesTrained | ReserveRecalled | RoundEntered | ResultReceived | HeaderReported | RoundFailed


class Run:
    """One attempt. Training and membership are None until all ranks are ready and agree."""

    def __init__(
        self,
        spec: JobSpec,
        roster: Roster,
        outbox: Outbox,
        *,
        past_attempts: int,
        kept: Iterable[Checkpoint] = (),
        first_checkpoint_s: float | None = None,
    ) -> None:
        """`kept`: the checkpoints of the attempt before; `first_checkpoint_s`: see `Checkpoints.first_after_s`."""
        self._spec = spec
        self._roster = roster
        self._outbox = outbox
        self.startup = Startup(spec, past_attempts, list(kept))
        self._first_checkpoint_s = first_checkpoint_s
        self._first_choice: Choice | None = None
        """The backend of the first ranks, once they have agreed."""
        self.training: Training | None = None
        """The state of training that lasts over generations; set once, when all first ranks are ready and agree."""
        self.membership: Membership | None = None
        """The generations; set together with `training`."""
        self.model = FinalModel(outbox)
        self.links = LinkWatch(outbox)

    @property
    def generation(self) -> Generation | None:
        """The standing generation; None before the first group stands."""
        return self.membership.standing if self.membership is not None else None

    @property
    def backend(self) -> Choice | None:
        """The present backend, or the first one; None before the ranks have agreed."""
        return self.generation.backend if self.generation is not None else self._first_choice

    @property
    def generation_id(self) -> GenerationId:
        """The newest generation, which may be forming; 0 before the first."""
        return self.membership.newest if self.membership is not None else GenerationId(0)

    def is_held(self, hold: Hold) -> bool:
        """True while its ranks are stopped for this reason."""
        return self.training is not None and hold in self.training.holds

    # On the way to training

    def admit(self, record: RankRecord, event: RankReady) -> Failure | None:
        """Handles a rank that has read the user's file. While others train, it is admitted if its settings agree."""
        record.settings, record.device, record.build = event.settings, event.device, event.build
        record.links_address = event.links_address
        record.batch_size = event.batch_size or event.settings.batch_size
        if self.membership is None or self.training is None:
            self.startup.add(record.rank, event)
            return None
        other = next(rank for rank in self.training.members if rank != record.rank)
        difference = first_disagreement({other: self.training.settings, record.rank: event.settings})
        if difference is not None:
            error = f"rank {record.rank} was restarted with other settings than the job trains with: {difference}"
            return Failure(error, invalid=True)
        self.membership.change_members()
        return None

    def other_data(self, record: RankRecord, event: RankReady) -> str | None:
        """Describes a sample in which the rank's data differs from that of the training ranks; None if the data is the
        same, or nobody trains.
        """
        return self.startup.other_data(self._roster.ranks, record.rank, event) if self.training is not None else None

    def begin(self, record: RankRecord) -> Failure | None:
        """Called when all ranks are ready, `record` last: if they agree, they form their first group."""
        ranks = present(self._roster.ranks)
        if failure := self.startup.failure(ranks) or self._begin_training(record, ranks):
            return failure
        assert self.training is not None
        self.membership = Membership(
            self._roster, self._outbox, self.training, self._choose_backend, self.startup.attempt
        )
        self.membership.form(ranks)
        return None

    def _begin_training(self, record: RankRecord, ranks: RankRecords) -> Failure | None:
        """Creates the training, with the settings on which all agree. Returns a failure if that is impossible."""
        settings = record.settings
        assert settings is not None
        try:
            builds = {rank: other.build for rank, other in ranks.items() if other.build is not None}
            self._first_choice = choose_backend(settings.backend, builds, num_hosts(ranks))
            training = Training(
                settings,
                self._roster.ranks,
                self._outbox,
                attempt=self.startup.attempt,
                resumed=self.startup.resumed,
                replay=self._spec.replay,
                verifies=self._spec.verify_rounds,
            )
        except ValueError as error:
            return Failure(str(error), invalid=True)
        training.checkpoints.adopt(self.startup.kept, training.version)
        training.checkpoints.first_after_s = self._first_checkpoint_s
        training.samples_read = self.startup.samples_read
        self.training = training
        if other := self.startup.other_data_than_before:
            self._outbox.publish(UserEvent(rank=record.rank, text=other))
        if older := self.startup.older_than_known:
            self._outbox.publish(
                MembershipReport(rank=record.rank, text=f"begins, but {older}", num_ranks=len(ranks), is_back=True)
            )
        if training.is_complete and not self.startup.has_gone_back:
            return Failure(nothing_to_train(self._spec.resume), invalid=True)
        return None  # of a job that has gone back to the end of its training, the first round makes the final model

    def _choose_backend(self, members: RankRecords) -> Choice:
        """Chooses the backend for these ranks."""
        assert self.training is not None
        assert self._first_choice is not None
        if self.training.settings.backend != "auto":
            return self._first_choice
        builds = {rank: record.build for rank, record in members.items() if record.build is not None}
        return choose_backend("auto", builds, num_hosts(members))

    # Groups and rounds

    def on_formed(self, record: RankRecord, event: GroupFormed, now_s: float) -> Failure | None:
        """Records that a rank's process group stands. When all do, rounds begin in it."""
        assert self.membership is not None
        self.membership.on_formed(record, event)
        return self.membership.take_over(now_s)

    def on_rounds(self, record: RankRecord, event: RoundEvent, now_s: float) -> Failure | None:
        """Handles reports of batches and rounds."""
        generation, training, membership = self.generation, self.training, self.membership
        assert generation is not None
        assert training is not None
        assert membership is not None
        version = training.version
        failure: Failure | None = None
        match event:
            case BatchesTrained():
                generation.on_batches(record, event, now_s)
            case ReserveRecalled():
                generation.on_recalled(record, event, now_s)
                failure = membership.take_over(now_s)  # it may have waited for this round
            case RoundEntered():
                generation.on_entered(record, event, now_s)
            case HeaderReported():
                generation.on_header(event)
            case ResultReceived():
                failure = generation.on_result(record, event, now_s)
            case RoundFailed():
                failure = generation.on_round_failed(record, event, now_s) or membership.take_over(now_s)
            case _:
                assert_never(event)
        if failure is not None:
            return failure
        if generation.is_torn and generation.abandoned is None:
            return membership.abandon(now_s)
        if training.version > version and not training.is_over:
            return membership.on_committed(now_s)
        return None

    # Ranks that hang, or die

    def check_links(self, now_s: float) -> bool:
        """Has ranks test their links if they are in an averaging that does not end, or cannot build a first group.
        Returns True while a first group is being built, whose ranks report nothing meanwhile.
        """
        if (training := self.training) is not None and (group := self.membership) is not None:
            first = group.first_of_several_hosts or (group.forming if group.standing is None else None)
            self.links.check(group.standing, first, training.longest_averaging_ms, now_s)
            return group.standing is None
        return False

    def blame(self, record: RankRecord, deaths: Deaths, now_s: float) -> str | None:
        """Records a rank's death; returns the failure's text if several have died on the same samples."""
        training, generation = self.training, self.generation
        if training is None or generation is None:
            return None
        trained = generation.should_work(record)
        return deaths.blame(record, training.ledger, training.settings, now_s, trained=trained)

    def can_lose(self, record: RankRecord) -> bool:
        """True if another rank has the model, and the job's `on_rank_loss` allows it to go on."""
        training = self.training
        if training is None or self.membership is None:
            return False
        if training.settings.on_rank_loss == "fail" or training.replay is not None:
            return False
        others = (one for one in training.members.values() if one is not record and one.is_present)
        return any(map(training.has_model, others))  # lazily: nearly always the first of them has it

    # What is left of it

    @property
    def newest(self) -> Checkpoint | None:
        """The newest checkpoint since its ranks have agreed, or of those that it then took over."""
        return self.training.checkpoints.kept[-1] if self.training and self.training.checkpoints.kept else None

    @property
    def kept(self) -> list[Checkpoint]:
        """Its checkpoints, and those of earlier attempts, the newest last."""
        return self.startup.kept if self.training is None else self.training.checkpoints.kept

    @property
    def has_saved(self) -> bool:
        """True once this attempt has completed a checkpoint."""
        return self.training is not None and self.training.checkpoints.saved_at_s is not None

    def first_checkpoint_of_next(self, now_s: float) -> float | None:
        """`first_checkpoint_s` of the attempt that follows if this one ends now by a death."""
        return self._first_checkpoint_s if self.training is None else self.training.checkpoints.first_of_next(now_s)

    @property
    def counts(self) -> Counts:
        """Its counts so far; all zero before its ranks agree."""
        training = self.training
        if training is None:
            return Counts()
        return Counts(
            samples=training.ledger.total_committed() - training.restored_samples,
            made_samples=training.num_made,
            rounds=training.version - training.restored_version,
            sent_bytes=training.sent_bytes,
            given_up_rounds=training.num_given_up,
            regroups=max(0, self.generation_id - 1),
            discarded_samples=training.discarded_samples,
            checkpoint_failures=training.checkpoints.num_failures,
        )
