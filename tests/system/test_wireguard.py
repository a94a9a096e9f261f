"""Ranks average over WireGuard, as docs/security.md says: nothing else of theirs is on the open network."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from system.test_networks import JOBS, agent_in

from elche_client import Client
from elche_client.commands.certificates import Authority
from elche_client.events import JobState
from support.networks import ip, lan, may_make_networks
from support.real_processes import Mark, coordinator, eventually

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

PORT = 51820


def wg(*arguments: str, given: str = "") -> str:
    """What the command prints."""
    done = subprocess.run(["wg", *arguments], input=given, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@contextmanager
def tunnel(names: list[str], folder: Path) -> Iterator[None]:
    """An interface in each of the namespaces: wgN with the address 10.8.0.N in the Nth."""
    keys = [wg("genkey") for _ in names]
    with ExitStack() as stack:
        for number, (name, key) in enumerate(zip(names, keys, strict=True), start=1):
            stack.callback(start(name, f"wg{number}", folder).kill)
            peers = ""
            for other, theirs in enumerate(keys, start=1):
                if other != number:
                    public = wg("pubkey", given=theirs)
                    peers += f"[Peer]\nPublicKey = {public}\nAllowedIPs = 10.8.0.{other}/32\n"
                    peers += f"Endpoint = 10.77.9.{other}:{PORT}\n"
            config = folder / f"wg{number}.conf"
            config.touch(mode=0o600)
            config.write_text(f"[Interface]\nPrivateKey = {key}\nListenPort = {PORT}\n{peers}")
            ip("netns", "exec", name, "wg", "setconf", f"wg{number}", str(config))
            ip("-n", name, "address", "add", f"10.8.0.{number}/24", "dev", f"wg{number}")
            ip("-n", name, "link", "set", f"wg{number}", "up")
        yield


def start(name: str, interface: str, folder: Path) -> "subprocess.Popen[bytes]":
    """WireGuard outside of the kernel, which may not have it."""
    env = {**os.environ, "WG_I_PREFER_BUGGY_USERSPACE_TO_POLISHED_KMOD": "1"}
    command = ["ip", "netns", "exec", name, "wireguard-go", "--foreground", interface]
    Path(f"/var/run/wireguard/{interface}.sock").unlink(missing_ok=True)  # of one that was killed
    with (folder / f"{interface}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    asked = ["ip", "netns", "exec", name, "wg", "show", interface]
    eventually(lambda: subprocess.run(asked, capture_output=True, check=False).returncode == 0, f"{interface} is there")
    return process


def num_packets(name: str) -> int:
    """TCP packets from the other host on the open network."""
    listed = subprocess.run(
        ["ip", "netns", "exec", name, "iptables", "-L", "INPUT", "-v", "-n", "-x"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(listed.stdout.splitlines()[2].split()[0])


def test_ranks_average_over_wireguard_and_talk_to_the_coordinator_over_tls(tmp_path: Path, mark: Mark) -> None:
    if not may_make_networks() or shutil.which("wireguard-go") is None:
        pytest.skip("namespaces cannot be made here, or WireGuard is not installed")
    server = Authority(tmp_path / "certs").server(["10.77.9.254"], expires=timedelta(hours=1)).folder
    pool = Authority(tmp_path / "certs").client("pool", "agent", expires=timedelta(hours=1)).folder
    anna = Authority(tmp_path / "certs").client("anna", "user", expires=timedelta(hours=1)).folder
    with ExitStack() as stack:
        names = stack.enter_context(lan(2))
        stack.enter_context(tunnel(names, tmp_path))
        for name, other in zip(names, ("10.77.9.2", "10.77.9.1"), strict=True):
            ip("netns", "exec", name, "iptables", "-A", "INPUT", "-p", "tcp", "-s", other, "-j", "ACCEPT")
        env = {"ELCHE_TLS": str(server), "ELCHE_CLIENT_CERTIFICATES": "1"}
        one = stack.enter_context(coordinator(mark, tmp_path, listen="10.77.9.254:0", env=env))
        for number, name in enumerate(names, start=1):
            more = ("--interface", f"wg{number}")
            stack.enter_context(agent_in(mark, tmp_path, name, one.address, *more, env={"ELCHE_TLS": str(pool)}))
        path = tmp_path / "linear.py"
        path.write_text((JOBS / "linear.py").read_text())
        client = stack.enter_context(Client(one.address, tls=str(anna)))
        job = client.submit(path, num_ranks=2, verify_rounds=True)
        result = job.result()
        assert result.state is JobState.SUCCEEDED
        assert result.committed_samples == (500, 500, 500)
        assert client.get(job.id).backend.startswith("gloo ("), "not through the coordinator"
        assert [num_packets(name) for name in names] == [0, 0]
        assert int(wg("show", "wg1", "transfer").split()[-1]) > 10_000, "it went through the tunnel"
        bare = "import socket; socket.socket().connect_ex(('10.77.9.2', 1))"
        subprocess.run(["ip", "netns", "exec", names[0], sys.executable, "-c", bare], check=True)
        assert num_packets(names[1]) > 0, "and would have been counted otherwise"
