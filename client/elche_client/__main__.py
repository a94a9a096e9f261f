"""The command `elche`, also as `python -m elche_client`: Ctrl-C ends it in silence even while it imports."""

import sys


def main() -> int:
    """Runs the command line; returns its exit code."""
    try:
        from elche_client.cli.main import main as run_command

        return run_command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
