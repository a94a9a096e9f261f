"""Agents on machines that ssh reaches. Each has a folder there, ~/.elche/NAME/HOST, with its token, certificates and
log, and a shell that restarts it after an error.

The shell holds a lock in that folder as long as it runs, by which a running agent is found.
"""

import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elche.artifacts import reason_of
from elche.tls import AUTHORITY, CERTIFICATE, KEY
from elche_client.launchers.fleet import AgentFleet, AgentState, BadFleet, FleetAgent

OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=10", "-T")
"""Options that keep ssh from prompting: a host that does not accept a key is an error."""
LIMIT_S = 120.0
MAX_AT_ONCE = 32
MAX_FILE_BYTES = 1 << 20

ENTER = """\
set -eu
umask 077
folder=$HOME/.elche/{name}/$(hostname)
mkdir -p "$folder"
cd "$folder"
"""
# `9>&-` closes the lock in the agent: one that outlives its shell would hold it, and count as an agent that is
# restarted. `setsid` does not fork here, since a background command leads no group: $! is the shell's own id.
UP = """\
exec 9>lock
if [ -e leaves ]; then flock -w 60 9 || {{ echo 'the agent before it does not end' >&2; exit 1; }}
elif ! flock -n 9; then echo runs; exit 0; fi
{files}
cat > run <<'ELCHE_END'
{environment}
agent=
stopped=
stop() {{ stopped=yes; kill -TERM "$agent" 2>/dev/null || :; }}
trap stop TERM
while [ -z "$stopped" ]; do
  {command} 9>&- & agent=$!
  [ -z "$stopped" ] || kill -TERM "$agent"
  code=0
  wait "$agent" || code=$?
  while kill -0 "$agent" 2>/dev/null; do code=0; wait "$agent" || code=$?; done
  if [ "$code" = 0 ] || [ "$stopped" ]; then exit; fi
  echo "elche up: the agent has ended with $code and starts again in 5 s"
  sleep 5
done
ELCHE_END
rm -f leaves
setsid sh run >> log 2>&1 < /dev/null & echo $! > pid
echo started
"""
TELL = """\
if flock -n lock true; then echo 'elche: gone'; tail -n 1 log 2>/dev/null || :
elif [ -e leaves ]; then echo 'elche: leaving'
else echo 'elche: running'; fi
"""
DOWN = """\
if ! flock -n lock true; then touch leaves; kill -TERM "$(cat pid)"; fi
echo told
"""


@dataclass(frozen=True, slots=True)
class SshHost:
    """A line of the file."""

    place: str
    """The host's name for ssh."""
    options: str = ""
    """Options of elche-worker for this host only."""


class Ssh:
    """The machines of a file: one per line, the name for ssh followed by options of elche-worker."""

    def __init__(self, path: Path, options: Sequence[str] = ()) -> None:
        """`options` are for ssh. Raises `BadFleet` for a file without hosts."""
        self._hosts = hosts_of(path)
        self._options = tuple(options)

    def up(self, fleet: AgentFleet) -> None:
        if fleet.num_agents is not None or fleet.gpus_per_agent:
            raise BadFleet(
                "the file says which hosts there are; options such as --devices cuda:0 go after a host in it"
            )
        files = _files(fleet)
        names = {name: f'"$PWD/{_basename(name)}"' for name in fleet.environment}

        def script(host: SshHost) -> str:
            return (ENTER + UP).format(
                name=fleet.name,
                files="\n".join(files),
                environment="\n".join(f"export {name}={path}" for name, path in names.items()),
                command=f"{fleet.command} {host.options}".rstrip(),
            )

        self._checked(script)

    def members(self, name: str) -> list[FleetAgent]:
        members = []
        for host, (code, output) in self._on_all(lambda _: (ENTER + TELL).format(name=name)):
            _, _, told = output.partition("elche: ")  # skips output of the login shell
            state, _, last = told.partition("\n")
            if code or not told:
                members.append(FleetAgent(host.place, AgentState.GONE, host.place, f"not reached: {output.strip()}"))
            else:
                members.append(FleetAgent(host.place, AgentState(state), host.place, last.strip()))
        return members

    def down(self, name: str) -> None:
        self._checked(lambda _: (ENTER + DOWN).format(name=name))

    def _checked(self, script: Callable[[SshHost], str]) -> None:
        """Runs a script on each host. Raises `BadFleet`, which names the hosts on which it failed, after all have
        ended.
        """
        failed = [f"{host.place}: {output.strip()}" for host, (code, output) in self._on_all(script) if code]
        if failed:
            raise BadFleet("; ".join(failed))

    def _on_all(self, script: Callable[[SshHost], str]) -> list[tuple[SshHost, tuple[int, str]]]:
        with ThreadPoolExecutor(min(MAX_AT_ONCE, len(self._hosts))) as pool:
            return list(zip(self._hosts, pool.map(partial(_run, self._options, script), self._hosts), strict=True))


def hosts_of(path: Path) -> list[SshHost]:
    """The hosts of a file. Raises `BadFleet`."""
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise BadFleet(f"the hosts cannot be read from {path}: {reason_of(error)}") from None
    found = [SshHost(*line.split(maxsplit=1)) for line in lines if line]
    for host in found:
        if host.place.startswith("-"):
            raise BadFleet(f"{path}: a line begins with a host as ssh knows it, not {host.place!r}")
    if not found:
        raise BadFleet(f"{path} names no hosts; it has one on each line, such as anna@gpu1")
    if len({host.place for host in found}) < len(found):
        raise BadFleet(f"{path} names a host twice; one agent offers all devices of its host")
    return found


def _files(fleet: AgentFleet) -> list[str]:
    """Shell commands that write token and certificates on the host. They are sent over stdin, not in a command line."""
    lines = []
    if fleet.token_file:
        lines.append(_written("token", Path(fleet.token_file)))
    if fleet.tls:
        lines.append("mkdir -p tls")
        there = [Path(fleet.tls, name) for name in (AUTHORITY, CERTIFICATE, KEY)]
        lines += [_written(f"tls/{path.name}", path) for path in there if path.exists() or path.name == AUTHORITY]
    return lines


def _written(name: str, path: Path) -> str:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadFleet(f"{path} cannot be read: {reason_of(error)}") from None
    if len(content) > MAX_FILE_BYTES or "\0" in content:
        raise BadFleet(f"{path} is neither a token nor a certificate")
    return f"printf %s {shlex.quote(content)} > {name}.new && mv {name}.new {name}"


def _basename(variable: str) -> str:
    return "token" if variable.endswith("TOKEN_FILE") else "tls"


def _run(options: Sequence[str], script: Callable[[SshHost], str], host: SshHost) -> tuple[int, str]:
    """Exit code of a script on a host, and its output, or its errors if it failed."""
    command = ["ssh", *OPTIONS, *options, host.place, "sh -s"]
    try:
        done = subprocess.run(command, input=script(host), capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except FileNotFoundError:
        raise BadFleet("ssh is not found here") from None
    except subprocess.TimeoutExpired:
        return 255, f"no answer within {LIMIT_S:.0f} s"
    return done.returncode, done.stdout if done.returncode == 0 else (
        done.stderr.strip() or f"exit code {done.returncode}"
    )
