#!/usr/bin/env python3
"""Tests an archive in a real object store: kills writers and restores while a proxy injects faults into requests.

    archive/tests/servers/run seaweedfs FOLDER python archive/tests/servers/kills.py KILLS [SEED]

Needs the package `remanent`, and the variables that `run` sets. A writer commits numbered batches, and records each
acknowledgement in a synced file outside the store. The writer is killed at random times and started again. At intervals
its directory is lost: a restorer restores the archive into a new directory, in which a writer continues. Restorers are
killed too. A restored state must be the state after exactly one batch, byte for byte, and must contain every batch and
named snapshot that was recorded as archived. Some writers are stopped, and continue after a restore has taken over the
archive: these writers must end as superseded, and their directories must be refused.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn

import remanent
from fault_proxy import FAULTS, REQUEST_SECONDS, Proxy

PAGES, PAGE_LEN = 12, 24_000
# The time limit of each step of the test, in seconds.
STEP_SECONDS = 300.0
PHASES = ("starting", "opening", "committing", "waiting for the archive", "archiving a named snapshot")
COUNTERS = {"failures": "failed rounds of the archive", "snapshots": "archived snapshots", "gaps": "of these, after a gap"}
# The content of the board, the file to which a writer writes its phase and its counters.
BOARD = struct.Struct(f"{1 + len(COUNTERS)}q")


def changes(life: int, number: int) -> list[tuple[int, int, bytes]]:
    """Returns the writes of a batch as pages, offsets and bytes. The first batch creates all pages."""
    chance = random.Random(f"{life} {number}")
    if number == 1:
        return [(page, 0, chance.randbytes(PAGE_LEN)) for page in range(PAGES)]
    starts = [(page, chance.choice([0, chance.randrange(PAGE_LEN)])) for page in chance.sample(range(PAGES), 3)]
    return [(page, start, chance.randbytes(PAGE_LEN - start)) for page, start in starts]


def write(directory: str, life: int, seed: str, record_file: str, board_file: str) -> NoReturn:
    """Commits batches to the directory of life `life` until the process is killed or the archive ends."""
    chance = random.Random(seed)
    board = os.open(board_file, os.O_WRONLY)
    record = os.open(record_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def show(phase: str) -> None:
        stats = store.stats()["archive"]
        assert stats is not None
        os.pwrite(board, BOARD.pack(PHASES.index(phase), *[stats[name] for name in COUNTERS]), 0)

    def wait(phase: str, is_done: Callable[[], bool]) -> None:
        show(phase)
        while not is_done():
            show(phase)

    def note(event: str, number: int) -> None:
        os.write(record, f"{event} {number}\n".encode())
        os.fsync(record)

    os.pwrite(board, BOARD.pack(PHASES.index("opening"), *[0 for _ in COUNTERS]), 0)
    # The limit on unarchived log is low, so that the test includes archives that continue after a gap.
    store = remanent.Store(directory, device="host", snapshots={"log_bytes": 1 << 17},
                           archive={"url": os.environ["KILLS_URL"], "interval": 0.02, "log_len_max": 1 << 16})
    acks: list[Literal["logged", "durable", "archived"]] = ["logged", "durable", "archived"]
    weights = chance.choice([(1, 1, 1), (10, 10, 1)])
    while True:
        show("committing")
        number = store.root.get("batch", 0) + 1
        batch = store.batch()
        for page, offset, data in changes(life, number):
            if number == 1:
                batch.create(data, key=f"p{page}")
            else:
                batch.write(f"p{page}", offset, data)
        batch.set_root("batch", number)
        ticket = store.submit(batch)
        [ack] = chance.choices(acks, weights)
        wait("waiting for the archive" if ack == "archived" else "committing", functools.partial(ticket.wait, 0.1, ack))
        note(ack, number)
        if chance.random() < 0.04:
            former = [info.name for info in store.snapshots() if info.name is not None]
            show("archiving a named snapshot")
            named = store.snapshot(str(number))
            wait("archiving a named snapshot", functools.partial(store.wait_archived, named, 0.1))
            note("named", number)
            for name in former:
                note("given up", int(name))
            store.prune(give_up=former, names_only=True)
        time.sleep(chance.random() * 0.02)


class Campaign:
    """The processes, directories and records of a run. Each directory has a number, which is called its life."""

    def __init__(self, folder: Path, kills: int, seed: int) -> None:
        settings = dict(setting.split("=", 1) for setting in os.environ["REMANENT_ARCHIVE_SETTINGS"].split(","))
        port, slash, path = settings["endpoint"].removeprefix("http://127.0.0.1:").partition("/")
        self.proxy = Proxy(int(port), seed)
        settings |= {"endpoint": f"http://127.0.0.1:{self.proxy.port}{slash}{path}", "timeout": f"{REQUEST_SECONDS} s"}
        self.url = f"{os.environ['REMANENT_ARCHIVE_URL']}/kills-{seed}"
        self.environment = {**os.environ, "KILLS_URL": self.url}
        for key, value in settings.items():
            prefix = ("AWS_" if self.url.startswith("s3:") else
                      "AZURE_" if key in ("allow_http", "timeout") else "AZURE_STORAGE_")
            self.environment[prefix + key.upper()] = value
        self.folder, self.kills, self.seed, self.chance = folder, kills, seed, random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.killed: collections.Counter[str] = collections.Counter()
        # The current life, and the lives in the history of the newest state, each with its first batch.
        self.life, self.lives = 0, [(0, 1)]
        # The expected contents of the pages after batch `number`.
        self.number, self.pages = 0, [bytearray(PAGE_LEN) for _ in range(PAGES)]
        self.processes: list[subprocess.Popen[str]] = []
        self.board_file = folder / "board"

    def directory(self, life: int) -> Path:
        return self.folder / f"directory-{life}"

    def recorded(self, lives: range, *wanted: str) -> list[tuple[str, int]]:
        """Returns the recorded events of the `wanted` kinds in the given lives, each with its batch."""
        texts = [path.read_text() for life in lives if (path := self.folder / f"record-{life}").exists()]
        events = [line.rsplit(" ", 1) for text in texts for line in text.splitlines()]
        return [(event, int(number)) for event, number in events if event in wanted]

    def expect(self, number: int) -> None:
        """Sets `pages` to the expected state after batch `number`."""
        if number < self.number:
            self.number, self.pages = 0, [bytearray(PAGE_LEN) for _ in range(PAGES)]
        while self.number < number:
            self.number += 1
            life = [life for life, first in self.lives if first <= self.number][-1]
            for page, offset, data in changes(life, self.number):
                self.pages[page][offset:offset + len(data)] = data

    def check_state(self, life: int, at: str | None = None) -> int:
        """Checks that a directory contains the state after exactly one batch, and returns the number of that batch."""
        with remanent.View(self.directory(life), at) as view:
            number = int(view.root.get("batch", 0))
            self.expect(number)
            expected = {f"p{page}": bytes(data) for page, data in enumerate(self.pages) if number}
            assert set(view.keys()) == set(expected), f"LOST: {view.keys()} are the pages after batch {number}"
            different = [key for key, data in expected.items() if view[key] != data]
            assert not different, f"LOST: {different} differ from the state after batch {number}"
        return number

    def check_restored(self, number: int) -> None:
        """Checks that the current life, restored at batch `number`, has all archived batches and named snapshots."""
        last = max((batch for _, batch in self.recorded(range(self.life), "archived")), default=0)
        assert number >= last, f"LOST: batch {last} was archived, and the restored state is that of batch {number}"
        named: set[int] = set()
        for event, name in self.recorded(range(self.life + 1), "named", "given up"):
            (named.add if event == "named" else named.discard)(name)
        for name in named:
            assert self.check_state(self.life, f"name:{name}") == name
        self.counts["named snapshots checked"] += len(named)

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, *arguments], env=self.environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def start_writer(self, life: int) -> subprocess.Popen[str]:
        self.board_file.write_bytes(bytes(BOARD.size))
        return self.start(__file__, "write", self.directory(life), str(life), f"{self.seed} {len(self.processes)}",
                          self.folder / f"record-{life}", self.board_file)

    def shown(self) -> tuple[int, ...]:
        """Returns the phase and the counters that the writer wrote last."""
        return BOARD.unpack(self.board_file.read_bytes())

    def pause(self, process: subprocess.Popen[str], is_reached: Callable[[], bool]) -> None:
        """Waits until a process has ended or `is_reached` returns true, and then for a random time."""
        until = time.monotonic() + STEP_SECONDS
        while process.poll() is None and not is_reached():
            assert time.monotonic() < until, "a process makes no progress"
            time.sleep(0.002)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.chance.uniform(0.0, 1.0))

    def run_writer(self) -> subprocess.Popen[str]:
        """Starts a writer, and returns after a random time. The writer may have ended."""
        writer = self.start_writer(self.life)
        point = self.chance.choice(range(len(PHASES)))
        self.pause(writer, lambda: self.shown()[0] >= point)
        return writer

    def kill(self, process: subprocess.Popen[str], phase: str) -> None:
        self.counts["kills while a request was in flight"] += self.proxy.in_flight > 0
        process.kill()
        process.communicate()
        self.killed[phase] += 1

    def end_of(self, writer: subprocess.Popen[str]) -> str:
        """Waits for the end of a writer, and returns the kind of its archive error."""
        output, errors = writer.communicate(timeout=STEP_SECONDS)
        assert writer.returncode == 3, f"a writer ended with {writer.returncode}: {errors}"
        return output.strip()

    def kill_writer(self) -> None:
        """Starts a writer, kills the writer, and checks its directory."""
        writer = self.run_writer()
        if writer.poll() is None and self.chance.random() < 0.3:
            # An outage: almost all requests fail for a time, so that the archive falls behind and then catches up.
            self.counts["outages"] += 1
            rate, self.proxy.rate = self.proxy.rate, 1.0
            time.sleep(self.chance.uniform(0.0, 4.0))
            self.proxy.rate = rate
            time.sleep(self.chance.uniform(0.0, 4.0))
        if writer.poll() is None:
            writer.send_signal(signal.SIGSTOP)
            phase, *counters = self.shown()
            self.counts.update(dict(zip(COUNTERS.values(), counters, strict=True)))
            self.kill(writer, f"writer, {PHASES[phase]}")
        else:
            kind = self.end_of(writer)
            assert kind == "bucket", f"the archive refused its own directory: {kind}"
            self.counts["opens that failed because of faults"] += 1
        kept = [number for _, number in self.recorded(range(self.life, self.life + 1), "logged", "durable", "archived")]
        number = self.check_state(self.life) if (self.directory(self.life) / "STORE").exists() else 0
        assert number >= max(kept, default=0), f"LOST: batch {max(kept)}, and the directory has batch {number}"

    def restore(self) -> None:
        """Restores the archive into a new directory, which begins a new life. Kills some restorers and tries again."""
        self.life += 1
        directory = self.directory(self.life)
        until = time.monotonic() + STEP_SECONDS
        while not (directory / "STORE").exists():
            assert time.monotonic() < until, "the archive cannot be restored"
            restorer = self.start("-m", "remanent", "restore", "--from", self.url, directory)
            point = directory / self.chance.choice(["", "ARCHIVE", "ARCHIVE", "STORE"])
            self.pause(restorer, point.exists)
            if restorer.poll() is None:
                is_complete, is_begun = [(directory / name).exists() for name in ("STORE", "ARCHIVE")]
                self.kill(restorer, "restorer, at its end" if is_complete else
                          "restorer, with a part restored" if is_begun else "restorer, before it changed the directory")
                if not is_complete and self.chance.random() < 0.3:
                    shutil.rmtree(directory, ignore_errors=True)
                continue
            _, errors = restorer.communicate()
            if restorer.returncode != 0:
                # Damage and refused restores have other exit codes or messages.
                is_passing = restorer.returncode == 2 and ("request in doubt" in errors or "throttled" in errors)
                assert is_passing, f"the archive cannot be restored: {errors}"
                self.counts["restores that failed because of faults"] += 1

    def lose(self) -> None:
        """Simulates the loss of a machine with a killed or stopped writer. Another machine restores the archive."""
        former, stopped = self.life, None
        if self.chance.random() < 0.5:
            stopped = self.run_writer()
            stopped.send_signal(signal.SIGSTOP)
            if stopped.poll() is not None or self.shown()[0] < PHASES.index("committing"):
                stopped.kill()
                stopped.wait()
                stopped = None
        self.restore()
        number = self.check_state(self.life)
        self.check_restored(number)
        self.counts["restored states checked"] += 1
        self.lives = [each for each in self.lives if each[1] <= number] + [(self.life, number + 1)]
        if stopped is not None:
            if self.chance.random() < 0.5:
                self.kill_writer()
            stopped.send_signal(signal.SIGCONT)
            kind = self.end_of(stopped)
            assert kind == "superseded", f"a writer whose archive was taken over ended as {kind}"
            self.counts["stopped writers that ended as superseded"] += 1
            # All batches that the writer has recorded since then must have been archived before the restore.
            self.check_restored(number)
        while (kind := self.end_of(self.start_writer(former))) == "bucket":
            self.counts["opens that failed because of faults"] += 1
        assert kind == "diverged", f"a directory whose archive was taken over was refused as {kind}"
        self.counts["former directories that were refused as diverged"] += 1
        shutil.rmtree(self.directory(former))

    def run(self) -> None:
        while self.killed.total() < self.kills or not self.life:
            self.proxy.rate = self.chance.choice([0.02, 0.06, 0.2])
            self.kill_writer()
            if self.chance.random() < 0.25 and self.recorded(range(self.life + 1), "archived"):
                self.lose()
        self.proxy.rate = 0.0
        self.lose()
        verify = self.start("-m", "remanent", "archive", "verify", self.url)
        output, errors = verify.communicate(timeout=STEP_SECONDS)
        assert verify.returncode == 0, f"{output}{errors}"

    def check_checks(self) -> None:
        """Checks that a wrong byte and a lost batch are detected."""
        number = self.check_state(self.life)
        self.pages[0][0] ^= 1
        assert fails(lambda: self.check_state(self.life)), "a wrong byte is not detected"
        self.pages[0][0] ^= 1
        self.check_restored(number)
        with (self.folder / f"record-{self.life - 1}").open("a") as record:
            record.write(f"archived {number + 1}\n")
        assert fails(lambda: self.check_restored(number)), "a lost batch is not detected"

    def report(self) -> None:
        faults = self.proxy.injected
        methods = sorted({method for _, method in faults})
        print(f"{'requests by fault':50}" + "".join(f"{method:>8}" for method in methods))
        for fault in ("none", *FAULTS):
            print(f"{fault:50}" + "".join(f"{faults[fault, method]:8}" for method in methods))
        events = [event for event, _ in self.recorded(range(self.life + 1), "logged", "durable", "archived", "named")]
        # "lost" is 0, because a loss would have ended the run with an error.
        totals = {"kills": self.killed.total(), **dict(sorted(self.killed.items())), **dict(sorted(self.counts.items())),
                  **{f"recorded as {event}": count for event, count in sorted(collections.Counter(events).items())},
                  "batches in the last state": self.number, "lost": 0}
        for name, count in totals.items():
            print(f"{name:50}{count:8}")


def fails(check: Callable[[], object]) -> bool:
    try:
        check()
    except AssertionError:
        return True
    return False


def main(kills: int, seed: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    campaign = Campaign(folder, kills, seed)
    try:
        campaign.run()
        campaign.report()
        campaign.check_checks()
    except BaseException as error:
        error.add_note(f"seed {seed}; the directories and records are kept in {folder}")
        raise
    finally:
        for process in campaign.processes:
            process.kill()
    shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        try:
            write(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
        except remanent.Error as error:
            cause = error if isinstance(error, remanent.ArchiveError) else error.__cause__
            if not isinstance(cause, remanent.ArchiveError):
                raise
            print(cause.kind, flush=True)
            os._exit(3)
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
