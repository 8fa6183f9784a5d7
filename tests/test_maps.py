"""The maps of Visual-Contrast Attention against its output and the equations, their pages, their trace in the log."""

import argparse
import itertools
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from helpers import close, random_pictures, readme_block
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image
from test_attention import VARIANTS, layer, name_of

import vcagen
from vcagen import __main__
from vcagen.jobs import maps as job
from vcagen.jobs.classifier_maps import load_classifier, look_at_images
from vcagen.jobs.map_pages import COLUMNS, Input, contrast_page, percent, preference
from vcagen.networks.maps import contrast_maps, mean_contrast

VCA = [variant for variant in VARIANTS if variant[0] == "vca"]


def heads(attn, x):
    """q, k and v of a layer's input."""
    return attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)


@pytest.mark.parametrize("variant", VCA, ids=name_of)
def test_maps_give_the_output_of_attend(variant):
    attn, x = layer(variant)
    q, k, v = heads(attn, x)
    maps = contrast_maps(attn, x)
    for stage in (maps.stage1, maps.stage2):
        for rows in filter(lambda a: a is not None, (stage.positive, stage.negative)):
            assert rows.min() >= 0
            close(rows.sum(-1), torch.ones(rows.shape[:-1]))
    weights = 1.0 if attn.norm1 is None else attn.norm1.weight
    product = maps.through() @ (v * weights)
    if attn.norm2 is not None:
        product = attn._normalise(product, attn.norm2)
    close(product, attn.attend(q, k, v), 1e-5)


def test_a_row_through_both_stages_is_the_sum_over_contrast_tokens():
    attn, x = layer(("vca", {}))
    maps = contrast_maps(attn, x)
    _, _, v = heads(attn, x)
    one, two, query, n, head = maps.stage1, maps.stage2, 5, 1, 0
    expected = torch.zeros(attn.num_tokens)
    for token in range(attn.num_contrast_tokens):
        row = one.positive[n, head, token] - one.lambda_ * one.negative[n, head, token]  # (T,)
        norm = (row @ v[n, head]).square().mean().add(1e-5).sqrt()
        weight = two.positive[n, head, query, token] - two.lambda_ * two.negative[n, head, query, token]
        expected += weight * (1 - attn.lambda_init) * row / norm
    close(maps.through([query])[n, head, 0], expected.detach())
    close(maps.through()[:, :, query], maps.through([query])[:, :, 0])


def test_maps_are_those_of_the_equations():
    """Stage I of the first head, from softmax((pooled + embedding) k^T / sqrt(d)), each bin averaged by hand."""
    attn, x = layer(("vca", {}))
    q, k, _ = (part[0, 0] for part in heads(attn, x))  # (16, d)
    bins = torch.stack([q.reshape(2, 2, 2, 2, -1)[r, :, c].mean((0, 1)) for r in range(2) for c in range(2)])
    maps, d = contrast_maps(attn, x), attn.head_dim
    positive = ((bins + attn.positive_embedding[0]) @ k.T / d**0.5).softmax(-1)
    negative = (q @ (bins + attn.negative_embedding[0]).T / d**0.5).softmax(-1)
    close(maps.stage1.positive[0, 0], positive.detach())
    close(maps.stage2.negative[0, 0], negative.detach())


def test_a_grid_may_come_with_the_call():
    attn, _ = layer(("vca", {"value_conv": True, "num_prefix_tokens": 1}))
    x = torch.randn(2, 1 + 6 * 3, 16)
    q, k, v = heads(attn, x)
    maps = contrast_maps(attn, x, (6, 3))
    assert maps.grid_size == (6, 3)
    close(attn._normalise(maps.through() @ (v * attn.norm1.weight), attn.norm2), attn.attend(q, k, v, (6, 3)), 1e-5)
    with pytest.raises(ValueError, match="grid_size: 4 x 4"):
        contrast_maps(attn, x)
    for call in (lambda: attn(x, (6, 3)), lambda: attn(x, grid_size=(6, 3))):
        contrast = float(maps.stage1.contrast)
        assert mean_contrast(attn, call)["contrast_stage1"] == pytest.approx(contrast)


