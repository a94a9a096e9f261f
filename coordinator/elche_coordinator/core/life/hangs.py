"""Detects hung ranks: others wait for them, and they answer no ping, or answer and train no batch."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from elche.sums import added
from elche_coordinator.core.messages.ids import Rank

ASK_AFTER_S = 0.5
"""Seconds of silence after which a rank is pinged, while others wait."""
LATE_S = 0.2
"""A rank for which the open round has waited so long is asked too, although the others may train on meanwhile."""
EXPLAINED_S = 0.5
"""Allowed silence: these seconds, plus the larger of 20 batch times and 4 times the longest gap (`stalls`)."""
ANSWER_S = 1.5
"""Seconds for an answer; more for a rank that has taken longer before. Half a second is common on a busy machine."""
ANSWERS = 4.0
"""An answer may take this many times the rank's longest time to answer."""
DECAY = 0.5
"""Each quicker answer multiplies that longest time by this factor: a process that was stopped once must not count as
slow forever.
"""
ANSWERING_S = 1.0
"""Further seconds for the batch of a rank that answers, since it may wait for data."""
UNKNOWN_S = 10.0
"""Seconds for an answer of a rank whose work has no history: its first batch, an evaluation."""
REGROUP_S = 0.5
"""Assumed cost of a change of membership, in seconds of training."""
UNAWAITED = 4.0
"""A rank that is silent for this many times the allowed silence is left out even if no other idles: under `async` the
others train on, without averaging.
"""
CHECK_S = 0.5
"""Seconds until the next check while ranks wait, at least."""
MAX_CHECK_S = 5.0
"""Seconds until the next check while ranks wait, at most; in between a tenth of the longest wait."""


@dataclass(frozen=True, slots=True)
class Duty:
    """A rank's present duty, and the cost of going on without it."""

    is_busy: bool = False
    """True if it has work; False if it waits for others."""
    stall_s: float | None = None
    """Seconds of silence after which it is reported as stalled, by its own history or others'; None: no batch
    is due.
    """
    hang_s: float | None = None
    """Seconds of silence allowed by its own history; None while no batch is due, or without a history."""
    cost_s: float = 0.0
    """Seconds of its work that is in no committed round; if it is the last one with the model, in no checkpoint."""
    is_last: bool = False
    """True if no other rank has the model, so that the job goes back to a checkpoint without it."""
    due_s: float | None = None
    """Time at which it should have reported the batch of the open round's target; None if no round waits for it."""

    def is_late(self, now_s: float) -> bool:
        """True if the open round has waited `LATE_S` for it: the others, if they train, do so because of it."""
        return self.due_s is not None and now_s - self.due_s >= LATE_S


