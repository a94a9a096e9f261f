"""Messages for the user on lost ranks and waiting jobs."""

from elche.errors import LEFT_ALONE
from elche_coordinator.core.messages.events import RankExited
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.ranks import RankRecord


def death_notice(record: RankRecord, event: RankExited) -> str:
    """Describes the end of a rank's process."""
    if event.not_started:
        return f"{_name(record)} cannot be started: {event.log_tail}"
    code = event.exit_code
    how = f"was killed by signal {-code}" if code < 0 else f"left with exit code {code}"
    how = "has lost the processes that it works with" if code == LEFT_ALONE else how
    out_of_memory = " (often: out of memory)" if code == -9 else ""
    path = event.log_path or record.log_path
    log = f"; its log is {path}" if path else ""
    who = _name(record)
    if record.more_slots and event.group_position < len(record.slot_devices):
        who = f"process {event.group_position} ({record.slot_devices[event.group_position]}) of {who}"
    return f"{who} {how}{out_of_memory} at batch {record.local_step}{log}"


def hang_notice(record: RankRecord, why: str) -> str:
    """The reason why others do not wait for the rank any more."""
    return f"{_name(record)} is left out: {why}, and others wait for it"


def _name(record: RankRecord) -> str:
    return f"rank {record.rank} on {record.host} ({record.device})"


def too_few_notice(num_ranks: int, least: int, num_loading: int = 0) -> str:
    """The reason why a job with too few ranks waits; `num_loading` more are starting."""
    num = least - num_ranks
    loading = f"; {num_loading} {'load' if num_loading > 1 else 'loads'} the file" if num_loading else ""
    more = f"{num} more rank{'s' if num > 1 else ''}"
    return f"waits for {more}: it has {num_ranks}, and trains with {least} or more{loading}"


def slots_notice(spec: JobSpec, num_free: int, num_slots: int, unfit: str, *, is_possible: bool) -> str:
    """The slots for which a queued job waits, and how many there are; `unfit`: which host gets no ranks, and why.
    `is_possible`: one host has enough for a loop.
    """
    num, size = spec.least_ranks, spec.group_size
    wanted = f"{num} free slot{'s' if num > 1 else ''}"
    if spec.is_loop and num > 1:
        wanted = f"{wanted} on one host"
    if size > 1:
        wanted = f"{num} group{'s' if num > 1 else ''} of {size} free slots on one host"
    that = f" with {', '.join(spec.conditions)}" if spec.conditions else ""
    there = f"{num_free} of {num_slots} slots{that} are free" if num_slots else f"no host offers any{that}"
    never = "" if num * size <= num_slots else "; start more workers"
    if not is_possible and num > 1 and num_slots:
        never = "; no host offers so many, and all ranks of a script with its own loop are on one: submit it with fewer"
    return f"waits for {wanted}: {there}{never}" + (f"; {unfit}" if unfit else "")


def checkpoint_notice(spec: JobSpec, why: str) -> str:
    """The reason why a job that goes back waits for a host; `why` says what keeps that host from giving a slot."""
    return f"waits for host {spec.resume_host}, which {why}: only that host's disk has its newest checkpoint"


def quota_notice(spec: JobSpec, num_held: int, quota: int) -> str:
    """The reason why a quota keeps a queued job from slots."""
    num, whose = spec.least_ranks * spec.group_size, spec.account or "jobs of nobody"
    never = "" if num <= quota else "; ask for fewer ranks"
    return f"waits for {num} of the {quota} slots that {whose} may have: {num_held} are taken{never}"


def nothing_to_train(resumed: str) -> str:
    """The reason why a job has nothing to train; `resumed`: the checkpoint from which it begins."""
    if resumed:
        return f"the checkpoint {resumed} is of a training that is complete; give more epochs to go on with it"
    return "drop_last leaves nothing to train: the data set is shorter than one batch"
