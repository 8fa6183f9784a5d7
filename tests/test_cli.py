"""Command lines: one-line errors, help, YAML, and the list of jobs."""

import os
import pickle
import re
import sys
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import ClassVar, Literal

import numpy as np
import pytest
import tiny
import torch
import yaml
from helpers import ROOT, image_folder, python, user_error
from PIL import Image
from safetensors import SafetensorError

from vcagen import __main__
from vcagen.__main__ import JOBS
from vcagen.config import command_line as cli
from vcagen.config.job_options import EncodeConfig
from vcagen.config.options import Config, SampleConfig
from vcagen.data.images import read_image
from vcagen.data.latents import LatentDataset
from vcagen.sampling.load_run import load
from vcagen.sampling.noise import LabelRule
from vcagen.system.files import atomic_file, atomic_folder, write_text


@dataclass(frozen=True)
class Inner:
    """Inner options."""

    width: int = 3
    """Width of it."""


@dataclass(frozen=True)
class Outer:
    """What the command does."""

    name: str
    """Name of it."""
    inner: Inner = field(default_factory=Inner)
    rate: float | None = None
    """Rate of it."""
    fast: bool = False
    """Whether it is fast."""
    kind: Literal["a", "b"] = "a"
    """Kind of it."""

    def __post_init__(self):
        if self.rate is not None and self.rate < 0:
            raise ValueError(f"rate: {self.rate} is negative")


@dataclass(frozen=True)
class Named(Outer):
    """What a command does with its name in front."""

    positional: ClassVar = "name"


def parse(*args, config=Outer):
    return cli.parse(config, args, prog="x")


def test_values_come_from_defaults_yaml_and_arguments_in_this_order(tmp_path):
    assert parse("--name", "a") == Outer("a")
    file = tmp_path / "c.yaml"
    file.write_text("name: b\ninner: {width: 5}\nrate: 1e-3\n")
    assert parse("--config", str(file)) == Outer("b", Inner(5), 0.001)
    assert parse("--config", str(file), "--inner.width=7", "--rate", "2") == Outer("b", Inner(7), 2.0)
    assert parse("c", config=Named) == Named("c")


def test_a_switch_needs_no_value():
    assert parse("--name", "a", "--fast") == Outer("a", fast=True)
    assert parse("--fast", "--name", "a").fast
    assert parse("--name", "a", "--fast", "true").fast
    assert not parse("--name", "a", "--fast=false").fast
    with pytest.raises(ValueError, match="fast: expected bool, got 'x'"):
        parse("--name", "a", "--fast", "x")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--name", "a", "--iner.width", "3"], r"^iner\.width: unknown option; did you mean inner\.width\?$"),
        (["--name", "a", "--inner.widht=3"], r"^inner\.widht: unknown option; did you mean inner\.width\?$"),
        (["--name", "a", "--inner.width", "x"], r"^inner\.width: expected int, got 'x'$"),
        (["--name", "a", "--rate", "x"], r"^rate: expected float or null, got 'x'$"),
        (["--name", "a", "--kind", "c"], r"^kind: expected a or b, got 'c'$"),
        (["--nam", "a"], r"unknown option|required"),
        (["--name", "a", "--config", "nowhere.yaml"], r"nowhere\.yaml"),
        (["--name", "a", "b/c.yaml"], r"^b/c\.yaml: not expected; options begin with --$"),
        ([], r"name"),
    ],
)
def test_mistakes_are_one_line_that_names_the_option(args, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(*args)
    assert "\n" not in str(error.value)


def test_yaml_mistakes_are_named_too(tmp_path):
    file = tmp_path / "c.yaml"
    for text, message in (("name: a\ninner: {widht: 5}", "inner.widht: unknown option"), ("nmae: a", "nmae"),
                          ("a: [", r"c\.yaml: .*line 1"), ("", r"c\.yaml: expected a mapping of options, got None"),
                          ("- 1", r"c\.yaml: expected a mapping of options, got \['1'\]"),
                          ("name: a\ninner: {width: x}", r"inner\.width: expected int"),
                          ("name: a\nrate: -1", "rate: -1.0 is negative")):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            parse("--config", str(file))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "name"),
    [("run_dir: r\ntrain: {steps: null}", "train.steps"), ("run_dir: r\nmodel:\n  mlp_ratio:", "model.mlp_ratio"),
     ("run_dir: r\nprocess: {name: null}", "process.name"), ("run_dir: r\nseed:", "seed"),
     ("run_dir: r\ndata: {images: null}", "data.images"), ("run_dir: r\ntrain: {compile: null}", "train.compile")],
)  # fmt: skip
def test_null_in_yaml_is_no_value_where_none_is_not(tmp_path, text, name):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"^{name}: (null|expected a mapping)"):
        cli.parse(Config, ["--config", str(file)], prog="x")
    file.write_text("run_dir: r\ntrain: {micro_batch_size: null}")
    assert cli.parse(Config, ["--config", str(file)], prog="x").train.micro_batch_size is None


