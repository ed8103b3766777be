"""The engine's events as records of Python's `logging`, under the logger "remanent".

A thread of the store writes an event to a queue and goes on; one thread of Python's takes it from there and gives it to
the handlers. No thread of the store ever waits for a handler. That thread is there only once a handler wants events.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import traceback

from remanent import _native

_LOGGER = logging.getLogger("remanent")
# Without a handler of the program's own nothing is said, not even warnings by the handler of last resort.
_LOGGER.addHandler(logging.NullHandler())

_lock = threading.Lock()
_thread: threading.Thread | None = None
_ended = False


def _wanted() -> int | None:
    """The least level that some handler gets; None if there is no handler."""
    logger: logging.Logger | None = _LOGGER
    if _LOGGER.disabled:
        return None
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return max(_LOGGER.getEffectiveLevel(), logging.root.manager.disable + 1)
        logger = logger.parent if logger.propagate else None
    return None


def update_logging() -> None:
    """Looks which handlers and which level the logger "remanent" has by now.

    Handlers and level are looked at whenever a store, view, follower or replica is opened. Call this after they were
    changed while a store is open. As long as no handler is set, an event costs the engine next to nothing.

    The engine's events come with their time and thread, and with their values in `record.fields`: from
    "remanent.snapshot", for example, at INFO each snapshot that was taken, at WARNING what goes wrong and is made up
    for, at ERROR what stops the store. TRACE is level 5. If handlers are slower than the events come, some are left out,
    and a record at WARNING says how many.

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
    >>> [said for said in shown if said[0] == "remanent.history.restore"]
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
                # The interpreter is ending, or there are no threads: that is no reason not to open a store.
                return
            _thread = thread


def flush_logging(timeout: float = 5.0) -> bool:
    """Waits until handlers have got what the engine has said so far, up to `timeout` seconds; says whether they have.

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
        # Woken at the end of the interpreter, too.
        taken = _native._log_take(3600.0, _mark)
        if taken is None:
            return
        records, left_out, mark = taken
        for record in records:
            _emit(*record)
        if left_out:
            _LOGGER.warning("%d events were left out: they come faster than handlers take them", left_out,
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
        # As `logging` does with a handler that fails: the engine's later events are wanted all the same.
        if logging.raiseExceptions:
            traceback.print_exc()


def _name_of(native: int) -> str:
    """The name of a thread of Python's, if it is still there."""
    return next((thread.name for thread in threading.enumerate() if thread.native_id == native), f"thread {native}")


def _end() -> None:
    """Gives what is left to the handlers, while they are still there."""
    global _ended
    with _lock:
        _ended = True
    _native._log_level(None)
    _native._log_end()
    if _thread is not None:
        # For handlers that are slow. One that never returns holds up `logging.shutdown`, which comes next, as it does
        # whoever called it.
        _thread.join(5.0)


def _begin_anew() -> None:
    """Lets a forked child begin with a thread of its own, once it opens something: the parent's is not there."""
    global _lock, _given, _thread, _mark
    _lock, _given, _thread, _mark = threading.Lock(), threading.Condition(), None, 0


atexit.register(_end)
os.register_at_fork(after_in_child=_begin_anew)
