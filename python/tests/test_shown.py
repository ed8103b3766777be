"""Output for people: texts of objects, tables in notebooks, progress bars on a terminal."""

from __future__ import annotations

import importlib
import io
import pydoc
import re
import sys
from html.parser import HTMLParser

import pytest
from bars import Made, counted

import remanent
from remanent._util.progress import Bar


class Cells(HTMLParser):
    """Collects the tags of an HTML text, and the text of its cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "all is closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert not attributes
        self.tags.append(tag)
        self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["td"]:
            self.cells[-1] += data


def test_notebook_table_is_escaped(store: remanent.Store, directory: str) -> None:
    evil = "<script>alert('&')</script>"
    with store.batch() as batch:
        batch.create(b"secret bytes", key=evil, metadata={"dtype": evil, "shape": [12]})
        batch.create(3 << 20)
        batch.set_root(evil, evil)
        batch.set_root("raw", b"secret bytes")
        batch.set_root("list", [evil] * 100)
    snapshot = store.snapshot(evil)
    shown = [store, store.view(), remanent.View(directory), remanent.Replica(directory)]
    for reader in shown:
        text = reader._repr_html_()
        cells = Cells(text)
        assert set(cells.tags) == {"p", "b", "table", "thead", "tbody", "tr", "th", "td"}
        assert "secret" not in text and "12 bytes" in cells.cells and "list of 100" in cells.cells
        assert evil in cells.cells and f"{evil} [12]" in cells.cells and "3 MiB" in cells.cells and len(text) < 3000
    cells = Cells(snapshot._repr_html_())
    assert set(cells.tags) == {"table", "thead", "tbody", "tr", "th", "td"} and evil in cells.cells
    assert "2" in cells.cells
    shown[1].close()  # type: ignore[attr-defined]


def test_notebook_table_is_limited_and_empty_after_close(directory: str) -> None:
    with remanent.Store(directory, device="host") as store:
        Cells(store._repr_html_())
        with store.batch() as batch:
            for n in range(1000):
                batch.create(1, key=f"k{n}" if n else "x" * 64)
                batch.set_root(f"r{n}", "long " * 100)
        text = store._repr_html_()
        assert "and 980 more" in text and len(text) < 10_000 and "1000 pages, 1000 B, lsn 1" in text
    assert "closed" in store._repr_html_()
    view = remanent.View(directory)
    view.close()
    assert "closed" in view._repr_html_()


def test_reprs_contain_no_page_bytes(store: remanent.Store, directory: str) -> None:
    with store.batch(note="n") as batch:
        batch.create(b"secret", key="k")
    view, past, replica = store.view(), remanent.View(directory), remanent.Replica(directory)
    assert repr(store) == f'Store("{directory}")' and repr(view) == f'LiveView("{directory}", lsn=1)'
    assert repr(past) == f'View("{directory}", lsn=1)' and repr(replica).startswith("Replica(position=")
    many = store.read_many(["k"])
    followed = remanent.Follower(directory).next(10)
    lease = store.lease("k")
    for shown in (store, view, past, replica, many, many.result(), followed, lease, store.array("k"), store.info("k"),
                  store.blame("k", 0, 6)[0], store.changes(), store.submit(store.batch())):
        assert "secret" not in repr(shown) and "object at" not in repr(shown), shown
    lease.end()
    for closed in (view, past):
        closed.close()
        assert repr(closed).endswith(", closed)")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_only_on_terminal(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr("remanent._util.progress._DELAY", 0.0)
    for stream, shown, drawn in [(Terminal(), None, True), (Terminal(), False, False), (io.StringIO(), None, False),
                                 (None, None, False)]:
        monkeypatch.setattr(sys, "stderr", stream)
        with Bar(4 << 20, "saving", shown) as bar:
            bar.add(1 << 20)
            bar.add(3 << 20)
        if stream is not None:
            assert ("saving" in stream.getvalue()) == drawn, stream.getvalue()
    # Short work needs no bar.
    monkeypatch.setattr("remanent._util.progress._DELAY", 60.0)
    monkeypatch.setattr(sys, "stderr", quick := Terminal())
    with Bar(4, "saving") as bar:
        bar.add(4)
    assert "saving" not in quick.getvalue()
    # Without tqdm, nothing is drawn and no error is raised.
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr("remanent._util.progress._DELAY", 0.0)
    monkeypatch.setattr(sys, "stderr", without := Terminal())
    with Bar(4, "saving") as bar:
        bar.add(4)
    assert without.getvalue() == ""


def test_progress_counts_saves_loads_and_waits(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from remanent.torch import load_file, save_file

    made: list[Made] = []
    monkeypatch.setattr("remanent.torch.Bar", counted(made))
    monkeypatch.setattr("remanent._util.progress.Bar", counted(made))
    tensors = {f"t{n}": torch.ones(1000) for n in range(4)}
    save_file(tensors, directory, progress=True)
    load_file(directory)
    load_file(directory, progress=False)
    assert made == [("saving", 16000, True, [4000] * 4), ("loading", 16000, None, [4000] * 4),
                    ("loading", 16000, False, [4000] * 4)]
    made.clear()
    monkeypatch.setattr("remanent._checkpoint.checkpointer.Bar", counted(made))
    for options in ({}, {"digests": True}):
        with remanent.torch.Checkpointer(directory + "-".join(options) + "-run", extra={"state": tensors}, rng=False,
                                         **options) as run:
            run.save(1)
            run.save(2, progress=True)
            run.save(3, wait=False, progress=True).wait()
            run.restore()
            run.restore(3, progress=False)
            tensors["odd"] = object()
            with pytest.raises(remanent.RefusedError):
                run.save(4)
            del tensors["odd"]
        assert made == [("saving", 16000, None, [4000] * 4), ("saving", 16000, True, [4000] * 4),
                        ("saving", 16000, False, [4000] * 4), ("proving", 16000, None, [4000] * 4),
                        ("loading", 16000, None, [4000] * 4), ("proving", 16000, False, [4000] * 4),
                        ("loading", 16000, False, [4000] * 4)]
        made.clear()
    with remanent.Store(directory, device="host") as store:
        store.snapshot()
    with remanent.Store(directory, device="host", memory={"load": "on_demand"}) as store:
        assert store.wait_loaded(60, progress=False)
    ((what, total, shown, counts),) = made
    assert (what, shown) == ("loading", False) and sum(counts) <= total


def test_public_objects_describe_themselves() -> None:
    plain = [name for name in dir(remanent) if getattr(getattr(remanent, name), "__repr__", None) is object.__repr__]
    assert plain == ["Reader"], "a base class without objects of its own"


def test_python_classes_describe_themselves() -> None:
    pytest.importorskip("torch")
    for module in map(importlib.import_module, ("remanent.torch", "remanent.dcp", "remanent.weights", "remanent.kv")):
        for name in module.__all__:
            found = getattr(module, name)
            assert not isinstance(found, type) or found.__repr__ is not object.__repr__, name


def test_batch_repr_shows_state(store: remanent.Store, directory: str) -> None:
    batch = store.batch()
    assert repr(batch) == f'Batch("{directory}", open, operations=0)'
    batch.set_root("step", 1)
    batch.note("first")
    assert repr(batch) == f'Batch("{directory}", open, operations=2)'
    store.commit(batch)
    assert repr(batch) == f'Batch("{directory}", committed, lsn=1)'
    refused = store.batch()
    refused.delete(99)
    with pytest.raises(remanent.UnknownPageError):
        store.commit(refused)
    assert repr(refused) == f'Batch("{directory}", refused)'
    with pytest.raises(KeyError), store.batch() as discarded:
        raise KeyError
    assert repr(discarded) == f'Batch("{directory}", discarded)'


def test_follower_repr_shows_position(store: remanent.Store, directory: str) -> None:
    store["k"] = b"v"
    follower = remanent.Follower(directory)
    begun = repr(follower)
    assert begun == f'Follower("{directory}", position="{follower.position}")'
    follower.next(timeout=60)
    assert repr(follower) == f'Follower("{directory}", position="{follower.position}")' != begun
    follower.close()
    assert repr(follower).endswith(", closed)")


def test_ticket_repr_shows_acknowledgement(store: remanent.Store) -> None:
    ticket = store.submit(store.batch(note="n"))
    assert repr(ticket) in [f"Ticket(lsn=1, {each})" for each in ("pending", "applied", "logged", "durable")]
    ticket.wait()
    assert repr(ticket) == "Ticket(lsn=1, durable)"


def test_help_lists_no_private_modules() -> None:
    shown = pydoc.plain(pydoc.render_doc(remanent))
    contents = re.search(r"^PACKAGE CONTENTS\n(.*?)\n\n", shown, re.MULTILINE | re.DOTALL)
    assert contents is not None
    listed = [line.split()[0] for line in contents[1].splitlines()]
    assert [name for name in listed if name.startswith("_")] == ["__main__"] and "torch" in listed
    assert all(f"    class {name}" in shown for name in ("Store", "Batch", "View"))
    assert "remanent._store.errors" not in shown and repr(remanent.Error) == "<class 'remanent.Error'>"


def test_prefetch_repr_shows_state(store: remanent.Store, directory: str) -> None:
    store.put("k", b"v", place="disk")
    coming = store.prefetch(["k"], "host")
    coming.wait()
    assert repr(coming) == f'Prefetch("{directory}", done)'
    steps = store.read_ahead([["k"]], "host")
    assert repr(steps) == f'ReadAhead("{directory}")'
    steps.close()
    assert repr(steps) == f'ReadAhead("{directory}", closed)'


def test_checkpointer_repr_shows_step(directory: str) -> None:
    pytest.importorskip("torch")
    from remanent.torch import Checkpointer

    with Checkpointer(directory, extra={"loader": {"position": 0}}) as run:
        assert repr(run) == f"Checkpointer({directory!r})"
        run.save(3)
        assert repr(run) == f"Checkpointer({directory!r}, step=3)"
    assert repr(run) == f"Checkpointer({directory!r}, step=3, closed)"
    with Checkpointer(directory, extra={"loader": {}}) as run:
        run.restore()
        assert repr(run) == f"Checkpointer({directory!r}, step=3)"


def test_save_and_version_reprs_show_step(directory: str) -> None:
    pytest.importorskip("torch")
    from remanent.torch import Checkpointer

    with Checkpointer(directory, extra={"loader": {"position": 0}}) as run:
        saved = run.save(3, name="best", wait=False)
        assert saved.wait() and repr(saved) == "Saved(step=3, done=True)"
        (version,) = run.versions()
        assert repr(version) == f"Version(step=3, lsn={version.lsn}, name='best', created={version.created!r})"


def test_ipython_completes_keys(store: remanent.Store, directory: str) -> None:
    store["layer.0"], store[b"\xff"] = b"a", b"b"
    for reader in (store, store.view(), remanent.View(directory)):
        assert reader._ipython_key_completions_() == ["layer.0", b"\xff"]