@pytest.mark.parametrize(
    ("text", "message"),
    [("train.steps: 7\ntrain: {batch_size: 8}", "line 1: train.steps: train is in line 2"),
     ("train: {batch_size: 8}\nseed: 1\ntrain.steps: 7", "line 3: train.steps: train is in line 1"),
     ("train:\n  steps: 7\n  steps: 8", "line 3: steps: steps is in line 2"),
     ("seed: 1\nseed: 1", "line 2: seed: seed is in line 1"),
     ("train.steps: 7\n'train.steps': 8", "line 2: train.steps: train.steps is in line 1"),
     ("model: {attention_options.kernel: maps, attention_options: {}}", "line 1: attention_options.kernel: ")],
)  # fmt: skip
def test_an_option_stands_once_in_a_file(tmp_path, text, message):
    file = tmp_path / "c.yaml"
    file.write_text(f"run_dir: r\n{text}")
    message = re.sub(r"line (\d+)", lambda line: f"line {int(line[1]) + 1}", message)
    with pytest.raises(ValueError, match=rf"c\.yaml: {message}"):
        cli.parse(Config, ["--config", str(file)], prog="x")


def test_parts_of_an_option_may_stand_in_several_places(tmp_path):
    parts = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    parts[0].write_text("run_dir: r\ntrain.steps: 7\ntrain.ema_warmup: yes\n")
    parts[1].write_text("train: {batch_size: 8}")
    for order in (parts, parts[::-1]):
        train = cli.parse(Config, [f"--config={path}" for path in order], prog="x").train
        assert (train.steps, train.batch_size, train.ema_warmup) == (7, 8, True)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [("train.precision: no", "train.precision", "no"), ("sampling.labels: off", "sampling.labels", "off"),
     ("sampling.labels: 007", "sampling.labels", "007"), ("sampling.labels: 1:30", "sampling.labels", "1:30"),
     ("init: 1e3", "init", "1e3"), ("init: null", "init", None), ("dry_run: yes", "dry_run", True),
     ("dry_run: no", "dry_run", False), ("train.learning_rate: 1e-3", "train.learning_rate", 1e-3),
     ("log.trackers: [on]", "log.trackers", ["on"]), ("init: 2026-11-30", "init", "2026-11-30")],
)  # fmt: skip
def test_the_type_of_an_option_says_what_a_word_means(tmp_path, text, name, value):
    file = tmp_path / "c.yaml"
    file.write_text(f"run_dir: r\n{text}")
    assert attrgetter(name)(cli.parse(Config, ["--config", str(file)], prog="x")) == value


