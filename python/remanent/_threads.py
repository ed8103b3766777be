"""Work that a pool of threads does, for as long as threads can be started."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def started(pool: concurrent.futures.ThreadPoolExecutor, work: Callable[..., _T],
            *given: Any) -> concurrent.futures.Future[_T]:
    """Has a thread of the pool do some work. As the interpreter ends, and no thread can be started, it is done at
    once, and what it raises is raised here.
    """
    try:
        return pool.submit(work, *given)
    except RuntimeError:
        done: concurrent.futures.Future[_T] = concurrent.futures.Future()
        done.set_result(work(*given))
        return done
