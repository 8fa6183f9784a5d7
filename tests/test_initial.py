"""`--init`: what is taken from other weights, what is made to fit, and what is refused."""

import pytest
import tiny
import torch
import yaml
from helpers import image_folder
from safetensors.torch import load_file

from vcagen.__main__ import do
from vcagen.networks.weights import read_weights
from vcagen.training import setup

TABLE = "y_embedder.embedding_table.weight"
IMAGES = {"data__from_images": True, "data__images__image_size": 8, "data__num_workers": 0, "vae__path": "identity"}


def weights(run, step=6):
    return load_file(run / "checkpoints" / f"step_{step:07d}" / "ema_0.9.safetensors")


def network(run, **options):
    return setup.build_trainer(tiny.config(run, **options)).network.state_dict()


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    """A run on four classes of images, and folders of other classes."""
    folder = tmp_path_factory.mktemp("animals")
    for name, classes in (("four", "cat dog eel fox"), ("three", "ant dog cat"), ("other", "w x y z")):
        image_folder(folder / name, dict.fromkeys(classes.split(), 2), size=16)
    tiny.train(folder / "run", data__path=str(folder / "four"), **IMAGES)
    return folder


def test_rows_of_the_same_class_and_the_null_row_are_kept(animals, tmp_path, capsys):
    old = weights(animals / "run")[TABLE]
    options = {"init": str(animals / "run"), **IMAGES}
    fresh = network(tmp_path / "a", data__path=str(animals / "three"), **IMAGES)[TABLE]
    capsys.readouterr()
    new = network(tmp_path / "a", data__path=str(animals / "three"), **options)[TABLE]  # ant, cat, dog, null
    assert new[1:].equal(old[[0, 1, 4]])
    assert new[0].equal(fresh[0])
    assert "init: label rows kept: cat, dog, no class; new: 1" in capsys.readouterr().err
    none = network(tmp_path / "b", data__path=str(animals / "three"), model__class_dropout_prob=0.0, **options)[TABLE]
    assert none[1:].equal(old[:2])
    assert len(none) == 3
    other = network(tmp_path / "c", data__path=str(animals / "other"), **options)[TABLE]  # as many, but other ones
    assert other[4].equal(old[4])
    assert not any(other[i].equal(old[j]) for i in range(4) for j in range(4))
    capsys.readouterr()
    same = network(tmp_path / "d", data__path=str(animals / "four"), **options)[TABLE]
    assert same.equal(old)
    assert "label rows" not in capsys.readouterr().err


def test_labels_of_weights_without_names(animals, tmp_path):
    old = weights(animals / "run")
    torch.save({**old, "x": torch.zeros(1)}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"^init: .*x\.pt: weights: x not in the network"):
        network(tmp_path / "a", data__path=str(animals / "four"), init=str(tmp_path / "x.pt"), **IMAGES)
    torch.save({"model": old, "args": {"num_classes": 4, "path_type": "Linear"}}, tmp_path / "x.pt")
    same = network(tmp_path / "a", data__path=str(animals / "other"), init=str(tmp_path / "x.pt"), **IMAGES)
    assert same[TABLE].equal(old[TABLE])  # as many classes, whose names nobody knows
    fewer = network(tmp_path / "a", data__path=str(animals / "three"), init=str(tmp_path / "x.pt"), **IMAGES)
    assert fewer[TABLE][3].equal(old[TABLE][4])
    assert not any(row.equal(theirs) for row in fewer[TABLE][:3] for theirs in old[TABLE])


def test_another_resolution_has_another_position_table(animals, tmp_path, capsys):
    options = {**IMAGES, "data__images__image_size": 16, "data__path": str(animals / "four"), "train__steps": 2}
    trainer = tiny.train(tmp_path / "large", init=str(animals / "run"), **options)
    assert trainer.network.grid_size == (8, 8)
    assert "its position table is for 16 tokens; it is rebuilt for 8 x 8" in capsys.readouterr().err
    assert weights(tmp_path / "large", 2)["pos_embed"].equal(network(tmp_path / "fresh", **options)["pos_embed"])
    learned = weights(animals / "run")
    learned["pos_embed"] = learned["pos_embed"] + 0.1
    torch.save(learned, tmp_path / "learned.pt")
    with pytest.raises(ValueError, match=r"learned\.pt: weights: pos_embed: \(1, 16, 16\) in the file"):
        network(tmp_path / "no", init=str(tmp_path / "learned.pt"), **options)
    del learned["pos_embed"]
    torch.save(learned, tmp_path / "without.pt")
    network(tmp_path / "yes", init=str(tmp_path / "without.pt"), **options)


