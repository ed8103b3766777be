"""Runs work on a thread pool, even at interpreter exit."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def started(pool: concurrent.futures.ThreadPoolExecutor, work: Callable[..., _T],
            *given: Any) -> concurrent.futures.Future[_T]:
    """Runs work on a thread of the pool and returns its future. At interpreter exit, when no thread can be started, the
    work runs in the calling thread before the call returns, and errors of the work are raised here."""
    try:
        return pool.submit(work, *given)
    except RuntimeError:
        done: concurrent.futures.Future[_T] = concurrent.futures.Future()
        done.set_result(work(*given))
        return done