@pytest.mark.parametrize(
    ("given", "expanded"),
    [("~/x", "HOME/x"), ("~", "HOME"), ("digits:~/x", "digits:HOME/x"), ("a/~/x", "a/~/x"), ("~x", "~x")],
)  # fmt: skip
def test_the_home_folder_has_its_short_name_everywhere(tmp_path, monkeypatch, given, expanded):
    monkeypatch.setenv("HOME", str(tmp_path))
    file, expanded = tmp_path / "c.yaml", expanded.replace("HOME", str(tmp_path))
    file.write_text(f"run_dir: '{given}'\ndata: {{path: '{given}'}}")
    read = cli.parse(Config, ["--config", str(file)], prog="x")
    written = cli.parse(Config, [f"--run_dir={given}", f"--data.path={given}"], prog="x")
    assert {read.run_dir, read.data.path, written.run_dir, written.data.path} == {expanded}


@pytest.mark.parametrize("atomic", [atomic_file, atomic_folder])
@pytest.mark.parametrize("kind", [partial(OSError, 28), SafetensorError])
def test_what_cannot_be_written_is_named_and_absent(tmp_path, atomic, kind):
    with pytest.raises(OSError, match="weights"), atomic(tmp_path / "weights"):
        raise kind("no space left")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config", [Config, SampleConfig, EncodeConfig])
def test_every_field_is_documented_in_help(config, capsys):
    with pytest.raises(SystemExit) as done:
        cli.parse(config, ["--help"], prog="x")
    assert done.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (config.__doc__ or "").split(".")[0] in text
    for name, described in (("--seed", "Seed"), ("--vae.precision", "Precision of the VAE")):
        if name in text:
            assert described in text


def test_print_config_round_trips(capsys, tmp_path):
    with pytest.raises(SystemExit):
        cli.parse(Config, ["--run_dir", "r", "--model.size", "B/4", "--print_config"], prog="x")
    file = tmp_path / "c.yaml"
    file.write_text(capsys.readouterr().out)
    assert cli.parse(Config, ["--config", str(file)], prog="x") == cli.from_mapping(
        Config, {"run_dir": "r", "model": {"size": "B/4"}}
    )


@pytest.mark.parametrize("name", ["quickstart", "dit", "sit"])
def test_recipes_parse(name):
    config = cli.parse(Config, ["--config", str(ROOT / "configs" / f"{name}.yaml")], prog="x")
    if name != "quickstart":
        paper = Config("x")
        assert config.train == replace(paper.train, tf32=True)  # as the public code
        assert (config.train.steps, config.train.batch_size, config.train.learning_rate) == (400_000, 256, 1e-4)
        assert config.train.ema_decays == [0.9999]


def test_from_dict_names_what_is_wrong():
    with pytest.raises(ValueError, match=r"model\.sise: unknown option; did you mean model\.size\?"):
        cli.from_mapping(Config, {"run_dir": "r", "model": {"sise": "S/2"}})
    with pytest.raises(ValueError, match="run"):
        cli.from_mapping(Config, {})


def test_options_that_were_given_are_known():
    config = cli.parse(SampleConfig, ["--run_dir", "r", "--num_steps=250", "--cfg_interval", "[0.1, 0.5]"], prog="x")
    assert config.given == {"run_dir", "num_steps", "cfg_interval"}


@pytest.mark.parametrize(
    ("old", "new"), [("run", "run_dir"), ("objective.name", "process.name"), ("codec.vae", "vae.path")]
)  # fmt: skip
def test_old_names_lead_to_new_ones(old, new):
    with pytest.raises(ValueError, match=rf"^{old}: unknown option; did you mean {new}\?$"):
        cli.parse(Config, ["--run_dir", "r", f"--{old}", "x"], prog="x")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [("train.steps", "0", "int >0"), ("train.steps", "x", "int >0"), ("train.weight_decay", "-1", r"float ≥0"),
     ("train.ema_decays", "[1.5]", r"a list of float in \[0, 1\)"), ("seed", "-1", r"int 0..2\^63 - 1"),
     ("model.class_dropout_prob", "2", "float ≥0 and ≤1"), ("train.max_grad_norm", "0", "float >0 or null"),
     ("train.learning_rate", "inf", "float ≥0"), ("train.weight_decay", "inf", "float ≥0"),
     ("train.steps", "null", "int >0"), ("model.attention_options.contrast_grid", "[0, 4]", "a pair of int >0"),
     ("sampling.cfg_interval", "[1]", "a pair of float or null"),
     ("model.attention_options.stage1", "vanila", "contrast or differential or vanilla")],
)  # fmt: skip
def test_bounds_stand_on_the_field(option, value, expected):
    with pytest.raises(ValueError, match=rf"^{option}: expected {expected}, got "):
        cli.parse(Config, ["--run_dir", "r", f"--{option}={value}"], prog="x")


