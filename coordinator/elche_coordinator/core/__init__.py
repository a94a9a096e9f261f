"""The core: decides which rank trains what, and when ranks average. This page is its manual.

**Theory of operation.** A job's ranks train on disjoint slices of an epoch's permutation and average their parameters
now and then. A *round* is one averaging. It is announced in advance, as the local step after which each rank joins, so
that slow and fast ranks arrive together and nobody waits. A round *commits* when every member has received its result;
the commit books in the *ledger* exactly the samples that the round's header says are in the result. Leases of the next
round are handed out in the same step, so that every rank has the samples that it will need.

A rank may be a *replica group*: several processes of one host that share one model. To the core it is one rank, with
one record, one pace and one weight, which takes as many slots; if one of its processes dies, all of it is gone.

A round may become a *checkpoint*: one of the ranks, its writer, writes the result with what it needs to go on, and gets
the training's state at that version with the outcome. A job that goes on from one begins with these books; all that was
not committed in them is free again.

When a rank *dies*, its generation is abandoned: each of the others says how its rounds have ended, the rounds are
resolved (the model that most have is kept), and those that are left form the next generation while they train on. The
rank is started again, and is taken in, between two rounds, by a generation that has formed meanwhile.

**Where to read.** `docs/glossary.md` has the words, `docs/protocol.md` the norm. All events go through `coordinator`.
The packages, each of which imports only those before it: `messages` (events in, commands out, reports), `records`
(ranks, rounds, slots, phases as tables), `life` (phase, outcome and silent ranks of any job), `work` (the ledger and
what is leased next), `pacing` (how many batches each rank makes, a module for each policy), `results` (what is
committed, learned and owed; checkpoints, evaluations), `rounds` (a generation of ranks, its rounds and its limits),
`jobs` (trainings: who gets slots, and which ranks train together), `loops` (loops of the user's own, which need none of
this). `invariants` has the rules as checks.

**Rules** (checked after every event in every test): every sample of an epoch is committed exactly once; a round has one
result, equal on every member; it commits when all members have received it; stale messages change nothing; targets lie
within leased work; a job that trains has an open round, so that it always goes on.

**Durability** is not the core's concern. The driver writes each event to the tape, and shows what it leads to only when
it is on disk. A coordinator that starts again repeats the events, so the core must be deterministic: it has no clock,
no I/O and no randomness of its own.

**One worked trace** (two ranks, the second 2.3 times slower, 3,000 samples in batches of 10):

    JobSubmitted                    -> StartRank 0, StartRank 1
    RankReady 0, 1                  -> SendFormGroup 0, 1
    GroupFormed 0, 1                -> SendSyncNow round 1 after step 0 (spreads the start state)
    RoundEntered, ResultReceived    -> SendOutcome version 1, leases, SendSyncNow round 2 after steps 10, 10
    BatchesTrained 0, 1             -> a lease, SendSyncNow round 2 after steps 20, 10 (rank 0 is faster)
    ResultReceived 0, 1             -> SendOutcome version 2, leases, SendSyncNow round 3 after 43, 20
    ...
    ResultReceived (the last)       -> SendOutcome (evaluate, save the final state)
    EvaluationDone, FinalStateSaved -> SendShutdown 0, 1
    RankExited 0, 1                 -> Publish result
"""
