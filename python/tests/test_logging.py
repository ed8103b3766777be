"""The engine's events as records of Python's `logging`."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from children import in_child, run_script

import remanent


class Kept(logging.Handler):
    """Keeps records; waits first if requested."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_waiting = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if not self.may_go.is_set():
            self.is_waiting.set()
            self.may_go.wait(60)
        self.records.append(record)

    def named(self, name: str) -> list[logging.LogRecord]:
        return [record for record in self.records if record.name == name]


def opened(directory: str) -> remanent.Store:
    """Returns a store with one page, which can be restored to its first batch any number of times."""
    store = remanent.Store(directory, device="host", retention={"log_kept": 1 << 30})
    store["a"] = b"x"
    return store


@pytest.fixture
def kept() -> Iterator[Kept]:
    logger, handler = logging.getLogger("remanent"), Kept()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    handler.may_go.set()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    remanent.update_logging()


def test_events_have_time_thread_and_values(kept: Kept, directory: str) -> None:
    before = time.time()
    with opened(directory) as store:
        store["a"] = b"y"
        store.restore(1)
        assert remanent.flush_logging(60)
    (record,) = kept.named("remanent.history.restore")
    assert (record.levelno, record.levelname, record.threadName) == (20, "INFO", "MainThread")
    assert record.getMessage() == "restored restored=1 lsn=3" and record.fields == {"restored": "1", "lsn": "3"}
    assert before - 1 <= record.created <= time.time() and 0 <= record.msecs < 1000
    assert record.pathname.endswith("restore.rs") and record.lineno > 0
    formatted = logging.Formatter("%(asctime)s %(thread)d %(threadName)s %(name)s %(message)s").format(record)
    assert "remanent.history.restore restored" in formatted


def test_update_logging_applies_level_and_handlers(kept: Kept, directory: str) -> None:
    logger = logging.getLogger("remanent")
    with opened(directory) as store:

        def records_of_a_restore() -> int:
            count = len(kept.named("remanent.history.restore"))
            store.restore(1)
            assert remanent.flush_logging(60)
            return len(kept.named("remanent.history.restore")) - count

        assert records_of_a_restore() == 1
        logger.setLevel(logging.WARNING)
        assert records_of_a_restore() == 0
        logger.setLevel(logging.INFO)
        remanent.update_logging()
        assert records_of_a_restore() == 1
        logging.disable(logging.INFO)
        remanent.update_logging()
        assert records_of_a_restore() == 0
        logging.disable(logging.NOTSET)
        logger.setLevel(logging.DEBUG)
        with opened(directory + "2"):
            assert records_of_a_restore() == 1
        debug = [record for record in kept.records if record.levelno == logging.DEBUG]
        assert any(record.getMessage().startswith("segment ready segment=log/") for record in debug)
        logger.removeHandler(kept)
        remanent.update_logging()
        assert records_of_a_restore() == 0
        # Handlers of the root logger also receive the records.
        logging.getLogger().addHandler(kept)
        try:
            remanent.update_logging()
            assert records_of_a_restore() == 1
            logger.propagate = False
            remanent.update_logging()
            assert records_of_a_restore() == 0
        finally:
            logger.propagate = True
            logging.getLogger().removeHandler(kept)


def test_store_threads_do_not_wait_for_handlers(kept: Kept, directory: str) -> None:
    with opened(directory) as store:
        kept.may_go.clear()
        store.restore(1)
        assert kept.is_waiting.wait(60)
        # More events than the queue can hold. The store continues regardless.
        for _ in range(200):
            store.restore(1)
        assert not remanent.flush_logging(0.01)
        kept.may_go.set()
        assert remanent.flush_logging(60)
    (left_out,) = kept.named("remanent")
    assert left_out.levelno == logging.WARNING and " events were dropped" in left_out.getMessage()
    restores = len(kept.named("remanent.history.restore"))
    assert 100 <= restores < 201 and int(left_out.getMessage().split()[0]) >= 201 - restores


def test_failing_handler_or_filter_stops_nothing(kept: Kept, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with opened(directory) as store:

        def fail(record: logging.LogRecord) -> bool:
            raise ZeroDivisionError

        kept.addFilter(fail)
        store.restore(1)
        assert remanent.flush_logging(60) and not kept.records
        kept.removeFilter(fail)
        store.restore(1)
        assert remanent.flush_logging(60)
    assert len(kept.named("remanent.history.restore")) == 1


def test_forked_child_logs_its_own_stores(kept: Kept, directory: str) -> None:
    with opened(directory) as store:

        def child() -> None:
            signal.alarm(30)
            kept.records.clear()
            with opened(directory + "2") as own:
                own.restore(1)
                assert remanent.flush_logging(30)
            assert len(kept.named("remanent.history.restore")) == 1

        assert in_child(child) == "fine"
        store.restore(1)
        assert remanent.flush_logging(60)
    assert len(kept.named("remanent.history.restore")) == 1


def test_no_handler_means_no_thread_and_no_output(directory: str) -> None:
    done = run_script("""
        import logging, sys, threading, remanent
        logging.getLogger("remanent").setLevel(1)
        with remanent.Store(sys.argv[1]) as store:
            store["a"] = b"x"
            store.restore(1)
            assert all(thread.name != "remanent-log" for thread in threading.enumerate())
            assert remanent.flush_logging()
    """, directory)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("last", ["pass", "raise SystemExit(3)", "threading.Thread(target=again, daemon=True).start()"])
def test_events_before_exit_reach_handlers(directory: str, last: str) -> None:
    done = run_script(f"""
        import logging, sys, threading, remanent
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(message)s")
        store = remanent.Store(sys.argv[1], retention={{"log_kept": 1 << 30}})
        store["a"] = b"x"
        for _ in range(20):
            store.restore(1)
        def again():
            try:
                while True:
                    store.restore(1)
            except remanent.ClosedError:
                pass
        {last}
    """, directory)
    told = [line for line in done.stdout.splitlines() if line.startswith("remanent.history.restore")]
    assert len(told) >= 20 and done.stderr == "" and done.returncode == (3 if "Exit" in last else 0), done