def test_sharp_maps_pass_the_check():
    """Large logits round coarsely; the check must not take that for other maps."""
    attn, x = layer(("vca", {"contrast_grid": (4, 4)}), grid=(28, 28))
    with torch.no_grad():
        attn.qkv.weight.mul_(6)
        attn.positive_embedding.mul_(6)
    contrast_maps(attn, x)


def test_precision_is_that_of_the_weights():
    attn, x = layer(("vca", {}))
    maps = contrast_maps(attn, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert contrast_maps(attn, x).stage1.positive.equal(maps.stage1.positive)
    assert contrast_maps(attn.bfloat16(), x).stage1.positive.dtype == torch.float32


def test_the_contrast_of_equal_streams_is_zero_and_of_apart_ones_two():
    attn, x = layer(("vca", {"positive_tokens": "emb", "negative_tokens": "emb"}))
    with torch.no_grad():
        attn.negative_embedding.copy_(attn.positive_embedding)
    assert mean_contrast(attn, lambda: attn(x)) == {"contrast_stage1": 0.0, "contrast_stage2": 0.0}
    maps = contrast_maps(attn, x)
    apart = type(maps.stage1)(torch.eye(4).repeat(2, 1, 1, 1), torch.eye(4).flip(0).repeat(2, 1, 1, 1), 0.5)
    assert apart.contrast == 2
    attn, x = layer(("vca", {"stage1": "vanilla"}))
    assert mean_contrast(attn, lambda: attn(x)).keys() == {"contrast_stage2"}
    attn, x = layer(("mhsa", {}))
    assert mean_contrast(attn, lambda: attn(x)) == {}


def test_the_log_tells_the_contrast_of_vca_runs(tmp_path):
    """At each line that of the weights then, on fixed inputs; it changes no step."""
    trainer = tiny.train(tmp_path / "vca", log__log_every=3, model__gradient_checkpointing=True)
    lines = tiny.metrics(tmp_path / "vca")
    assert [{"contrast_stage1", "contrast_stage2"} <= line.keys() for line in lines] == [True, True]
    assert 0 < lines[0]["contrast_stage1"] < 2
    assert lines[0]["contrast_stage2"] != lines[1]["contrast_stage2"]
    assert trainer.contrast() == {key: lines[1][key] for key in ("contrast_stage1", "contrast_stage2")}
    tiny.train(tmp_path / "seldom", log__log_every=100)
    assert tiny.same_state(tiny.state(tmp_path / "vca", 6), tiny.state(tmp_path / "seldom", 6))
    tiny.train(tmp_path / "plain", model__attention="mhsa", model__attention_options={})
    assert "contrast_stage1" not in tiny.metrics(tmp_path / "plain")[0]


def inputs_and_maps(side, channels, blocks, **options):
    """Two inputs with long names, and the maps of layers on a grid of that side."""
    pictures = random_pictures(2, 4 * side, channels=channels).permute(0, 2, 3, 1).numpy()
    found = {}
    for block in range(blocks):
        attn, x = layer(("vca", {"contrast_grid": (4, 4), **options}), grid=(side, side))
        found[f"block {20 + block}"] = contrast_maps(attn, x + 0.1 * block)
    names = ("grey whale, a...\nt = 0.05", "class 999\nt = 999")
    return [Input(name, picture, picture) for name, picture in zip(names, pictures, strict=True)], found


def texts_of(figure):
    """Text and rectangle of whatever is written on a page, once it is drawn."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in texts]


@pytest.mark.parametrize(
    ("side", "channels", "blocks", "head", "options"),
    [
        (4, 1, COLUMNS, None, {}),
        (32, 3, 1, 1, {"num_prefix_tokens": 1}),
        (16, 3, 1, None, {"stage1": "vanilla", "stage2": "vanilla"}),
    ],
)
def test_pages_are_legible(side, channels, blocks, head, options):
    """No text is cut at the edge or lies over another, and none is below 8 points where 8 inches are 800 pixels."""
    inputs, maps = inputs_and_maps(side, channels, blocks, **options)
    made = dict(itertools.islice(job.pages(inputs, maps, dict.fromkeys(maps, (side - 1, 1)), head), 2))
    assert [*made] == (["query_block_20"] if "stage1" in options else ["contrast", "query_block_20"])
    for figure in made.values():
        assert_legible(figure)


def assert_legible(figure):
    assert figure.get_figwidth() <= 8
    texts = texts_of(figure)
    assert {"query", "input"} & {text for text, _ in texts}
    for text, box in texts:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height
        assert inside, text
    for (text, box), (other, its_box) in itertools.combinations(texts, 2):
        assert not box.overlaps(its_box), (text, other)
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= 8


@pytest.mark.parametrize("part", [0.03, 1e-2, 1e-3, 1e-5])
def test_streams_that_hardly_differ_have_legible_numbers(part):
    inputs, maps = inputs_and_maps(4, 1, COLUMNS)
    for name, found in maps.items():
        positive, negative = found.stage1.positive, found.stage1.negative
        near = replace(found.stage1, negative=positive + part * (negative - positive))
        maps[name] = replace(found, stage1=near)
    assert_legible(contrast_page(inputs, maps))


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0317, "+3.2 %"),
        (0.25, "+25 %"),
        (-0.0013, "-0.13 %"),
        (0.00058, "+0.06 %"),
        (-2.4e-5, "-2e-3 %"),
        (0.0, "+0 %"),
    ],
)
def test_shares_in_percent_are_short(share, text):
    assert percent(share) == text


def test_the_colours_of_a_patch_are_its_preference():
    inputs, maps = inputs_and_maps(4, 1, 1)
    name, figure = next(job.pages(inputs, maps, {}))
    assert name == "contrast"
    (layer_maps,) = maps.values()
    one = layer_maps.stage1
    positive, negative = (a.mean(1).sum(1).reshape(2, 4, 4) for a in (one.positive, one.negative))
    expected = (2 * (positive - negative) / (positive + negative)).detach().numpy()
    assert np.allclose(preference(layer_maps), expected, atol=1e-6)
    shown = [axis.images[0].get_array() for axis in figure.axes if axis.images][2 - 1 :: 2]
    assert np.allclose(np.stack(shown), expected, atol=1e-6)


def test_the_snippet_of_the_page(capsys):
    lines = readme_block("maps", "docs/maps.md")
    exec("\n".join(lines), {})
    printed = capsys.readouterr().out.splitlines()
    for line, told in zip(printed, (line.split("  # ")[1] for line in lines if "  # " in line), strict=True):
        assert (
            line.replace("torch.Size([", "(")
            .replace("])", ")")
            .startswith(told.split(" and how")[0].replace("), (", ") ("))
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny trained VCA-SiT with two blocks."""
    folder = tmp_path_factory.mktemp("maps") / "run"
    tiny.train(folder, train__steps=2, model__depth=2)
    return folder


def maps_of(*arguments):
    __main__.main(["maps", *map(str, arguments)])


def test_many_blocks_are_several_pages():
    inputs, maps = inputs_and_maps(4, 1, COLUMNS + 1)
    made = dict(itertools.islice(job.pages(inputs, maps, {}), 2))
    assert [*made] == ["contrast_1", "contrast_2"]
    assert [axis.get_title() for axis in made["contrast_2"].axes if axis.get_title()] == ["input", "block 26"]


def test_pages_of_a_run(run):
    maps_of(run, "--labels=3,7,3", "--times=0.5", "--block=1", "--query=3,0", "--num_steps=2")
    assert sorted(file.name for file in (run / "maps").iterdir()) == ["contrast.png", "query_block_1.png"]
    assert all(Image.open(file).width > 700 for file in (run / "maps").iterdir())
    loaded = vcagen.load(run)
    latents = torch.randn(2, *loaded.latent_shape)
    inputs, maps = job.look(loaded, latents, torch.tensor([3, 7]), [0.0, 1.0])
    assert [one.name for one in inputs] == ["class 3\nt = 0", "class 3\nt = 1", "class 7\nt = 0", "class 7\nt = 1"]
    assert np.array_equal(inputs[3].picture, inputs[3].clean)
    assert not np.array_equal(inputs[2].picture, inputs[2].clean)
    assert [len(layer_maps.scale) for layer_maps in maps.values()] == [4, 4]
    alone, _ = job.look(loaded, latents[:1], torch.tensor([3]), [0.0])
    assert np.array_equal(alone[0].picture, inputs[0].picture)


def test_times_of_a_diffusion_are_whole(tmp_path):
    tiny.train(tmp_path, train__steps=1, process__name="diffusion")
    maps_of(tmp_path, "--labels=1", "--num_steps=2", f"--out={tmp_path / 'out'}")
    assert len(list((tmp_path / "out").iterdir())) == 2
    with pytest.raises(ValueError, match=r"times: 0\.2; needs whole numbers from 0 to 999"):
        maps_of(tmp_path, "--times=0.2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--labels=ten"], "labels: 'ten' is not a class"),
        (["--labels=random"], "labels: random; give labels"),
        (["--times=2"], "times: 2; needs numbers from 0 to 1"),
        (["--times=early"], "times: early; needs numbers"),
        (["--block=2"], "block: 2; the blocks with VCA are 0, 1"),
        (["--block=last"], "block: last; the blocks"),
        (["--query=4,0"], "query: 4,0; block 0 takes row,column from 0,0 to 3,3"),
        (["--query=1"], "query: 1; block 0 takes row,column"),
        (["--head=2"], "head: 2; block 0 has 0 to 1"),
    ],
)
def test_what_is_not_there_is_named(run, arguments, message):
    with pytest.raises(ValueError, match=message):
        maps_of(run, *arguments)


