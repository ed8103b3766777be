"""A state as JSON, and its tensors as the bytes of their storages."""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest

import remanent

torch = pytest.importorskip("torch", reason="torch is not installed")

from remanent._state import page_tree  # noqa: E402
from remanent._state.page_tree import Leaves, flatten, unflatten  # noqa: E402
from remanent._store import _native  # noqa: E402
from remanent._tensors import conversion  # noqa: E402
from remanent._tensors.conversion import extents  # noqa: E402


def nothing(path: str, value: object) -> None:
    return None


def test_dicts_keep_type_and_order() -> None:
    ordered = OrderedDict.fromkeys("abc", 1)
    ordered.move_to_end("a")
    assert flatten("", ordered, nothing) == {"$": ["OrderedDict", [["b", 1], ["c", 1], ["a", 1]]]}
    assert list(unflatten(flatten("", ordered, nothing), lambda tag: None)) == ["b", "c", "a"]
    assert flatten("", defaultdict(list, x=1), nothing) == {"$": ["defaultdict", "list", {"x": 1}]}
    assert flatten("", {"x": {}, "y": []}, nothing) == {"x": {}, "y": []}
    # This text is not valid Unicode, so a path cannot contain it unchanged.
    assert flatten("", {"\ud800": 1}, nothing) == {"\ud800": 1}


def test_cyclic_value_is_rejected() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value in (endless, {"a": endless}):
        with pytest.raises(remanent.RefusedError, match="the value contains itself"):
            flatten("state", value, nothing)


def test_errors_of_adapt_end_conversion() -> None:
    class Odd:
        pass

    held: dict[str, object] = {"a": Odd(), "b": 1}

    def adapt(path: str, value: object) -> object:
        held[path] = 1
        return [path]

    assert flatten("x", held, adapt) == {"a": ["x/a"], "b": 1}

    def fails(path: str, value: object) -> object:
        raise ValueError(path)

    with pytest.raises(ValueError, match="x/a"):
        flatten("x", {"a": Odd()}, fails)


def test_leaves_match_exact_types() -> None:
    class Pair(NamedTuple):
        left: int
        right: int

    class Same(float):
        pass

    taken: dict[str, Any] = {}
    leaves = Leaves(frozenset((Pair,)), "pair", taken)
    pair = Pair(1, 2)
    assert flatten("", {"a": [pair]}, nothing, leaves) == {"a": [{"$": ["pair", "a/0"]}]}
    assert taken == {"a/0": pair}
    for value, name in ((pair, "Pair"), (Same(1), "Same")):
        with pytest.raises(remanent.RefusedError, match=f"x/0: a {name} cannot be stored"):
            flatten("x", [value], nothing)


