"""Repeats a recorded run in one process, bit for bit on CPUs: rank after rank between rounds, up to any round.

What a replay needs, and where a run with `audit` has it. In the file of each rank process (`elche_audit.rank_file`):

- the job: the digest of its file, of which a copy lies beside, settings and arguments; threads, device, PyTorch;
- its batches with epoch and positions, in order. The seed of what data sets draw follows from them;
- after which batch each round was entered, and after which its result was applied, or found lost;
- its generations, and its place in them: who took part in a round is who has entered it;
- from which checkpoint it began, if from any, and which results it has evaluated.

All else follows from these by the code that ran: initial parameters and random numbers from the seed and the rank;
weights, gains, who is left out and the outer step from the ranks' values; what a rank that joins receives, from the
round's source. Times are recorded nowhere: nothing in the arithmetic depends on them.

Each recorded process becomes a `Replica`, the class that trained, with its random numbers, its own copy of the job's
file and its place in the generation's group. Rounds run through the same collectives (gloo) over the loopback interface
of this process, so that sums have the same order. A rank that died is not asked any more; a round that a rank has lost
fails there again.

Equality is checked, not assumed: each round's version, samples and left-out ranks, and the digest of the parameters
wherever the run's ranks have told one, which is each round with `--verify`.
"""

from elche_worker.replaying.replayer import Replayed, replay

__all__ = ["Replayed", "replay"]
