"""The maps of Visual-Contrast Attention against its output and the equations, their pages, their trace in the log."""

import pytest
import tiny
import torch
from helpers import close
from test_attention import VARIANTS, layer, name_of

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
