"""The host frameworks of the adapters, and the releases that the adapters support."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["HOSTS", "LMCACHE", "ORBAX", "TORCHTITAN", "TORCH_CHECKPOINTING", "VLLM", "Host", "importing"]


class Host(NamedTuple):
    """A host framework: its name, its package on PyPI, and the oldest and newest release with which its adapter is
    tested."""

    name: str
    package: str
    oldest: str
    newest: str

    @property
    def supported(self) -> str:
        """The range of supported releases, as stated in the documentation."""
        return self.oldest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


LMCACHE = Host("LMCache", "lmcache", "0.5.0", "0.5.7rc2")
VLLM = Host("vLLM", "vllm", "0.33.0", "0.33.0")
TORCHTITAN = Host("torchtitan", "torchtitan", "0.3.0", "0.3.0")
TORCH_CHECKPOINTING = Host("torch_checkpointing", "torch_checkpointing", "0.1.0", "0.1.1")
ORBAX = Host("Orbax", "orbax-checkpoint", "0.12.8", "0.12.8")
HOSTS = (VLLM, LMCACHE, TORCHTITAN, TORCH_CHECKPOINTING, ORBAX)


@contextlib.contextmanager
def importing(host: Host) -> Iterator[None]:
    """Checks the installed release before an adapter imports its host. Import errors state the supported releases.

    A release newer than the newest tested one is accepted, because most releases keep the interface.

    :raises ImportError: the host is not installed, is older than the oldest supported release, or lacks a name.
    """
    found = _installed(host)
    if found is not None and _numbers(found) < _numbers(host.oldest):
        raise ImportError(f"{host.name} {found} is installed, but the adapter needs {host.oldest} or later; "
                          f"install {host.package}>={host.oldest}")
    try:
        yield
    except ImportError as error:
        is_there = "is not installed" if found is None else f"{found} is installed"
        raise ImportError(f"the adapter for {host.name} supports releases {host.supported}, but {host.name} "
                          f"{is_there}: {error}; install {host.package}=={host.newest}",
                          name=error.name, path=error.path) from error


def _installed(host: Host) -> str | None:
    try:
        return importlib.metadata.version(host.package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a release for comparison, without a suffix such as "rc1", "dev0" or "+cu130"."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(each) for each in found.group().split(".")] if found else []
    return tuple(numbers + [0] * (3 - len(numbers)))
