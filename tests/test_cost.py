"""Cost columns of the paper's tables."""

import json
import re

import pytest
import tiny
import torch
from helpers import ROOT

from vcagen.__main__ import do
from vcagen.build import build_model
from vcagen.config.command_line import from_mapping
from vcagen.config.options import Config, ModelConfig, ProcessConfig, VcaOptions
from vcagen.data.latents import DataSpec
from vcagen.networks.cost import activation_bytes, measure, state_bytes
from vcagen.paper.report import cost_of
from vcagen.paper.table import load_table
from vcagen.training import setup as build_training

IMAGENET = DataSpec(4, 32, 32, 1000, (), 256, {})
TABLES = {number: load_table(ROOT / "configs" / f"table{number}.yaml") for number in (2, 3, 4)}
DERIVED = {  # params and GFLOPs of the DiT rows to all printed digits of a float64 evaluation
    ("S/8", "mhsa"): (33.15, 0.358), ("S/4", "mhsa"): (32.95, 1.413), ("S/2", "mhsa"): (32.96, 6.056),
    ("B/8", "mhsa"): (130.88, 1.418), ("B/4", "mhsa"): (130.48, 5.565), ("B/2", "mhsa"): (130.51, 23.005),
    ("S/8", "vca"): (33.75, 0.389), ("S/4", "vca"): (33.54, 1.507), ("S/2", "vca"): (33.56, 5.980),
    ("B/8", "vca"): (132.07, 1.479), ("B/4", "vca"): (131.66, 5.754), ("B/2", "vca"): (131.70, 22.854),
}  # fmt: skip


PUBLISHED, CONVOLVED = TABLES[2].rows[:24], TABLES[2].rows[24:]


def test_table_2_has_24_rows_with_baselines():
    assert len({row.run for row in PUBLISHED}) == 24
    assert sum(row.baseline is not None for row in PUBLISHED) == 12
    assert [row.name for row in CONVOLVED] == ["DiT-B/2 + VCA, value_conv"]


def test_what_the_convolution_of_the_values_would_mean_for_table_2():
    """The note of the row that has it."""
    fits = {}
    for conv in (False, True):
        configs = [from_mapping(Config, {"run_dir": "", **row.set, "model.attention_options.value_conv": conv})
                   for row in PUBLISHED if row.baseline]  # fmt: skip
        costs = [cost_of(config, IMAGENET) for config in configs]
        printed = [row.published for row in PUBLISHED if row.baseline]
        fits[conv] = [
            sum(f"{ours(cost):.1f}" == f"{numbers[key]:.1f}" for cost, numbers in zip(costs, printed, strict=True))
            for key, ours in (("params", lambda c: c.params / 1e6), ("gflops", lambda c: c.multiply_adds / 1e9))
        ]
    assert fits == {False: [3, 12], True: [8, 12]}
    cost = cost_of(CONVOLVED[0].config(), IMAGENET)
    assert f"{cost.params / 1e6:.1f}" == "131.8"
    assert cost.params == cost_of(PUBLISHED[11].config(), IMAGENET).params + 12 * 10 * 768


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.name)
def test_table_2(row):
    config = row.config()
    cost = cost_of(config, IMAGENET)
    assert f"{cost.multiply_adds / 1e9:.1f}" == f"{row.published['gflops']:.1f}"
    if row.note is None:
        assert cost.params / 1e6 == pytest.approx(row.published["params"], abs=0.25)
    if config.process.name == "diffusion":
        params, gflops = DERIVED[config.model.size, config.model.attention]
        assert round(cost.params / 1e6, 2) == params
        assert round(cost.multiply_adds / 1e9, 3) == gflops


@pytest.mark.parametrize("row", [*TABLES[3].rows, *TABLES[4].rows], ids=lambda row: row.name)
def test_tables_3_and_4(row):
    assert cost_of(row.config(), IMAGENET).params / 1e6 == pytest.approx(row.published["params"], abs=0.2)


def test_stage_costs():
    """Multiply-adds of the stages in units of T n D: contrast 4 and 3, differential 2 and 2, vanilla 2 and 2."""

    def units(first, second):
        model = ModelConfig("S/2", "vca", VcaOptions(stage1=first, stage2=second), depth=1)
        config = Config("", model=model, process=ProcessConfig("flow"))
        return cost_of(config, IMAGENET).multiply_adds / (256 * 64 * 384)

    base = units("vanilla", "vanilla") - 4
    assert units("contrast", "contrast") - base == pytest.approx(7)
    assert units("contrast", "vanilla") - base == pytest.approx(6)
    assert units("vanilla", "contrast") - base == pytest.approx(5)
    assert units("differential", "differential") - base == pytest.approx(4)


def test_counting_leaves_the_network_as_it_was():
    with torch.device("meta"):
        model = build_model(ModelConfig("S/8"), ProcessConfig(), IMAGENET)
    assert measure(model) == measure(model)
    assert all(block.attn.fused_attn for block in model.blocks)