def test_weights_of_another_process_are_refused(animals, tmp_path):
    options = {"data__path": str(animals / "four"), "process__name": "diffusion", **IMAGES}
    with pytest.raises(
        ValueError, match=r"^init: .*ema_0\.9\.safetensors: was trained for flow; process\.name is diff"
    ):
        network(tmp_path / "a", init=str(animals / "run"), **options)
    tiny.train(tmp_path / "diffusion", train__steps=1, **options)
    old = weights(tmp_path / "diffusion", 1)
    torch.save(old, tmp_path / "SiT.pt")
    with pytest.raises(ValueError, match=r"^init: process: .*the sit in its name \(flow\), process diffusion"):
        network(tmp_path / "a", init=str(tmp_path / "SiT.pt"), **options)
    torch.save({"ema": old, "args": {"path_type": "GVP"}}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"^init: .*x\.pt: was trained with path_type GVP"):
        network(tmp_path / "a", init=str(tmp_path / "x.pt"), **options)
    torch.save(old, tmp_path / "DiT.pt")
    assert network(tmp_path / "a", init=str(tmp_path / "DiT.pt"), **options)[TABLE].equal(old[TABLE])


def test_another_number_of_heads_is_refused(animals, tmp_path):
    """The shapes do not tell it."""
    options = {"data__path": str(animals / "four"), **IMAGES}
    with pytest.raises(ValueError, match=r"^init: .*ema_0\.9\.safetensors: 2 attention heads; model\.num_heads is 4"):
        network(tmp_path / "a", init=str(animals / "run"), model__num_heads=4, **options)
    torch.save({"model": weights(animals / "run"), "args": {"num_heads": 8}}, tmp_path / "SiT.pt")
    with pytest.raises(ValueError, match=r"^init: .*SiT\.pt: 8 attention heads; model\.num_heads is 2"):
        network(tmp_path / "a", init=str(tmp_path / "SiT.pt"), **options)


def test_a_command_takes_the_model_options_of_init(animals, tmp_path, capsys):
    data = ["--data.path", str(animals / "four"), "--data.from_images", "true", "--data.images.image_size", "8",
            "--vae.path", "identity", "--process.name", "flow", "--train.steps", "1", "--train.batch_size", "2",
            "--data.num_workers", "0", "--log.preview_every", "0"]  # fmt: skip
    command = ["--run_dir", str(tmp_path / "a"), "--init", str(animals / "run"), *data]

    def model(run):
        return yaml.safe_load((run / "config.yaml").read_text())["model"]

    do("train", command, prog="train.py")
    theirs = model(animals / "run")
    assert model(tmp_path / "a") == theirs
    assert theirs["attention_options"]["contrast_grid"] == [2, 2]
    old = read_weights(animals / "run" / "checkpoints" / "step_0000006" / "ema_0.9.safetensors").state_dict
    kept = tiny.state(tmp_path / "a", 1)["ema_0.9999.safetensors", "pos_embed"]
    assert kept.equal(old["pos_embed"])
    (animals / "run").rename(animals / "gone")  # a run that goes on keeps its model
    try:
        do("train", [*command, "--train.steps", "2"], prog="train.py")
    finally:
        (animals / "gone").rename(animals / "run")
    given = ["--model.class_dropout_prob", "0.5", "--model.attention_options", "{stage1: vanilla}"]
    with pytest.raises(ValueError, match=r"init: .*not in the network; likely cause: another attention"):
        do("train", ["--run_dir", str(tmp_path / "b"), "--init", str(animals / "run"), *data, *given], prog="train.py")
    (tmp_path / "c.yaml").write_text("model: {class_dropout_prob: 0.5, attention_options: {positive_tokens: pool+emb}}")
    do("train", ["--config", str(tmp_path / "c.yaml"), "--run_dir", str(tmp_path / "c"), "--init", str(animals / "run"),
                 *data], prog="train.py")  # fmt: skip
    assert model(tmp_path / "c") == {**theirs, "class_dropout_prob": 0.5}
