"""Children of the process of a test: forks of it, and interpreters of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable


def in_child(run: Callable[[], None]) -> str:
    """What `run` raised in a forked child, by name; "fine" if nothing."""
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