def test_state_bytes_are_those_of_a_training(tmp_path):
    trainer = build_training.build_trainer(tiny.config(tmp_path, train__steps=1, train__ema_decays=[0.9, 0.99]))
    gradients = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (gradients.extend(p.grad for p in trainer.network.parameters()), step())
    trainer.fit()
    held = [*trainer.network.parameters(), *(gradient for gradient in gradients if gradient is not None)]
    held += [value for state in trainer.optimizer.state.values() for value in state.values()]
    held += [average for ema in trainer.emas for average in ema.averages]
    assert state_bytes(trainer.network, 2) == pytest.approx(sum(x.numel() * x.element_size() for x in held), rel=0.01)


def test_activation_bytes_do_not_depend_on_the_device_and_grow_with_the_batch():
    data = DataSpec(4, 8, 8, 10, (), 64, {})
    config = ModelConfig("S/2", "vca", hidden_size=64, depth=2, num_heads=2)
    model = build_model(config, ProcessConfig("flow"), data)
    with torch.device("meta"):
        meta = build_model(config, ProcessConfig("flow"), data)
    two, four, half = activation_bytes(meta, 2), activation_bytes(meta, 4), activation_bytes(meta, 2, "bf16")
    many, many_half = activation_bytes(meta, 256), activation_bytes(meta, 256, "bf16")
    assert activation_bytes(model, 2) == two
    assert activation_bytes(model, 2, "bf16") == half
    assert 1.8 * two < four <= 2 * two
    assert 0.5 * many < many_half < 0.8 * many


def test_the_command_prints_the_cost_of_a_network_and_writes_json(tmp_path, capsys):
    do("cost", ["--model.attention", "vca", "--json", str(tmp_path / "cost.json")], prog="vcagen cost")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "diffusion S/2 vca: 33.56 M parameters, 5.980 GFLOPs (1e9 multiply-adds)"
    assert lines[1].startswith("training: 0.62 GiB of weights, gradients, AdamW and one EMA; an image more keeps ")
    assert json.loads((tmp_path / "cost.json").read_text())["params"] == 33_560_864
    do("cost", ["--process.name=flow", "--channels=1", "--latent_size=8", "--num_classes=10"], prog="vcagen cost")
    assert capsys.readouterr().out.startswith("flow S/2 mhsa: 32.")


@pytest.mark.slow
def test_the_table_of_resolutions_in_the_documents(tmp_path):
    """One row of docs/imagenet.md, by the command."""
    (row,) = re.findall(r"^\| S/2 \| 512 \| (.*) \|$", (ROOT / "docs" / "imagenet.md").read_text(), re.M)
    plain, vca, ratio, *memory, state = (float(cell.replace(",", "")) for cell in row.split(" | "))
    found = []
    for attention in ("mhsa", "vca"):
        command = ["--process.name=flow", "--latent_size=64", f"--model.attention={attention}", "--json"]
        do("cost", [*command, str(tmp_path / "cost.json")], prog="vcagen cost")
        found.append(json.loads((tmp_path / "cost.json").read_text()))
    assert [round(cost["multiply_adds"] / 1e9, 1) for cost in found] == [plain, vca]
    assert round(found[1]["multiply_adds"] / found[0]["multiply_adds"], 2) == ratio
    assert [round(cost["activation_bytes"]["bf16"] / 2**20) for cost in found] == memory[:2]
    assert round(found[0]["state_bytes"] / 2**30, 2) == state


def test_costs_of_a_packaged_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    do("report", ["table3"], prog="vcagen report")
    assert "| contrast / contrast " in capsys.readouterr().out
    rows = json.loads((tmp_path / "runs" / "report" / "table3.json").read_text())["rows"]
    assert [row["published"]["fid"] for row in rows] == [64.3, 64.6, 63.9, 62.3]
    assert rows[3]["params"] == 33_560_864


def test_bad_tables_are_named(tmp_path):
    file = tmp_path / "table.yaml"
    for text, message in (
        ("title: 3", "not a table"),
        ("rows: 3", "rows: expected a list of Row"),
        ("a: [", "damaged"),
        (
            "rows: [{name: x, run: x, set: {model.sise: S/2}, published: {}}]",
            "model.sise: unknown option; did you mean",
        ),
        ("rows: [{name: x, run: x, baselin: y, set: {}, published: {}}]", "rows: baselin: unknown option"),
        ("rows: [{name: x, run: x, baseline: y, set: {}, published: {}}]", "baseline: y is no row"),
        ("rows: [{name: x}]", "rows: .*run"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_table(file)


@pytest.mark.parametrize("option", ["--channels", "--latent_size", "--num_classes"])
def test_zero_is_not_the_default(option):
    with pytest.raises(ValueError, match=r"\b0\b"):
        do("cost", [option, "0"], prog="vcagen cost")
