"""A spawner that is stopped goes on."""

import os
import signal
import subprocess

from elche_worker.agent.processes import SpawnerProcess, _state_of


def test_a_stopped_spawner_goes_on() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        spawner = SpawnerProcess.__new__(SpawnerProcess)
        spawner._process = child
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert _state_of(child.pid) == "T"
        spawner.go_on()
        try:
            assert _state_of(child.pid) != "T"
        finally:
            child.kill()
