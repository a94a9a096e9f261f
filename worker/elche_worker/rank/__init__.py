"""A rank: one training process on one device, or the processes of a replica group that share one model.

An agent starts it as a fork of the spawner (`spawner`), which has imported torch already. `main` reads the job's file,
builds model, data and collectives, tells the coordinator that the rank is ready, and runs the loop (`loop`) until the
coordinator says to leave. The loop does one thing at a time, in this order of preference:

    1. take in commands of the coordinator (leases, rounds, generations, limits)
    2. apply the result of a round that has ended
    3. evaluate, save or show the result of a committed round
    4. enter a round that is due
    5. train a batch
    6. wait until one of these is possible

Two objects carry the work. The loop decides when and talks with the coordinator; the `Replica` does it: it trains,
averages, evaluates and saves. In a replica group every process has a `Replica`, and only the leader has a loop. The
leader sends each act (`acts`) to the others before it carries it out itself, and they carry out the same (`follower`).
What differs between a rank of one process and of several is behind `ReplicaGroup` (`replica_group`).

Ranks average within a generation, which is one process group (`generations`). The group of the next one is built while
training and rounds go on, and is used from the first round that names it. A generation is given up when a member is
gone: the rank ends the collective that it waits in, reports how that round has ended, and trains on to its limits.

A round: `enter_round` gathers the parameters into the flat buffers of the `Layout` and starts the collective on a
thread; the loop trains on if rounds overlap. `apply_result` brings the average into the model, as a replacement, or as
a correction (result - snapshot) when there are newer batches. The flat buffers hold the result until the next round is
entered: evaluations and checkpoints of the round read it there.

Threads of a rank, by name, and what each of them may touch:

    MainThread     the loop. Owns model, optimizers, learning rates, meters and the timer. May write to the flat
                   buffers unless a collective runs or a result is being captured.
    session        reads the coordinator's commands and puts them into `Control`. Told to leave, it also starts a timer
                   that ends the process after 3 s, should MainThread be busy.
    loader         fetches batches, moves them to the device on the copy stream and puts them where `take` finds them.
                   With num_workers it asks worker processes for them, else it calls the user's data set itself.
    averaging      runs a round's collective and the outer optimizer. Until it has ended it owns the flat buffers, the
                   compression errors and the outer optimizer's state; it reads tensors that are broadcast.
    generation N   builds the process group of a generation. Nothing waits for it once that generation is given up.
    old generation drops a group that is not used any more, whose destructor may wait for a rank that is gone.
    abort          ends a collective that waits for others, when its generation is given up or the rank leaves.
    capture        copies a result out of the flat buffers. The next round is entered when it has finished.
    checkpoints    writes captured data to disk and reports the outcome. Touches no tensor that training uses.
    links          accepts connections of other ranks, which try whether they reach this one, and closes them.
    probe          tries whether others can be reached, when the coordinator asks, and tells it.
    leaving        asks the coordinator to let this rank go, after SIGTERM; if none answers, the loop stops by itself.
    loggers        calls the job's experiment trackers with finished epochs.
    gauges         samples memory and NVML once a second; the loop takes the newest sample.
    timeline       sends recorded spans twice a second; only where the job records a timeline.
    members        on the leader of a replica group: waits for a failure that another process reports.
    agent          reads standard input, whose end is the agent's, and then ends the process.

On a CUDA device there are three streams besides the threads (`device.streams`): MainThread computes on one, `averaging`
and `capture` communicate and copy on another, `loader` copies batches on the third. Events order them.

Any thread may send to the coordinator (`Session.send` fills a queue that gRPC empties), add a span to the timeline and
wake the loop (`Control.notify`). The job's functions are called on MainThread, except the training data set and
`collate_fn`, which `loader` calls, and the job's loggers. The process ends by `os._exit`, whatever its threads are busy
with: a collective that waits for a peer would otherwise hold it up.
"""
