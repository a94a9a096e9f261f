"""The user's file, for processes that it starts by spawn or forkserver: they import what they are to run from here."""

from elche_worker.user.loading import run_again

run_again(globals())
