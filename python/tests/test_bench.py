"""`python -m remanent.bench`: its results, its table and its plot."""

import json
import os
import xml.etree.ElementTree as ElementTree

import pytest

pytest.importorskip("torch")

from remanent import bench  # noqa: E402

SIZE = ["--gib", "0.001", "--rounds", "1"]


def test_every_method_is_measured_in_every_row(tmp_path, capsys):
    plot = tmp_path / "plot.svg"
    assert bench.main([str(tmp_path), *SIZE, "--json", "--plot", str(plot)]) == 0
    results = json.loads(capsys.readouterr().out)
    assert list(results["rows"]) == ["save, first", "save, all changed", "save, a tenth changed", "load, warm"]
    for row, ways in results["rows"].items():
        assert {"remanent: save_file", "remanent: Checkpointer", "torch.save"} <= ways.keys(), row
        assert all(rate["median"] > 0 and len(rate["rounds"]) == 1 for rate in ways.values()), row
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    assert sorted(os.listdir(tmp_path)) == ["plot.svg"], "the folder of the measurements is removed"


def test_table_names_each_method(tmp_path, capsys):
    assert bench.main([str(tmp_path), *SIZE]) == 0
    table = capsys.readouterr().out
    assert "remanent: Checkpointer" in table and "save, a tenth changed" in table


@pytest.mark.parametrize("arguments", [["missing"], [".", "--gib", "0"], [".", "--rounds", "0"], []])
def test_invalid_arguments_are_rejected(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    assert ended.value.code == 2
    assert os.listdir(tmp_path) == []


def test_wrong_loaded_bytes_raise_error(tmp_path, monkeypatch):
    monkeypatch.setattr(bench._SaveFile, "load", lambda way: {name: each + 1 for name, each in way.state.items()})
    with pytest.raises(RuntimeError, match="bytes that differ"):
        bench.run(tmp_path, gib=0.001, rounds=1)
