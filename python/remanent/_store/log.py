"""Passes engine events to Python's `logging`, as records of the logger "remanent".

A store thread adds an event to a queue and continues. A single Python thread takes events from the queue and passes
them to the handlers, so no store thread ever waits for a handler. The Python thread is started only if a handler
receives events.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import traceback

from remanent._store import _native

_LOGGER = logging.getLogger("remanent")
# Without a handler set by the program nothing is printed, not even warnings by the handler of last resort.
_LOGGER.addHandler(logging.NullHandler())

_lock = threading.Lock()
_thread: threading.Thread | None = None
_ended = False


def _wanted() -> int | None:
    """Returns the lowest level that a handler receives, or None if there is no handler."""
    logger: logging.Logger | None = _LOGGER
    if _LOGGER.disabled:
        return None
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return max(_LOGGER.getEffectiveLevel(), logging.root.manager.disable + 1)
        logger = logger.parent if logger.propagate else None
    return None


def update_logging() -> None:
    """Applies the current handlers and level of the logger "remanent" to the engine.

    Opening a store, view, follower or replica has the same effect. Call this function if handlers or the level change
    while a store is open. Without handlers, an event costs the engine almost nothing.

    Records have the original time and thread of the event, and its values in `record.fields`. For example,
    "remanent.snapshot" reports each snapshot at INFO. Problems from which the store recovered are logged at WARNING,
    and failures that stop the store at ERROR. TRACE is level 5. If events arrive faster than handlers process them,
    some events are dropped, and a record at WARNING states how many.

    >>> import logging
    >>> class Shown(logging.Handler):
    ...     def emit(self, record):
    ...         shown.append((record.name, record.levelname, record.fields["lsn"]))
    >>> shown, handler = [], Shown()
    >>> logging.getLogger("remanent").addHandler(handler)
    >>> logging.getLogger("remanent").setLevel(logging.INFO)
    >>> with remanent.Store(directory) as store:
    ...     store["k"] = b"v"
    ...     lsn = store.restore(0)
    >>> remanent.flush_logging()
    >>> [record for record in shown if record[0] == "remanent.history.restore"]
    [('remanent.history.restore', 'INFO', '2')]
    >>> logging.getLogger("remanent").removeHandler(handler)
    >>> remanent.update_logging()
    """
    global _thread
    wanted = _wanted()
    if not _native._log_level(wanted) or wanted is None or _thread is not None:
        return
    with _lock:
        if _thread is None and not _ended:
            thread = threading.Thread(target=_pump, name="remanent-log", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The interpreter is shutting down, or no thread can be started: opening a store must not fail for this.
                return
            _thread = thread


def flush_logging(timeout: float = 5.0) -> bool:
    """Waits up to `timeout` seconds until handlers have received all engine events so far. Returns False on timeout.

    >>> remanent.flush_logging()
    True
    """
    thread = _thread
    if thread is None:
        return True
    if threading.current_thread() is thread:
        return False
    mark = _native._log_mark()
    with _given:
        return _given.wait_for(lambda: _mark >= mark or not thread.is_alive(), timeout) and _mark >= mark


_given = threading.Condition()
_mark = 0


def _pump() -> None:
    global _mark
    while True:
        # The wait also ends at interpreter exit.
        taken = _native._log_take(3600.0, _mark)
        if taken is None:
            return
        records, left_out, mark = taken
        for record in records:
            _emit(*record)
        if left_out:
            _LOGGER.warning("%d events were dropped, because they arrived faster than handlers processed them", left_out,
                            extra={"fields": {}})
        with _given:
            _mark = mark
            _given.notify_all()


def _emit(level: int, target: str, file: str, line: int, thread: tuple[str, int], created: float,
          message: str, fields: dict[str, str]) -> None:
    try:
        logger = logging.getLogger(target.replace("::", "."))
        if not logger.isEnabledFor(level):
            return
        text = " ".join([message, *(f"{name}={value}" for name, value in fields.items())])
        record = logger.makeRecord(logger.name, level, file, line, text, (), None, extra={"fields": fields})
        record.relativeCreated += (created - record.created) * 1000
        record.created, record.msecs = created, (created - int(created)) * 1000
        record.threadName = thread[0] or _name_of(thread[1])
        logger.handle(record)
    except Exception:
        # `logging` treats a failing handler the same way: later engine events must still be delivered.
        if logging.raiseExceptions:
            traceback.print_exc()


def _name_of(native: int) -> str:
    """Returns the name of the Python thread with this native id, or "thread N" if the thread has ended."""
    return next((thread.name for thread in threading.enumerate() if thread.native_id == native), f"thread {native}")


def _end() -> None:
    """Passes the remaining events to the handlers before the interpreter exits."""
    global _ended
    with _lock:
        _ended = True
    _native._log_level(None)
    _native._log_end()
    if _thread is not None:
        # The timeout is for slow handlers. A handler that never returns also blocks `logging.shutdown`, which runs
        # next, and any other caller.
        _thread.join(5.0)


def _begin_anew() -> None:
    """Resets the module in a forked child, where the parent's thread does not exist."""
    global _lock, _given, _thread, _mark
    _lock, _given, _thread, _mark = threading.Lock(), threading.Condition(), None, 0


atexit.register(_end)
os.register_at_fork(after_in_child=_begin_anew)
