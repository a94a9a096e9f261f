"""`python -m elche_coordinator.journal FILE`: replays a journal."""

import gzip
import sys
from pathlib import Path

from elche_coordinator.journal.replaying import CannotReplay, Differs, replay


def main() -> int:
    """Exit code 0 if the core gives the recorded answers, 1 if it differs, 2 if the journal cannot be replayed."""
    if len(sys.argv) != 2:
        print("usage: python -m elche_coordinator.journal FILE", file=sys.stderr)
        return 2
    path = Path(sys.argv[1])
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
        print(f"{replay(text.splitlines())} events, to which the core says the same")
    except Differs as difference:
        print(difference)
        return 1
    except (CannotReplay, OSError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
