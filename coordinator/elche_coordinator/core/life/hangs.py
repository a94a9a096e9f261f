"""Which ranks are left out: those that others wait for, and that do not answer, or answer and make no batch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elche_coordinator.core.messages.ids import Rank

ASK_AFTER_S = 0.5
"""Silence after which a rank is asked whether it is there, while others wait."""
EXPLAINED_S = 0.5
"""A history explains a silence as long as this, plus the larger of 20 batches and 4 of the longest gaps (`stalls`)."""
ANSWER_S = 1.5
"""Time for an answer; more for a rank that has taken longer before. On a crowded machine half a second is not rare."""
ANSWERS = 4.0
"""Times the longest time that the rank has taken to answer."""
FORGOTTEN = 0.5
"""Factor on that longest time with each answer that comes sooner: a process that was stopped once is not slow."""
ANSWERING_S = 1.0
"""A rank that answers gets this much longer for its batch: it may wait for its data."""
UNKNOWN_S = 10.0
"""Time for an answer of a rank that is busy with what has no history: its first batch, an evaluation."""
REGROUP_S = 0.5
"""What a change of membership costs the others."""
UNAWAITED = 4.0
"""Times the explained silence after which a rank is left out though nobody idles: under `async` the others train on,
without averaging.
"""
CHECK_S = 0.5
MAX_CHECK_S = 5.0


@dataclass(frozen=True, slots=True)
class Duty:
    """What a rank has to do at one moment, and what it would cost to go on without it."""

    is_busy: bool = False
    """True if it has something to do; if not, it waits for others."""
    stall_s: float | None = None
    """Silence after which people are told, by its own history or that of others; None while no batch is due."""
    hang_s: float | None = None
    """Silence that its own history explains; None while no batch is due, or before there is a history."""
    cost_s: float = 0.0
    """Its work that is in no committed round."""


class HangWatch:
    """Decides by each rank's own history, and only while others wait.

    A rank that says nothing is asked whether it is there. It is left out when it does not answer in time, or when it
    answers and then makes no batch for longer than its history explains; and not before the others have waited, all
    together, for longer than its loss costs, or it is silent for four times as long as is explained. So neither fast
    nor slow batches need a timeout that somebody chooses.
    """

    def __init__(self) -> None:
        self._heard_s: dict[Rank, float] = {}
        """When each was heard last, answers aside."""
        self._asked_s: dict[Rank, float | None] = {}
        """When each was asked that has not answered; None: the question has not left."""
        self._answered_s: dict[Rank, float] = {}
        """The first answer of each since it was heard."""
        self._longest_s: dict[Rank, float] = {}
        """The longest time that each has taken to answer; older ones count less."""

    def on_heard(self, rank: Rank, now_s: float) -> None:
        """The rank has said something other than an answer."""
        self._heard_s[rank] = now_s
        self._answered_s.pop(rank, None)

    def on_asked(self, rank: Rank, now_s: float) -> None:
        """The question has left; before that it may have waited for the disk."""
        if rank in self._asked_s:
            self._asked_s[rank] = now_s

    def on_answered(self, rank: Rank, now_s: float) -> None:
        """The rank is there, and has all that was sent before the question."""
        asked_s = self._asked_s.pop(rank, None)
        if asked_s is not None:
            self._longest_s[rank] = max(FORGOTTEN * self._longest_s.get(rank, 0.0), now_s - asked_s)
        self._answered_s.setdefault(rank, now_s)

    def forget(self, ranks: Iterable[Rank]) -> None:
        """Their silence begins anew, and questions to them count no more."""
        for rank in ranks:
            for times in (self._heard_s, self._asked_s, self._answered_s):
                times.pop(rank, None)

    def excuse(self, late_s: float) -> None:
        """The coordinator itself has slept for so long, and has not yet read what was said meanwhile."""
        for times in (self._heard_s, self._answered_s):
            times.update({rank: at_s + late_s for rank, at_s in times.items()})
        self._asked_s.update({rank: at_s and at_s + late_s for rank, at_s in self._asked_s.items()})

    def check(self, duties: Mapping[Rank, Duty], now_s: float) -> tuple[list[Rank], dict[Rank, str], float | None]:
        """Whom to ask, whom to leave out and why, and in how many seconds to check again; None: nobody waits."""
        silent_s = {rank: now_s - self._heard_s.setdefault(rank, now_s) for rank in duties}
        hung = {rank: why for rank, duty in duties.items() if (why := self._why(rank, duty, silent_s[rank], now_s))}
        waiting_s = [silent_s[rank] for rank, duty in duties.items() if not duty.is_busy and rank not in hung]
        waited_s = sum(waiting_s)
        to_ask, left_out = [], {}
        for rank, duty in duties.items():
            is_long = duty.hang_s is not None and silent_s[rank] >= duty.hang_s
            if (waiting_s or is_long) and self._may_be_asked(rank, now_s):
                to_ask.append(rank)
                self._asked_s[rank] = None
            is_very_long = is_long and silent_s[rank] >= UNAWAITED * (duty.hang_s or 0.0)
            if rank in hung and (is_very_long or waited_s > duty.cost_s + REGROUP_S):
                left_out[rank] = hung[rank]
        sooner_s = min(MAX_CHECK_S, max(CHECK_S, max(waiting_s) / 10)) if waiting_s else None
        return to_ask, left_out, sooner_s

    def _may_be_asked(self, rank: Rank, now_s: float) -> bool:
        last_s = max(self._heard_s[rank], self._answered_s.get(rank, 0.0))
        return rank not in self._asked_s and now_s - last_s >= ASK_AFTER_S

    def _why(self, rank: Rank, duty: Duty, silent_s: float, now_s: float) -> str:
        """What is wrong with the rank; empty when nothing is, or as long as that is not known."""
        asked_s = self._asked_s.get(rank)
        if asked_s is not None and silent_s >= (duty.hang_s or 0.0):
            least_s = UNKNOWN_S if duty.is_busy and duty.hang_s is None else ANSWER_S
            mute_s = now_s - max(asked_s, self._heard_s[rank])
            if mute_s >= max(least_s, ANSWERS * self._longest_s.get(rank, 0.0)):
                return f"it has not answered for {mute_s:.1f} s"
        answered_s = self._answered_s.get(rank)
        if duty.hang_s is not None and answered_s is not None and now_s - answered_s >= duty.hang_s + ANSWERING_S:
            return f"it has made no batch for {silent_s:.1f} s"
        return ""
