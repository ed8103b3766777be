"""The storage for torch_checkpointing: a file is complete, durable and verified, or it does not exist."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import in_child

import remanent

torch = pytest.importorskip("torch")
pytest.importorskip("torch_checkpointing")

from remanent.integrations import torch_checkpointing as module  # noqa: E402
from remanent.integrations.torch_checkpointing import RemanentStorage, RemanentStorageConfig  # noqa: E402

PAGE = 64 << 10


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    # The fixture depends on tmp_path, so that stores are closed before their directory is removed. Stores that are
    # still open at this point belong to docstring examples, whose directories were removed.
    module._open_files.clear()
    monkeypatch.setattr(module, "_PAGE_BYTES", PAGE)
    # Each write checks for removed files.
    monkeypatch.setattr(module, "_WRITING_PER_LOOK", 0.0)
    yield
    for files in module._open_files.values():
        files._store.close()
    module._open_files.clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def storage(root: Path) -> RemanentStorage:
    storage = RemanentStorageConfig(str(root)).create_storage()
    storage.mkdir(root / "a")
    return storage


def reopened(root: Path) -> RemanentStorage:
    """Returns the storage as another process opens it."""
    for files in module._open_files.values():
        files._store.close()
    module._open_files.clear()
    return RemanentStorageConfig(str(root)).create_storage()


def data_of(length: int, seed: int = 1) -> bytes:
    return bytes((at * 31 + at // 251 + seed) % 256 for at in range(length))


def pages(root: Path) -> int:
    with remanent.View(root / ".remanent" / "files-0") as view:
        return view.page_count


@pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 17])
def test_bytes_are_independent_of_write_sizes(length: int, root: Path, storage: RemanentStorage) -> None:
    data = data_of(length)
    for number, piece in enumerate((1 << 30, PAGE // 3 + 1, 2 * PAGE + 5)):
        with storage.stream_write(root / "a" / str(number)) as file:
            for begin in range(0, length, piece):
                assert file.write(memoryview(data)[begin : begin + piece]) == min(piece, length - begin)
    storage = reopened(root)
    for number in range(3):
        path = root / "a" / str(number)
        assert storage.read(path) == data and storage.getsize(path) == length
    with storage.stream_read(root / "a" / "1") as file:
        for at in (length // 2, 0, max(0, length - 3), length, length + 5):
            assert file.seek(at) == at == file.tell()
            assert file.read(PAGE) == data[at : at + PAGE]
        assert file.seek(-1, os.SEEK_END) == length - 1 if length else file.seek(0, os.SEEK_END) == 0
        with pytest.raises(ValueError):
            file.seek(-length - 1, os.SEEK_END)


def test_write_accepts_any_contiguous_buffer(root: Path, storage: RemanentStorage) -> None:
    import numpy as np

    with storage.stream_write(root / "a" / "f") as file:
        for each in (b"bytes", bytearray(b"array"), np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 3))):
            file.write(each)
        with pytest.raises(TypeError, match="contiguous"):
            file.write(np.arange(6).reshape(2, 3)[:, ::2])
    assert storage.read(root / "a" / "f") == b"bytesarray" + np.arange(6, dtype=np.int32).tobytes()


def test_unfinished_file_is_absent_and_frees_space(root: Path, storage: RemanentStorage) -> None:
    with pytest.raises(KeyError), storage.stream_write(root / "a" / "f") as file:
        file.write(data_of(3 * PAGE))
        raise KeyError
    abandoned = storage.stream_write(root / "a" / "g")
    abandoned.write(data_of(2 * PAGE))
    del abandoned, file
    assert storage.ls(root / "a") == []
    storage.write(root / "a" / "h", b"kept")
    assert pages(root) == 1
    with pytest.raises(RuntimeError, match="is not a folder"):
        storage.write(root / "b" / "f", b"x")
    storage = reopened(root)
    storage.write(root / "a" / "i", b"kept")
    assert pages(root) == 2 and storage.read(root / "a" / "h") == b"kept"


def test_renames_match_table(root: Path, storage: RemanentStorage) -> None:
    def there(name: str) -> str:
        """Creates the initial files of a row of the table."""
        storage.mkdir(root / name)
        storage.write(root / name / "file", name.encode())
        return name

    for name in ("full", "other", "third", "fourth"):
        there(name)
    storage.mkdir(root / "empty")
    storage.write(root / "file", b"file")
    storage.write(root / "file2", b"file2")

    storage.rename(root / "full", root / "absent", is_directory=True)
    assert storage.read(root / "absent" / "file") == b"full" and not storage.exists(root / "full")
    storage.rename(root / "other", root / "empty", is_directory=True)
    assert storage.read(root / "empty" / "file") == b"other"
    for target, number in (("absent", errno.ENOTEMPTY), ("file", errno.ENOTDIR)):
        with pytest.raises(OSError) as refused:
            storage.rename(root / "third", root / target, is_directory=True)
        assert refused.value.errno == number
    storage.rename(root / "file", root / "moved")
    assert storage.read(root / "moved") == b"file"
    storage.rename(root / "moved", root / "file2")
    assert storage.read(root / "file2") == b"file"
    storage.mkdir(root / "void")
    for target in ("fourth", "void"):
        with pytest.raises(OSError) as refused:
            storage.rename(root / "file2", root / target)
        assert refused.value.errno == errno.EISDIR
    with pytest.raises(FileNotFoundError):
        storage.rename(root / "nothing", root / "x")
    assert sorted(storage.ls(root)) == ["a", "absent", "empty", "file2", "fourth", "third", "void"]


def test_space_of_removed_files_is_freed(root: Path, storage: RemanentStorage) -> None:
    import shutil

    for name in ("a", "b", "c", "d"):
        storage.mkdir(root / name)
        storage.write(root / name / "file", data_of(4 * PAGE))
    assert pages(root) == 16
    storage.write(root / "a" / "file", data_of(PAGE, 2))
    storage.delete(root / "b" / "file")
    storage.rmdir(root / "c")
    shutil.rmtree(root / "d")
    storage.write(root / "a" / "last", b"x")
    assert pages(root) == 2
    assert storage.read(root / "a" / "file") == data_of(PAGE, 2)
    assert len(os.listdir(root / ".remanent" / "files-0.marks")) == 2


def test_paths_outside_root_are_rejected(root: Path, storage: RemanentStorage, tmp_path: Path) -> None:
    for path in (tmp_path / "f", root / ".." / "f", root / ".remanent" / "files-0", root):
        with pytest.raises(remanent.InvalidError):
            storage.write(path, b"x")
    (root / "a" / "foreign").write_bytes(b"bytes of another program")
    with pytest.raises(FileNotFoundError):
        storage.read(root / "a" / "nothing")
    assert storage.isdir(root) and storage.remap_path(root / "a") == str(root / "a")
    assert storage.glob(str(root / "a" / "f*")) == [str(root / "a" / "foreign")]


def test_damage_in_mark_or_page_is_detected(root: Path, storage: RemanentStorage) -> None:
    path, data = root / "a" / "f", data_of(PAGE)
    storage.write(path, data)
    module._written(root)._store.snapshot()
    mark = path.read_bytes()
    for at in range(len(mark)):
        changed = bytearray(mark)
        changed[at] ^= 1
        with open(path, "r+b") as file:
            file.write(changed)
        for look in (reopened(root).read, reopened(root).getsize):
            with pytest.raises(remanent.DamagedError):
                look(path)
    with open(path, "r+b") as file:
        file.write(mark)
    assert reopened(root).read(path) == data
    for image in (root / ".remanent" / "files-0" / "pages").iterdir():
        held = image.read_bytes()
        if (begin := held.find(data)) >= 0:
            with open(image, "r+b") as file:
                file.seek(begin + 1000)
                file.write(bytes([held[begin + 1000] ^ 1]))
    with pytest.raises(remanent.DamagedError):
        reopened(root).read(path)


@pytest.mark.parametrize("step", ["link", "replace", "sync"])
def test_interrupted_write_leaves_no_files_or_pages(
        step: str, root: Path, storage: RemanentStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write(root / "a" / "f", b"before")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    owner, name = {"link": (os, "link"), "replace": (os, "replace"), "sync": (module.durable_files, "sync_folder")}[step]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        # The mark itself is also replaced and synced, so the failure is injected after that.
        publish = module.durable_files.publish

        def and_then(*given: object) -> None:
            publish(*given)  # type: ignore[arg-type]
            patched.setattr(owner, name, killed)

        patched.setattr(module.durable_files, "publish", and_then)
        storage.write(root / "a" / "f", data_of(PAGE))
    storage = reopened(root)
    is_there = step == "sync"
    assert storage.read(root / "a" / "f") == (data_of(PAGE) if is_there else b"before")
    storage.write(root / "a" / "g", b"after")
    assert sorted(os.listdir(root / "a")) == ["f", "g"] and pages(root) == 2
    assert len(os.listdir(root / ".remanent" / "files-0.marks")) == 2
    assert os.listdir(root / ".remanent" / "files-0.names") == []


def test_threads_write_concurrently_and_dropped_streams_end(root: Path, storage: RemanentStorage) -> None:
    errors: list[BaseException] = []

    def write(thread: int) -> None:
        try:
            for number in range(40):
                lost = storage.stream_write(root / "a" / f"lost-{thread}")
                lost.write(b"x")
                lost.itself = lost  # type: ignore[attr-defined]
                del lost
                storage.write(root / "a" / f"{thread}-{number}", data_of(100, number))
                assert storage.read(root / "a" / f"{thread}-{number}") == data_of(100, number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(thread,), daemon=True) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not errors
    gc.collect()
    storage.write(root / "a" / "last", b"x")
    assert len(storage.ls(root / "a")) == pages(root) == 161


def test_failed_write_creates_no_file(root: Path, storage: RemanentStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = storage.stream_write(root / "a" / "f")
    put = stream._files.put  # type: ignore[attr-defined]
    puts = iter([put, None])
    monkeypatch.setattr(stream._files, "put",  # type: ignore[attr-defined]
                        lambda *given: (next(puts) or failing)(*given))

    def failing(*_: object) -> None:
        raise remanent.StoreIOError("of this write")

    with pytest.raises(remanent.StoreIOError):
        stream.write(data_of(2 * PAGE))
    with pytest.raises(ValueError):
        stream.write(b"x")
    stream.close()
    assert storage.ls(root / "a") == []
    with pytest.raises(IsADirectoryError):
        storage.write(root / "a", b"x")


def test_full_disk_reclaims_space_of_removed_files(
        root: Path, storage: RemanentStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write(root / "a" / "f", data_of(PAGE))
    files = module._written(root.resolve())
    store, taken = files._store, []

    class Full:
        """A disk that is full until a snapshot was taken."""

        def batch(self, **options: object) -> object:
            if not taken:
                raise remanent.DiskFullError("no space")
            return store.batch(**options)

        def snapshot(self, **options: object) -> object:
            taken.append(store.snapshot(**options))
            return taken[-1]

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

    monkeypatch.setattr(files, "_store", Full())
    storage.write(root / "a" / "g", data_of(PAGE, 2))
    assert taken and storage.read(root / "a" / "g") == data_of(PAGE, 2)
    monkeypatch.setattr(files, "_store", store)


def test_copied_root_without_hard_links_keeps_files(root: Path, storage: RemanentStorage) -> None:
    for name in ("f", "g"):
        storage.write(root / "a" / name, name.encode() * 1000)
    storage = reopened(root)
    for links in ("--no-preserve=links", "--preserve=links"):
        copy = root.with_name(f"copy{links}")
        subprocess.run(["cp", "-r", links, str(root), str(copy)], check=True)
        copied = RemanentStorageConfig(str(copy)).create_storage()
        copied.write(copy / "a" / "h", b"h")
        copied.delete(copy / "a" / "g")
        copied.write(copy / "a" / "i", b"i")
        copied = reopened(copy)
        assert copied.read(copy / "a" / "f") == b"f" * 1000
        assert copied.read(copy / "a" / "h") + copied.read(copy / "a" / "i") == b"hi"
        assert pages(copy) == 3


def test_stream_keeps_reading_replaced_file(root: Path, storage: RemanentStorage) -> None:
    storage.write(root / "a" / "f", data_of(3 * PAGE))
    with storage.stream_read(root / "a" / "f") as stream:
        for number in range(3):
            storage.write(root / "a" / "f", data_of(PAGE, number))
            storage.write(root / "a" / "g", b"x")
            assert storage.read(root / "a" / "f") == data_of(PAGE, number)
        assert stream.read() == data_of(3 * PAGE)
    assert storage._views._views == {(os.getpid(), "files-0"): []}


def test_forked_child_reads_and_writes_own_files(root: Path, storage: RemanentStorage) -> None:
    storage.write(root / "a" / "f", b"of the parent")
    stream = storage.stream_read(root / "a" / "f")

    def child() -> None:
        assert storage.read(root / "a" / "f") == b"of the parent"
        storage.write(root / "a" / "g", b"of the child")

    with module._open_lock, storage._views._lock:
        assert in_child(child) == "fine"
    assert storage.read(root / "a" / "g") == b"of the child" and stream.read() == b"of the parent"
    # No process has the child's store open, so the next process that writes frees its space.
    storage.delete(root / "a" / "g")
    storage = reopened(root)
    storage.write(root / "a" / "h", b"x")
    with remanent.View(root / ".remanent" / "files-1") as view:
        assert view.page_count == 0


def test_roots_and_paths_may_be_symlinks(root: Path, storage: RemanentStorage) -> None:
    linked = root.with_name("linked")
    linked.symlink_to(root)
    storage.write(linked / "a" / "f", b"x")
    other = RemanentStorageConfig(str(linked)).create_storage()
    assert other.read(root / "a" / "f") == b"x" and other.ls(linked) == other.ls(root) == ["a"]
    (root / "out").symlink_to(root.parent)
    with pytest.raises(remanent.InvalidError):
        storage.write(root / "out" / "f", b"x")


WRITER = """
    import sys
    from pathlib import Path
    from remanent.integrations import torch_checkpointing as module
    from test_torch_checkpointing import *

    module._PAGE_BYTES = PAGE
    root, first = Path(sys.argv[1]), int(sys.argv[2])
    storage = RemanentStorageConfig(str(root)).create_storage()
    for number in range(first, 1 << 30, 10):
        storage.mkdir(root / f"writing-{number}")
        for rank in range(3):
            storage.write(root / f"writing-{number}" / str(rank), data_of(2 * PAGE + rank, number))
        storage.rename(root / f"writing-{number}", root / f"step-{number}", is_directory=True)
        if number >= first + 30:
            storage.rmdir(root / f"step-{number - 30}")
        print(number, flush=True)
