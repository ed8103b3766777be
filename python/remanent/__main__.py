"""The `remanent` command: `python -m remanent`, or the script that the wheel installs."""

from __future__ import annotations

import signal
import sys

from remanent._store import _native


def main() -> int:
    """Runs the command with this process's arguments and returns its exit code."""
    # The command handles Ctrl-C itself. Python's handler would only record it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    return _native.command([sys.executable, "-m", "remanent"], sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
