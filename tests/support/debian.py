"""Packages of Debian, of which the tests need the commands."""

import re
import subprocess
from pathlib import Path

APT = ("apt-get", "-q", "-y")


def run(*command: str) -> None:
    """Runs a command, which must be a good one."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}"


def next_release(folder: Path, *names: str) -> Path:
    """Unpacks packages of Debian's next release below a folder, without installing them. Where their files are."""
    for one in ("sources", "lists/partial", "cache/archives/partial"):
        (folder / one).mkdir(parents=True, exist_ok=True)
    debian = Path("/etc/apt/sources.list.d/debian.sources").read_text().split("\n\n")[0]
    (folder / "sources" / "next.sources").write_text(re.sub(r"(?m)^Suites:.*", "Suites: trixie", debian) + "\n")
    places = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": folder / "sources",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
    }
    apt = (*APT, *(f"-o{name}={place}" for name, place in places.items()))
    run(*apt, "update")
    subprocess.run([*apt, "download", *names], cwd=folder, check=True, capture_output=True)
    for package in folder.glob("*.deb"):
        run("dpkg-deb", "-x", str(package), str(folder / "files"))
    return folder / "files"