"""


def writer(root: Path, first: int) -> subprocess.Popen[str]:
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITER), str(root), str(first)], text=True,
                            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


def test_killed_concurrent_writers_lose_nothing(root: Path) -> None:
    writers = [writer(root, first) for first in range(2)]
    outputs = [process.stdout for process in writers if process.stdout is not None]
    # Both processes must be writing before the first one is killed.
    last = [int(output.readline()) for output in outputs]
    for child, (process, output) in enumerate(zip(writers, outputs, strict=True)):
        for line in output:
            last[child] = int(line)
            if last[child] // 10 == 6 + 5 * child:
                process.send_signal(signal.SIGKILL)
        process.wait()
    assert (root / ".remanent" / "files-1").is_dir()
    storage = reopened(root)
    for newest in last:
        for number in range(newest - 20, newest + 1, 10):
            for rank in range(3):
                assert storage.read(root / f"step-{number}" / str(rank)) == data_of(2 * PAGE + rank, number)
    # All visible files are complete, including those that the killed processes did not report.
    for name in storage.ls(root):
        if name.startswith("step-"):
            assert sorted(storage.ls(root / name)) == ["0", "1", "2"]
            for rank in range(3):
                assert storage.read(root / name / str(rank)) == data_of(2 * PAGE + rank, int(name[5:]))
        else:
            storage.rmdir(root / name)
    storage.write(root / "end", b"x")
    names = len([path for path in root.rglob("*") if path.is_file() and ".remanent" not in path.parts])
    assert sum(len(os.listdir(root / ".remanent" / f"files-{number}.marks")) for number in range(2)) >= names


def test_manager_saves_and_loads(root: Path) -> None:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig

    config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=RemanentStorageConfig(str(root)))
    state = {"w": torch.arange(60_000, dtype=torch.float32).reshape(200, 300), "b": torch.ones(3, dtype=torch.bfloat16)}
    manager = config.build()
    manager.save(str(root / "step-1"), {"model": state, "step": 7})
    manager.close()
    found = {"w": torch.zeros(200, 300), "b": torch.zeros(3, dtype=torch.bfloat16)}
    manager = config.build()
    loaded = manager.load(str(root / "step-1"), into={"model": found, "step": 0})
    assert torch.equal(found["w"], state["w"]) and torch.equal(found["b"], state["b"])
    assert loaded["step"] == 7
    manager.close()


def test_foreign_files_are_read_unchanged(root: Path, storage: RemanentStorage) -> None:
    path = root / "a" / "foreign"
    for content in (b"", b"bytes of another program", data_of(3 * PAGE), b'{"weight_map": {}}\n'):
        path.write_bytes(content)
        assert storage.read(path) == content and storage.getsize(path) == len(content)
    path.write_bytes(data_of(PAGE))
    os.link(path, root / "a" / "second")
    with storage.stream_read(root / "a" / "second") as stream:
        stream.seek(-10, os.SEEK_END)
        assert stream.read(20) == data_of(PAGE)[-10:]
    storage.write(path, b"in its place")
    assert storage.read(path) == b"in its place" and storage.getsize(path) == 12


def test_manager_loads_checkpoints_of_own_storage(root: Path) -> None:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    state = {"w": torch.arange(60_000, dtype=torch.float32).reshape(200, 300), "b": torch.ones(3, dtype=torch.bfloat16)}
    theirs = CheckpointManager.Config(save=SyncCheckpointSaverConfig(),
                                      storage_config=LocalFileSystemStorageConfig(use_direct_io=False))
    manager = theirs.build()
    manager.save(str(root / "step-1"), {"model": state, "step": 7})
    manager.close()
    manager = CheckpointManager.Config(storage_config=RemanentStorageConfig(str(root))).build()
    found = {"w": torch.zeros(200, 300), "b": torch.zeros(3, dtype=torch.bfloat16)}
    loaded = manager.load(str(root / "step-1"), into={"model": found, "step": 0})
    assert torch.equal(found["w"], state["w"]) and torch.equal(found["b"], state["b"]) and loaded["step"] == 7
    manager.close()


@pytest.mark.parametrize("is_divided", [False, True])
def test_manager_loads_hugging_face_files(root: Path, is_divided: bool) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing import default_resharder, schema
    from torch_checkpointing.hf.metadata import HuggingFaceSafetensorsDistributedMetadataFormat as HuggingFace

    state = {"w": torch.arange(60_000, dtype=torch.float32).reshape(200, 300), "b": torch.ones(3, dtype=torch.bfloat16)}
    folder = root / "model"
    folder.mkdir(parents=True)
    if is_divided:
        names = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(state, 1)}
        for name, file in names.items():
            save_file({name: state[name]}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        save_file(state, folder / "model.safetensors")
    items = {"model": schema.ItemSpec(resharder=default_resharder.DefaultResharder())}
    manager = CheckpointManager.Config(items=items, storage_config=RemanentStorageConfig(str(root))).build()
    found = {"w": torch.zeros(200, 300), "b": torch.zeros(3, dtype=torch.bfloat16)}
    manager.load(str(folder), into={"model": found}, metadata_format=HuggingFace)
    assert torch.equal(found["w"], state["w"]) and torch.equal(found["b"], state["b"])
    manager.close()
