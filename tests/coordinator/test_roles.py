"""What each role may call, and whose a job is."""

import pytest

from elche.errors import Forbidden
from elche.token import Role
from elche.v1 import access_pb2, agent_pb2, averaging_pb2, bundle_pb2, job_pb2, rank_pb2, store_pb2
from elche_coordinator.roles import ANYBODY, CHANGES, NEEDED, Caller

OF_RANKS = {"/elche.v1.RankService/Converse", "/elche.v1.BundleService/FetchBundle"}


def test_every_call_needs_a_role_or_is_of_ranks() -> None:
    """A new call that is in no list would be open to everybody."""
    files = (access_pb2, agent_pb2, averaging_pb2, bundle_pb2, job_pb2, rank_pb2, store_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    calls = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    others = {call for call in calls if call not in NEEDED and "/elche.v1.AveragingService/" not in call}
    assert {call for call in others if "/elche.v1.StoreService/" not in call} == {*OF_RANKS} | {
        call for call in calls if call.startswith("/elche.v1.RankService/") and not call.endswith("/Attach")
    }
    assert calls >= set(NEEDED)
    assert {call.rpartition("/")[2] for call in NEEDED} > CHANGES


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("needed", list(Role))
def test_roles_include_each_other(role: Role, needed: Role) -> None:
    order = [Role.VIEWER, Role.USER, Role.OPERATOR]
    allowed = role is needed or (role in order and needed in order and order.index(role) > order.index(needed))
    if allowed:
        Caller("x", role).require(needed, "it")
    else:
        with pytest.raises(Forbidden, match=f"it needs the role {needed}; x has the role {role}"):
            Caller("x", role).require(needed, "it")


def test_jobs_are_of_the_tokens_name() -> None:
    anna = Caller("anna", Role.USER)
    assert (anna.submitter("bob@host"), ANYBODY.submitter("bob@host")) == ("anna", "bob@host")
    anna.require_own("anna", "x")
    ANYBODY.require_own("anna", "x")
    Caller("ops", Role.OPERATOR).require_own("anna", "x")
    for whose in ("bob", "", "anna@host"):
        with pytest.raises(Forbidden, match="anna needs the role operator to change it"):
            anna.require_own(whose, "x")


OF_VIEWERS = {"ListJobs", "WatchJob", "ListHosts", "FetchTimeline", "StreamLogs"}
OF_OPERATORS = {"DrainHost", "MeasureLinks", "InjectFault", "MakeToken", "ListTokens", "RevokeToken"}
OF_AGENTS = {"Attend", "Deliver"}
READ_ONLY = OF_VIEWERS | {"FetchModel", "FetchJournal", "FindBundle", "ListTokens"}
"""Of clients. All others leave a line in the audit log."""


def test_who_may_only_read_can_change_nothing() -> None:
    """Written out, so that a call which is moved to another role is seen: a viewer could have uploaded folders."""

    def calls_of(role: Role) -> set[str]:
        return {call.rpartition("/")[2] for call, needed in NEEDED.items() if needed is role}

    assert (calls_of(Role.VIEWER), calls_of(Role.OPERATOR), calls_of(Role.AGENT)) == (
        OF_VIEWERS,
        OF_OPERATORS,
        OF_AGENTS,
    )
    everything = {call.rpartition("/")[2] for call in NEEDED}
    assert calls_of(Role.USER) == everything - OF_VIEWERS - OF_OPERATORS - OF_AGENTS
    assert everything - CHANGES == READ_ONLY | OF_AGENTS
