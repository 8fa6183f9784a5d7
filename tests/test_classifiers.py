"""Table 1: its 20 networks, and results of timm's scripts beside the published ones."""

import csv
import json

import pytest
from helpers import ROOT, user_error

from vcagen.__main__ import do
from vcagen.networks.cost import Cost
from vcagen.paper import classifiers
from vcagen.paper.classifiers import read_top1, report_classifiers
from vcagen.paper.table import load_table

TABLE = ROOT / "configs" / "table1.yaml"
COSTS = {  # params in millions and 1e9 multiply-adds: plain, with VCA
    "DeiT-T": (5.717, 1.254, 5.974, 1.235), "DeiT-S": (22.051, 4.599, 22.556, 4.561),
    "PVT-T": (13.227, 1.926, 11.556, 2.033), "PVT-S": (24.484, 3.806, 20.594, 4.057),
    "PVT-M": (44.206, 6.649, 35.812, 7.212), "Swin-T": (28.288, 4.491, 28.547, 4.597),
    "Swin-S": (49.606, 8.741, 49.626, 8.732), "Swin-B": (87.768, 15.431, 87.900, 15.470),
    "CSwin-T": (20.393, 4.342, 20.414, 4.322), "CSwin-S": (32.716, 6.818, 32.747, 6.789),
}  # fmt: skip


def test_costs_of_all_networks(tmp_path, capsys):
    """Every plain network as computed from its paper, and every one with VCA as the paper prints it, both columns."""
    do("report", [str(TABLE), "--runs", str(tmp_path)], prog="vcagen report")
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert table[3].startswith("| DeiT-T + VCA  |      5.974 |       6.0 |  1.235 |       1.2 |            75.6 |")
    assert "\n".join(table) in (ROOT / "docs" / "recognition.md").read_text()
    rows = {row["name"]: row for row in json.loads((tmp_path / "report" / "table1.json").read_text())["rows"]}
    assert len(rows) == 20
    for name, numbers in COSTS.items():
        plain, vca = rows[name], rows[f"{name} + VCA"]
        found = [value for row in (plain, vca) for value in (row["params"] / 1e6, row["multiply_adds"] / 1e9)]
        assert [round(value, 3) for value in found] == list(numbers), name
        assert f"{found[2]:.1f} {found[3]:.1f}" == f"{vca['published']['params']} {vca['published']['gflops']}"
        fits = f"{found[0]:.1f} {found[1]:.1f}" == f"{plain['published']['params']} {plain['published']['gflops']}"
        assert fits == (plain["note"] is None), name
        assert vca["baseline"] == name


@pytest.fixture
def free(monkeypatch):
    monkeypatch.setattr(classifiers, "classifier_cost", lambda model: Cost(1_000_000, 1_000_000))


def result(model, top1, **more):
    return {"model": model, "top1": top1, "top1_err": 100 - top1, "top5": 90.0, "img_size": 224, **more}


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def test_results_of_timm_stand_beside_the_published_ones(tmp_path, free):
    plain, vca = "deit_tiny_patch16_224", "vca_deit_tiny_patch16_224"
    epochs = [{"epoch": epoch, "eval_loss": 1.0, "eval_top1": top1} for epoch, top1 in enumerate((50.0, 72.5, 72.0))]
    write_csv(tmp_path / plain / "summary.csv", epochs)
    write_csv(tmp_path / vca / "summary.csv", [{"epoch": 0, "eval_top1": 1.0}])
    write_csv(tmp_path / vca / "results.csv", [result(vca, 75.25)])  # of validate.py: it goes first
    many = [result("pvt_tiny", 75.0), result("swin_tiny_patch4_window7_224.ms_in1k", 81.2)]
    (tmp_path / "results.json").write_text(json.dumps(many))
    (tmp_path / "vca_pvt_tiny").mkdir()
    (tmp_path / "vca_pvt_tiny" / "results.json").write_text(json.dumps(result("vca_pvt_tiny", 78.5, img_size=256)))
    text = report_classifiers(TABLE, tmp_path, tmp_path / "out")
    rows = {row["model"]: row for row in json.loads((tmp_path / "out" / "table1.json").read_text())["rows"]}
    assert rows[plain]["top1"] == 72.0
    assert rows[vca]["top1"] == 75.25
    assert rows[vca]["difference"] == 3.25
    assert rows[vca]["published_difference"] == pytest.approx(3.4)
    assert rows["swin_tiny_patch4_window7_224"]["top1"] == 81.2
    assert rows["vca_swin_tiny_patch4_window7_224"]["difference"] is None
    assert rows["pvt_small"]["top1"] is None
    assert "| 75.25 |      +3.25 |" in text
    assert f"- DeiT-T: {plain}/summary.csv, epoch 2" in text
    assert "- PVT-T: results.json, images of 224" in text
    assert "- PVT-T + VCA: vca_pvt_tiny/results.json, images of 256" in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("results.csv", "model,top1,img_size\nother,3,224\n", r"results\.csv: no result of cswin_tiny"),
        ("results.csv", "model,img_size\ncswin_tiny,224\n", r"results\.csv: damaged \(KeyError: 'top1'\)"),
        ("results.json", "[", r"results\.json: .*"),
        ("results.json", '[{"model": "cswin_tiny", "img_size": 224, "top1": null}]', r"results\.json: damaged"),
        ("summary.csv", "epoch,eval_top1\n", r"summary\.csv: damaged"),
        ("summary.csv", "epoch,eval_loss\n0,1\n", r"summary\.csv: damaged \(KeyError: 'eval_top1'\)"),
        ("summary.csv", "epoch,eval_top1\n0,high\n", r"summary\.csv: .*high"),
    ],
)
def test_damaged_results_are_named(tmp_path, name, content, message):
    (tmp_path / "cswin_tiny").mkdir()
    (tmp_path / "cswin_tiny" / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_top1(tmp_path, "cswin_tiny")


def test_bad_tables_are_named(tmp_path, free, monkeypatch):
    path = tmp_path / "table.yaml"
    for content, message in (
        ("classifiers: [{name: a, model: pvt_tiny, baseline: b}]", "baseline: b is no row"),
        ("classifiers: [{name: a}]", "table.yaml: classifiers: .*model"),
        ("classifiers: [{name: a, model: pvt_tiny, publishd: {top1: 3}}]", "publishd.top1: unknown option"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            report_classifiers(path, tmp_path, tmp_path)
    monkeypatch.undo()
    path.write_text("classifiers: [{name: a, model: pvt_huge}]")
    with pytest.raises(ValueError, match=r"table.yaml: row a: model: timm has no pvt_huge"):
        report_classifiers(path, tmp_path, tmp_path)
    with pytest.raises(ValueError, match="a table of classifiers, which timm's own script trains"):
        load_table(path)


@pytest.mark.slow
def test_an_unknown_network_is_one_line(tmp_path):
    (tmp_path / "table.yaml").write_text("classifiers: [{name: a, model: pvt_huge}]")
    line = user_error("-m", "vcagen", "report", tmp_path / "table.yaml", "--runs", tmp_path)
    assert line.endswith("row a: model: timm has no pvt_huge")
