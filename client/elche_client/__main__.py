"""`python -m elche_client` is the `elche` command."""

import sys

from elche_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