def test_extents_match_addresses() -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    tensors = {
        "whole": base, "row": base[2], "column": base[:, 3], "block": base[1:3, 2:5], "turned": base.t(),
        "spread": torch.ones(1).expand(7), "one": torch.tensor(3.0), "none": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(base), "negative": torch.tensor([1 + 2j]).conj().imag,
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    for found, (name, given) in zip(extents(dict(tensors)), tensors.items(), strict=True):
        tensor = found.tensor
        assert found.name == name and torch.equal(tensor, given) and not tensor.requires_grad
        assert found.nbytes == tensor.nbytes and found.device == tensor.device
        assert found.storage == (tensor.device, tensor.untyped_storage().data_ptr())
        # The offset of each element in the storage.
        width = tensor.itemsize
        places = {tensor.storage_offset()} if tensor.numel() else set()
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            places = {place + at * stride for place in places for at in range(size)}
        if places:
            assert (found.start, found.end) == (min(places) * width, (max(places) + 1) * width), name
        else:
            assert found.start == found.end
    for name, tensor in (("sparse", torch.eye(2).to_sparse()), ("meta", torch.empty(2, device="meta"))):
        with pytest.raises(remanent.RefusedError, match=name):
            extents({name: tensor})


def test_extents_are_divided_by_storage_owner() -> None:
    flat, other = torch.zeros(100), torch.zeros(10)
    halves = [flat[:50], flat[50:]]
    found = extents({"a": flat[10:20], "b": flat[45:55], "c": other[2:4], "d": torch.empty(0), "e": torch.ones(1)})

    def names(tensors: list[Any]) -> list[list[str]]:
        return [[each.name for each in part] for part in _native.extents_within(found, tensors)]

    assert names(halves) == [["a", "b", "d"], ["c", "e"]], "ranges that touch are one"
    assert names([flat[:50], flat[51:], other[::2]]) == [["c", "d"], ["a", "b", "e"]], "b shares its storage with a"
    assert names([flat, other[:3]]) == [["a", "b", "d"], ["c", "e"]], "a byte of c is another's"
    assert names([]) == [["d"], ["a", "b", "c", "e"]]


def test_overlapping_extents_share_page() -> None:
    # Pages are grouped by storage, regardless of the order of the addresses.
    storages = sorted((torch.zeros(1000) for _ in range(3)), key=lambda each: -each.data_ptr())
    shuffled = [(high, at) for at in (7, 0, 3, 5, 1) for high in storages]
    tensors = {f"{number}": storage[at * 100:at * 100 + 150] for number, (storage, at) in enumerate(shuffled)}
    tensors |= {"inner": storages[1][720:730], "none": torch.empty(0), "alone": torch.ones(1)}
    found = _native.extents_by_page(extents(tensors))

    def bytes_of(each: Any) -> set[int]:
        return set(range(each.tensor.data_ptr(), each.tensor.data_ptr() + each.nbytes))

    assert sorted(each.name for page in found for each in page) == sorted(tensors)
    for page in found:
        reached: set[int] = set()
        for each in page:
            assert not reached or bytes_of(each) & reached, "it has nothing to do with those before it"
            reached |= bytes_of(each)
        others = [each for other in found if other is not page for each in other]
        assert not any(bytes_of(each) & reached for each in others)
    assert [page[0].name for page in found][0] == "none"
    assert {len(page) for page in found} == {1, 2}


def test_flattened_text_is_valid_json() -> None:
    texts = ["", "\"", "\\", "\x00\x1f\x7f\n\t", "é\u2028𝄞", "\ud800", "a\udfffb"]
    numbers = [0.1, 1e-5, 1e16, 1.5e300, 5e-324, -0.0, 3.0, 123456789.125]
    value = {text: [text, {text + "$": text}] for text in texts} | {"numbers": numbers}
    assert unflatten(flatten("", value, nothing), lambda tag: None) == value
    assert [str(each) for each in flatten("", numbers, nothing)] == [str(each) for each in numbers]


def test_save_creates_few_tracked_objects() -> None:
    tensor = torch.zeros(4)
    [block] = conversion.blocks(extents({"w": tensor}))
    moved = block.moved(torch.zeros(100, dtype=torch.uint8), start=3)
    gc.collect()
    for each in (block, moved, block.arrays, block.arrays[0], extents({"w": tensor})[0]):
        assert not gc.is_tracked(each), type(each)
    assert moved.data.shape == (16,) and moved.data.storage_offset() == 3


def test_changed_manifest_is_read_again(directory: str) -> None:
    def put(store: Any, tensors: dict[str, Any], last: page_tree.LastManifest, tree: str = "null") -> None:
        batch, _ = page_tree.put(store, store.batch(), conversion.blocks(extents(tensors)), tree, last=last)
        store.commit(batch)

    a, b, c = torch.zeros(2), torch.ones(3), torch.ones(2, 2)
    with remanent.Store(directory) as store:
        last, other = page_tree.LastManifest(), page_tree.LastManifest()
        for tensors, tree in (({"a": a}, "1"), ({"a": a}, "2"), ({"b": b, "a": a}, "2"), ({"a": a, "b": b}, "2"),
                              ({"a": c, "b": b}, "2")):
            put(store, tensors, last, tree)
            found = page_tree.read_manifest(store)
            assert found.tree == int(tree) and list(found.pages) == list(tensors)
            assert [array.shape for (array,) in found.pages.values()] == [each.shape for each in tensors.values()]
        # A version by another writer is detected, and so is a batch that was never committed.
        put(store, {"c": c}, other)
        page_tree.put(store, store.batch(), conversion.blocks(extents({"d": a})), last=last)
        put(store, {"c": c, "e": a}, last)
        assert list(page_tree.read_manifest(store).pages) == ["c", "e"]
        assert sorted(key for key in store.keys() if isinstance(key, str) and len(key) == 1) == ["c", "e"]
        # Deletion of the manifest is also detected.
        with store.batch() as batch:
            for key in store.keys():
                batch.delete(key)
        put(store, {}, last)
        assert page_tree.read_manifest(store).pages == {}
