"""Prefetched pages, and read-ahead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import remanent


def layers(store: remanent.Store, count: int = 12) -> list[int]:
    return [store.put(f"layer {at}", bytes([at]) * 5000, place="disk") for at in range(count)]


def test_pages_are_prefetched(directory: str) -> None:
    with remanent.Store(directory, device="host") as store:
        pages = layers(store)
        coming = store.prefetch(["layer 3", pages[5]], "host")
        assert coming.wait(timeout=30) and coming.done()
        assert [store.info(page).place for page in pages].count("host") == 2
        coming = store.prefetch(pages, "pinned")
        coming.cancel()
        assert coming.done() and coming.wait()
        with pytest.raises(remanent.UnknownKeyError):
            store.prefetch(["none"], "host")
        with pytest.raises(remanent.InvalidError):
            store.prefetch(pages, "attic")
        store.close()
        with pytest.raises(remanent.ClosedError):
            store.prefetch(pages, "host")


def test_steps_are_read_ahead(directory: str) -> None:
    with remanent.Store(directory, device="host") as store:
        pages = layers(store)
        given: list[int] = []

        def steps() -> Iterator[list[str | int]]:
            for at in range(0, len(pages), 2):
                given.append(at)
                yield [f"layer {at}", pages[at + 1]]

        used: list[int] = []
        with store.read_ahead(steps(), "host") as ahead:
            for step in ahead:
                assert all(store.info(page).place == "host" for page in step)
                # Pages of the next step are already being moved.
                assert len(given) > len(used) // 2
                used += step
            assert list(ahead) == []
        assert used == pages


def test_reader_keeps_store_open_until_block_ends(directory: str) -> None:
    store = remanent.Store(directory, device="host")
    pages = layers(store)
    ahead = store.read_ahead([[page] for page in pages], "host")
    assert next(ahead) == pages[:1]
    with pytest.raises(remanent.InUseError):
        store.close()
    ahead.close()
    assert list(ahead) == []
    store.close()
    with pytest.raises(remanent.ClosedError):
        store.read_ahead([], "host")


def test_step_errors_are_raised_at_their_step(directory: str) -> None:
    with remanent.Store(directory, device="host") as store:
        pages = layers(store)

        def failing() -> Iterator[list[int]]:
            yield pages[:1]
            raise InterruptedError

        with store.read_ahead(failing(), "host") as ahead, pytest.raises(InterruptedError):
            list(ahead)
        with store.read_ahead([["none"]], "host") as ahead, pytest.raises(remanent.UnknownKeyError):
            next(ahead)
        with pytest.raises(TypeError):
            store.read_ahead(5, "host")  # type: ignore[arg-type]
        again: list[remanent.ReadAhead] = []
        again.append(store.read_ahead(iter(lambda: list(next(again[0])), None), "host"))
        with pytest.raises(RuntimeError, match="another thread"):
            next(again[0])
        again[0].close()
        # A page that was deleted before its step is requested.
        with store.read_ahead([[pages[3], pages[4]]], "host") as ahead:
            del store["layer 3"]
            with pytest.raises(remanent.UnknownPageError):
                next(ahead)