def test_packaged_configurations_have_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.parse(Config, ["--config", "quickstart"], prog="x").run_dir == "runs/quickstart"
    (tmp_path / "quickstart").write_text("run_dir: mine")
    assert cli.parse(Config, ["--config=quickstart"], prog="x").run_dir == "mine"


def test_plugins_are_imported_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_plugin.py").write_text("import vcagen\nvcagen.PLUGGED = 1\n")
    import vcagen

    cli.parse(Config, ["--run_dir", "r", "--plugin", "my_plugin"], prog="x")
    assert vcagen.PLUGGED == 1
    (tmp_path / "broken_plugin.py").write_text("def f(:\n")
    (tmp_path / "failing_plugin.py").write_text("1 / 0\n")
    for name, reason in (("nowhere", "ModuleNotFound"), ("broken_plugin", "Syntax"), ("failing_plugin", "ZeroDivision"),
                         (".relative", "Type")):  # fmt: skip
        with pytest.raises(ValueError, match=rf"^plugin: {name}: cannot be imported \({reason}Error: "):
            cli.parse(Config, ["--run_dir", "r", "--plugin", name], prog="x")


def test_the_jobs_are_listed(capsys):
    __main__.main([])
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and job.__doc__.splitlines()[0] in text for name, (job, _) in JOBS.items())
    with pytest.raises(ValueError, match="encod: unknown job; choose from"):
        __main__.main(["encod"])


@pytest.mark.parametrize("name", sorted(JOBS))
def test_every_job_has_help(name, capsys):
    with pytest.raises(SystemExit):
        __main__.main([*name.split(), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "usage" in text
    if not name.startswith(("bench", "train", "sample")):
        assert re.search(rf"vcagen {name} [\w/-]", text), "an example"


def ending(main, monkeypatch, capsys):
    """(exit code, stdout, stderr) of a command, in this process."""

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(cli, "_leave", leave)
    with pytest.raises(SystemExit) as left:
        cli.run(main)
    return left.value.code, *capsys.readouterr()


def failing(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    "main",
    [failing(MemoryError()), failing(OverflowError("signed integer is greater than maximum")),
     failing(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")), lambda: torch.empty(10**17),
     lambda: torch.empty(2**40, 2**40), lambda: torch.zeros(10**20), lambda: np.zeros(10**17), lambda: bytes(2**70)],
)  # fmt: skip
def test_a_number_too_large_for_the_machine_is_one_line(main, monkeypatch, capsys):
    code, _, stderr = ending(main, monkeypatch, capsys)
    assert code == 2
    assert re.fullmatch(r"error: an option is too large for this machine \(.{1,160}\)\n", stderr)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("division"), RuntimeError("shapes (2, 3) and (4,)"), KeyError("x")]
)
def test_our_own_mistakes_keep_their_traceback(error):
    with pytest.raises(type(error)):
        cli.run(failing(error))


@pytest.mark.parametrize("size", ["8000000000", "65537", "0", "x"])
@pytest.mark.parametrize(("job", "option"), [("encode", "image_size"), ("stats", "image_size"), ("cost", "latent_size"),
                                             ("train", "model.depth")])  # fmt: skip
def test_sizes_have_bounds(job, option, size):
    with pytest.raises(ValueError, match=rf"^{option}: expected int 1\.\.65536.*, got '{size}'"):
        cli.parse(JOBS[job][0], ["x"] * (job in ("encode", "stats")) + [f"--{option}={size}"], prog="x")


def test_warnings_of_others_do_not_come_before_our_line(tmp_path, monkeypatch, capsys):
    palette = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).convert("P")
    palette.save(tmp_path / "p.png", transparency=bytes([0, 100, 255]))
    (tmp_path / "raw.pt").write_bytes(pickle.dumps({"a": 1}, protocol=4))

    def after_a_palette():
        read_image(tmp_path / "p.png")
        raise ValueError("x: wrong")

    def after_a_warning():
        warnings.warn("be careful", RuntimeWarning, stacklevel=1)
        raise OSError("x: wrong")

    for main, line in (
        (after_a_palette, "x: wrong"), (after_a_warning, "x: wrong"),
        (lambda: load(tmp_path / "raw.pt"), rf"{tmp_path}/raw\.pt: .*\w"),
    ):  # fmt: skip
        code, _, stderr = ending(main, monkeypatch, capsys)
        assert code == 2
        assert re.fullmatch(rf"error: {line}.*\n", stderr), stderr
    code, _, stderr = ending(lambda: warnings.warn("be careful", RuntimeWarning, stacklevel=1), monkeypatch, capsys)
    assert code == 0
    assert "be careful" in stderr


