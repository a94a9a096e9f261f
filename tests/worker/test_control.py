"""What a rank keeps of the coordinator's messages: rounds to enter, its limit, and why it is to leave."""

from elche.v1 import rank_pb2
from elche_worker.session.control import Control, Rounds


def sync_now(first: int, after_step: int, *, count: int = 1, stop: bool = False) -> rank_pb2.SyncNow:
    return rank_pb2.SyncNow(round=first, after_step=after_step, count=count, every=1, stop_after=stop)


def test_a_target_is_revised_until_the_round_is_entered_and_not_after() -> None:
    rounds = Rounds()
    rounds.learn(sync_now(5, 20))
    rounds.learn(sync_now(5, 12))
    assert rounds.due(11, is_out_of_work=False) is None
    assert rounds.due(12, is_out_of_work=False) == 5
    rounds.enter(5, 0)
    rounds.learn(sync_now(5, 30))
    assert rounds.due(100, is_out_of_work=True) is None


def test_granted_rounds_come_one_per_batch_and_end_at_the_limit() -> None:
    rounds = Rounds()
    rounds.learn(sync_now(1, 1, count=3, stop=True))
    assert rounds.limit_step == 3
    for step in (1, 2, 3):
        assert rounds.due(step, is_out_of_work=False) == step
        rounds.enter(step, step)
    rounds.learn(sync_now(4, 4))
    assert rounds.limit_step == float("inf")


def test_a_rank_out_of_work_joins_at_once() -> None:
    rounds = Rounds()
    rounds.learn(sync_now(1, 10))
    assert rounds.due(3, is_out_of_work=True) == 1


def test_the_loop_sees_why_it_is_to_leave() -> None:
    control = Control()
    control.put(rank_pb2.ConverseResponse(shutdown=rank_pb2.Shutdown(reason="cancelled by request")))
    control.leave("the coordinator closed the session")
    assert control.leaving == "cancelled by request"
    assert control.has_news


def granted(first: int, after_step: int, *, every: int, count_away: int, generation: int = 1) -> rank_pb2.SyncNow:
    return rank_pb2.SyncNow(
        round=first, after_step=after_step, count=1, every=every, count_away=count_away, generation=generation
    )


def test_without_the_coordinator_the_granted_rounds_are_entered_at_equal_distances() -> None:
    rounds = Rounds()
    rounds.learn(granted(5, 20, every=7, count_away=2))
    assert rounds.go_on_alone() == 7
    assert list(rounds.targets) == [5], "an announced one comes first"
    for round_id, step in ((5, 20), (6, 27), (7, 34)):
        rounds.go_on_alone()
        assert rounds.due(step - 1, is_out_of_work=False) is None
        assert rounds.due(step, is_out_of_work=False) == round_id
        rounds.enter(round_id, step)
    assert rounds.go_on_alone() == 0, "no more were granted"
    assert not rounds.targets


def test_what_the_coordinator_says_stands_over_what_was_granted() -> None:
    rounds = Rounds()
    rounds.learn(granted(5, 20, every=7, count_away=2))
    rounds.enter(5, 20)
    rounds.go_on_alone()
    rounds.learn(granted(6, 24, every=4, count_away=1))
    assert rounds.due(24, is_out_of_work=False) == 6
    rounds.abandon(1)
    assert rounds.go_on_alone() == 0, "nothing of that generation is granted any more"


def test_where_no_batch_may_follow_the_last_round_the_limit_follows_those_that_a_rank_announces_to_itself() -> None:
    rounds = Rounds()
    rounds.learn(rank_pb2.SyncNow(round=1, after_step=1, count=4, stop_after=True, every=1, count_away=3, generation=1))
    assert rounds.limit_step == 4
    for round_id in range(1, 5):
        rounds.enter(round_id, round_id)
    rounds.go_on_alone()
    assert (rounds.due(5, is_out_of_work=False), rounds.limit_step) == (5, 5)
    rounds.give_grants_back()
    assert rounds.limit_step == 4


def test_a_granted_round_that_is_not_entered_is_given_back_and_an_announced_one_is_not() -> None:
    rounds = Rounds()
    rounds.learn(granted(5, 20, every=7, count_away=2))
    rounds.give_grants_back()
    assert rounds.due(20, is_out_of_work=False) == 5
    rounds.learn(granted(5, 20, every=7, count_away=2))
    rounds.enter(5, 20)
    rounds.go_on_alone()
    assert rounds.due(27, is_out_of_work=False) == 6
    rounds.give_grants_back()
    assert rounds.due(27, is_out_of_work=False) is None, "it was granted, and is not now"
    rounds.learn(granted(6, 24, every=4, count_away=1))
    assert rounds.due(24, is_out_of_work=False) == 6, "the coordinator has announced it"
