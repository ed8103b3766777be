"""Child processes for tests: forks, and new interpreters."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable

# The seconds after which a fork prints its stack and exits.
HANGS_AFTER = float(os.environ.get("HANGS_AFTER", "60"))


def in_child(run: Callable[[], None]) -> str:
    """Runs `run` in a forked child. Returns the name of the exception that it raised, or "fine"."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run()
            said = "fine"
        except BaseException as error:
            said = type(error).__name__
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 1000).decode()
    os.close(reader)
    assert os.waitpid(pid, 0)[1] == 0
    return said


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(script), *arguments], capture_output=True, text=True,
                          timeout=60)


def forked(work: Callable[[], int]) -> int:
    """Forks a child that exits with the result of `work`, or with 1 if it raises or hangs."""
    pid = os.fork()
    if pid:
        return pid
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    status = 1
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(pid: int) -> int:
    """Waits for a child. Returns its exit status in the form of `os.waitstatus_to_exitcode`."""
    until = time.monotonic() + HANGS_AFTER + 10
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    raise AssertionError(f"process {pid} does not end")