def test_names_that_are_not_utf_8_are_escaped(tmp_path, monkeypatch, capsys):
    name = os.fsdecode(b"caf\xe9")
    image_folder(tmp_path, {name: 2, "b": 1}, size=8)
    encode = partial(__main__.main, ["encode", str(tmp_path), f"--out={tmp_path}/../out", "--vae=identity",
                                     "--image_size=8", "--num_workers=0"])  # fmt: skip
    for main in (encode, partial(__main__.main, ["inspect", f"{tmp_path}/../out"])):
        sys.stdout.reconfigure(errors="strict")
        code, stdout, stderr = ending(main, monkeypatch, capsys)
        assert code == 0, stderr
    assert re.search(r"class_names +b, caf\\udce9\n", stdout)
    assert LabelRule(name, 2, LatentDataset(tmp_path.parent / "out").spec.class_names).given == [1]
    for option, start in (("--run_dir", "run_dir"), ("--data.path", "")):
        given = [f"{option}={tmp_path}/{name}", *([] if start else [f"--run_dir={tmp_path}/r"])]
        code, _, stderr = ending(partial(__main__.main, ["train", *given]), monkeypatch, capsys)
        assert code == 2
        assert re.fullmatch(rf"error: {start}.*caf\\udce9.*\n", stderr), stderr


def test_yaml_keeps_names_that_are_not_utf_8(tmp_path):
    write_text(tmp_path / "c.yaml", yaml.safe_dump({"run_dir": "r", "data": {"path": "caf\udce9"}, "init": "日本"}))
    config = cli.parse(Config, ["--config", str(tmp_path / "c.yaml")], prog="x")
    assert (config.data.path, config.init) == ("caf\udce9", "日本")


@pytest.mark.slow
def test_a_machine_without_unix_modules_trains(tmp_path):
    """As Windows: neither fcntl nor resource can be imported."""
    blocked = "import sys\nsys.modules['fcntl'] = sys.modules['resource'] = None\nfrom vcagen.__main__ import main\n"
    options = tiny.arguments(tmp_path / "run", train__steps=2)[1:]
    for steps in (2, 3):
        python("-c", blocked + f"main(['train', *{options!r}, '--train.steps={steps}'])")
    assert [line["step"] for line in tiny.metrics(tmp_path / "run")] == [1, 2, 3]


CLI = "from vcagen.config import command_line as cli\n"


def test_exit_codes():
    assert "nonsense: unknown job" in user_error("-m", "vcagen", "nonsense")
    python("-c", CLI + "def f(): raise KeyboardInterrupt\ncli.run(f)", code=130)
    _, stderr = python("-c", CLI + "def f(): 1 / 0\ncli.run(f)", code=1)
    assert "ZeroDivisionError" in stderr
    _, stderr = python(
        "-c",
        CLI + "def f(): raise ValueError('a\\nb')\ncli.run(f)",
        code=2,
        env={"RANK": "0"},
    )
    assert stderr == "error: a b\n"