class HangWatch:
    """Finds hung ranks by their own histories, so that no timeout has to be chosen for fast or slow batches.

    A silent rank is pinged while others wait. It hangs if it does not answer in time, or answers and then trains no
    batch for longer than its allowed silence, while all others answer. It is left out once the others together have
    waited, or trained on because it is late, for longer than its loss costs, or once it is silent for `UNAWAITED` times
    its allowed silence. The last one with the model is left out only while others wait, after what its loss costs, and
    `UNKNOWN_S` at least.
    """

    def __init__(self) -> None:
        self._message_s: dict[Rank, float] = {}
        """Time of each rank's last message other than an answer."""
        self._asked_s: dict[Rank, float | None] = {}
        """Time at which each rank that has not answered was pinged; None: the ping was not sent yet."""
        self._answered_s: dict[Rank, float] = {}
        """Time of each rank's first answer since its last other message."""
        self._longest_s: dict[Rank, float] = {}
        """Each rank's longest time to answer, in seconds; older ones are discounted."""

    def on_message(self, rank: Rank, now_s: float) -> None:
        """Records a message other than an answer."""
        self._message_s[rank] = now_s
        self._answered_s.pop(rank, None)

    def on_asked(self, rank: Rank, now_s: float) -> None:
        """Records that the ping was sent, which may have waited for the disk."""
        if rank in self._asked_s:
            self._asked_s[rank] = now_s

    def on_answered(self, rank: Rank, now_s: float) -> None:
        """Records an answer, which shows that the rank has received every message sent before the ping."""
        asked_s = self._asked_s.pop(rank, None)
        if asked_s is not None:
            self._longest_s[rank] = max(DECAY * self._longest_s.get(rank, 0.0), now_s - asked_s)
        # Of several answers the first counts. If the newest did, a rank that answers each ping and trains nothing would
        # never count as hung.
        self._answered_s.setdefault(rank, now_s)

    def is_asked(self, rank: Rank) -> bool:
        """True if the rank has been pinged, or is to be, and has not answered."""
        return rank in self._asked_s

    def forget(self, ranks: Iterable[Rank]) -> None:
        """Restarts the silence of these ranks, and drops pings to them."""
        for rank in ranks:
            for times in (self._message_s, self._asked_s, self._answered_s):
                times.pop(rank, None)

    def excuse(self, late_s: float) -> None:
        """Shortens all silences by `late_s` seconds in which the coordinator itself did not run and could not read
        messages.
        """
        for times in (self._message_s, self._answered_s):
            times.update({rank: at_s + late_s for rank, at_s in times.items()})
        # None stays: that question has not left yet, so its time has not begun.
        self._asked_s.update({rank: at_s and at_s + late_s for rank, at_s in self._asked_s.items()})

    def check(self, duties: Mapping[Rank, Duty], now_s: float) -> tuple[list[Rank], dict[Rank, str], float | None]:
        """Returns the ranks to ping, the ranks to leave out with reasons, and the seconds until the next check (None:
        no rank waits for another).
        """
        # a rank that was never heard is silent from its first check on
        silent_s = {rank: now_s - self._message_s.setdefault(rank, now_s) for rank in duties}
        mute = {rank: why for rank, duty in duties.items() if (why := self._mute(rank, duty, silent_s[rank], now_s))}
        idle = {rank: why for rank, duty in duties.items() if (why := self._idle(rank, duty, silent_s[rank], now_s))}
        # Who answers and trains no batch may wait for one that does not answer, by a collective on its device.
        owe_answer = any(self._owes_answer(rank, duty, silent_s[rank], now_s) for rank, duty in duties.items())
        hung = mute or ({} if owe_answer else idle)
        waits = [rank for rank, duty in duties.items() if rank not in hung and (not duty.is_busy or rank in idle)]
        waiting_s = [silent_s[rank] for rank in waits] + _trained_on_s(duties, {*hung, *waits}, now_s)
        waited_s = added(waiting_s)  # idle time of all ranks together, to compare with the work that would be lost
        to_ask, left_out = [], {}
        for rank, duty in duties.items():
            is_long = duty.hang_s is not None and silent_s[rank] >= duty.hang_s
            if (waiting_s or is_long) and self._may_be_asked(rank, now_s):
                to_ask.append(rank)
                self._asked_s[rank] = None  # the time for an answer starts at `on_asked`, when the ping has gone out
            is_very_long = is_long and silent_s[rank] >= UNAWAITED * (duty.hang_s or 0.0)
            is_in_vain = is_very_long or waited_s > duty.cost_s + REGROUP_S
            if duty.is_last:  # who waits for it may be started again meanwhile: the time since the question counts
                asked_s = self._asked_s.get(rank) if rank in mute else self._answered_s.get(rank)
                is_in_vain = bool(waiting_s) and now_s - (asked_s or now_s) > max(UNKNOWN_S, duty.cost_s)
            if rank in hung and is_in_vain:
                left_out[rank] = hung[rank]
        sooner_s = min(MAX_CHECK_S, max(CHECK_S, max(waiting_s) / 10)) if waiting_s else None
        return to_ask, left_out, sooner_s

    def _may_be_asked(self, rank: Rank, now_s: float) -> bool:
        """True if no ping to the rank is open, and its last message or answer is older than `ASK_AFTER_S`."""
        last_s = max(self._message_s[rank], self._answered_s.get(rank, 0.0))
        return rank not in self._asked_s and now_s - last_s >= ASK_AFTER_S

    def _owes_answer(self, rank: Rank, duty: Duty, silent_s: float, now_s: float) -> bool:
        """True if the rank is silent, and has answered no ping since its last message, or not the latest one in time.
        A rank whose work has no history, such as its first batch, owes none: it may be busy for long.
        """
        is_new = duty.is_busy and duty.hang_s is None
        asked_s = self._asked_s.get(rank)
        is_late = asked_s is not None and now_s - asked_s >= ASK_AFTER_S
        return not is_new and silent_s >= ASK_AFTER_S and (is_late or rank not in self._answered_s)

    def _mute(self, rank: Rank, duty: Duty, silent_s: float, now_s: float) -> str:
        """The reason to leave out a rank that does not answer; empty if there is none yet."""
        asked_s = self._asked_s.get(rank)
        if asked_s is None or silent_s < (duty.hang_s or 0.0):
            return ""
        least_s = UNKNOWN_S if duty.is_busy and duty.hang_s is None else ANSWER_S
        # Another message since the question shows, too, that it was there.
        mute_s = now_s - max(asked_s, self._message_s[rank])
        if mute_s >= max(least_s, ANSWERS * self._longest_s.get(rank, 0.0)):
            return f"it has not answered for {mute_s:.1f} s"
        return ""

    def _idle(self, rank: Rank, duty: Duty, silent_s: float, now_s: float) -> str:
        """The reason to leave out a rank that answers and trains no batch; empty if there is none yet."""
        answered_s = self._answered_s.get(rank)
        if duty.hang_s is not None and answered_s is not None and now_s - answered_s >= duty.hang_s + ANSWERING_S:
            return f"it has made no batch for {silent_s:.1f} s"
        return ""


def _trained_on_s(duties: Mapping[Rank, Duty], others: Collection[Rank], now_s: float) -> list[float]:
    """Seconds for which each rank beside these `others` has trained on because one is late. They count as waiting: that
    ranks have work while one hangs must not put off its end.
    """
    late_s = max((now_s - duty.due_s for duty in duties.values() if duty.due_s is not None), default=0.0)
    trains_on = [rank for rank, duty in duties.items() if duty.hang_s is not None and not duty.is_late(now_s)]
    return [late_s for rank in trains_on if late_s >= LATE_S and rank not in others]