def test_no_maps_without_vca_or_a_run(tmp_path):
    tiny.train(tmp_path / "plain", train__steps=1, model__attention="mhsa", model__attention_options={})
    with pytest.raises(ValueError, match="attention: this network has no Visual-Contrast"):
        maps_of(tmp_path / "plain")
    assert not (tmp_path / "plain" / "maps").exists()
    with pytest.raises(OSError, match="nowhere"):
        maps_of(tmp_path / "nowhere")


@pytest.mark.slow
def test_maps_of_recognition_networks(tmp_path):
    """Stages of other grids, a class token, and a checkpoint as timm's script writes it."""
    import timm

    import vcagen.recognition  # noqa: F401

    network = timm.create_model("vca_pvt_tiny", num_classes=3)
    checkpoint, args = tmp_path / "checkpoint.pth.tar", argparse.Namespace(model="vca_pvt_tiny")
    torch.save({"state_dict": network.state_dict(), "args": args, "arch": args.model}, checkpoint)
    Image.fromarray(random_pictures(1, 300)[0].permute(1, 2, 0).numpy()).save(tmp_path / "cat.png")
    options = [f"--weights={checkpoint}", f"--images={tmp_path / 'cat.png'}"]
    out = tmp_path / "out"
    maps_of("vca_pvt_tiny", *options, "--block=2.1,3.0", f"--out={out}")
    assert sorted(file.stem for file in out.iterdir()) == ["contrast", "query_block_2.1", "query_block_3.0"]
    inputs, maps = look_at_images(load_classifier(args.model, str(checkpoint)), [tmp_path / "cat.png"])
    assert inputs[0].picture.shape == (224, 224, 3)
    assert [maps[f"block {name}"].grid_size for name in ("0.0", "3.1")] == [(56, 56), (7, 7)]
    for arguments, message in (
        (["vca_pvt_huge", *options], "vca_pvt_huge: timm has no network"),
        (["vca_pvt_tiny", options[1]], "weights: missing"),
        (["vca_pvt_small", *options], "checkpoint.pth.tar: not of vca_pvt_small: stages.0"),
        (["vca_pvt_tiny", options[0], f"--images={tmp_path / 'none.png'}"], "none.png"),
        (["vca_pvt_tiny", *options, "--block=4"], "block: 4; the blocks with VCA are 0.0, 0.1"),
    ):
        with pytest.raises(ValueError, match=message):
            maps_of(*arguments)
