"""The backbone against outputs of the public DiT and SiT code."""

import pytest
import torch
from helpers import reference, u

from vcagen.networks.attention import ATTENTION
from vcagen.networks.dit import DIT_SIZES, DiT, TimestepEmbedder, parse_size, sincos_positions

TINY = {"input_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 64, "depth": 3, "num_heads": 4}


def tiny_dit(out_channels=8, num_classes=10, **kwargs):
    torch.manual_seed(0)
    return DiT(**{**TINY, **kwargs}, out_channels=out_channels, num_classes=num_classes)


def formula_weights(model):
    names = sorted(name for name in model.state_dict() if name != "pos_embed")
    state = {name: 0.1 * u(model.state_dict()[name].shape, k) for k, name in enumerate(names, start=1)}
    model.double().load_state_dict({**state, "pos_embed": model.pos_embed})
    return model.eval()


def randomised(model):
    """Weights that are nowhere zero, so that every path matters."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.requires_grad:
                parameter.add_(0.1 * u(parameter.shape, 3000 + index).to(parameter))
    return model


def close(actual, expected, tolerance=1e-6):
    expected = torch.as_tensor(expected, dtype=actual.dtype).reshape(actual.shape)
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("name", ["dit", "sit"])
def test_forward_equals_the_public_code(name):
    stored = reference(name)
    case = stored[f"{name}_forward"]
    model = formula_weights(tiny_dit())
    assert sorted(model.state_dict()) == sorted(stored["parameter_names"])
    output = model(u((2, 4, 8, 8), case["x_k"]), torch.tensor(case["t"]), torch.tensor(case["y"]))
    close(output[:, : 8 if name == "dit" else 4], case["output"])


def test_float32_agrees_to_1e_4():
    case = reference("dit")["dit_forward"]
    model = formula_weights(tiny_dit()).float()
    output = model(u((2, 4, 8, 8), case["x_k"]).float(), torch.tensor(case["t"]), torch.tensor(case["y"]))
    close(output, case["output"], 1e-4)


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_new_network_outputs_exactly_zero(attention):
    model = tiny_dit(attention=attention)
    output = model(u((2, 4, 8, 8), 1).float(), torch.tensor([0, 999]), torch.tensor([0, 10]))
    assert output.shape == (2, 8, 8, 8)
    assert not output.any()


def test_initialisation_is_the_public_one():
    model = DiT(**{**TINY, "hidden_size": 256}, out_channels=8, num_classes=1000)
    qkv = model.blocks[0].attn.qkv.weight
    bound = (6 / (256 + 768)) ** 0.5
    assert 0.99 * bound < qkv.abs().max() <= bound
    patches = model.x_embedder.proj.weight
    bound = (6 / (256 + 16)) ** 0.5
    assert 0.97 * bound < patches.abs().max() <= bound
    for embedding in (model.y_embedder.embedding_table.weight, model.t_embedder.mlp[0].weight):
        assert embedding.std().item() == pytest.approx(0.02, rel=0.05)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("attention", ATTENTION)
def test_rectangular_latents(attention):
    model = randomised(tiny_dit(input_size=(8, 12), attention=attention))
    x = u((2, 4, 8, 12), 1).float()
    output = model(x, torch.tensor([0.1, 0.9]), torch.tensor([1, 2]))
    assert output.shape == (2, 8, 8, 12)
    alone = model(x[1:], torch.tensor([0.9]), torch.tensor([2]))
    close(output[1:], alone, 1e-5)


def test_positions_tell_rows_from_columns():
    table = sincos_positions((2, 3), 8)[0].reshape(2, 3, 8)
    assert torch.equal(table[0, 1, :4], table[1, 1, :4])  # same column
    assert torch.equal(table[1, 0, 4:], table[1, 2, 4:])  # same row
    assert table[1, 2, 0].item() == pytest.approx(torch.sin(torch.tensor(2.0)).item())


def test_patches_are_laid_out_as_in_the_public_code():
    model = tiny_dit(out_channels=3)
    patches = torch.arange(16 * 12.0).reshape(1, 16, 12)
    image = model.unpatchify(patches)
    assert image[0, 1, 2, 5] == patches[0, 1 * 4 + 2, (0 * 2 + 1) * 3 + 1]


def test_no_dropout_no_null_label():
    assert tiny_dit().null_label == 10
    model = tiny_dit(class_dropout_prob=0.0)
    assert model.null_label is None
    assert model.y_embedder.embedding_table.num_embeddings == 10


@pytest.mark.parametrize("attention", ATTENTION)
def test_gradient_checkpointing_changes_nothing(attention):
    gradients = []
    for checkpointing in (False, True):
        model = randomised(tiny_dit(attention=attention, gradient_checkpointing=checkpointing))
        model(u((2, 4, 8, 8), 1).float(), torch.tensor([5, 6]), torch.tensor([1, 2])).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize("attention", ATTENTION)
def test_every_parameter_learns_and_the_state_dict_round_trips(attention):
    model = randomised(tiny_dit(attention=attention))
    x, t, y = u((2, 4, 8, 8), 1).float(), torch.tensor([5, 6]), torch.tensor([1, 2])
    output = model(x, t, y)
    output.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert name == "pos_embed" or parameter.grad.any(), name
    copy = tiny_dit(attention=attention)
    copy.load_state_dict(model.state_dict())
    assert torch.equal(copy(x, t, y), output)


def test_nothing_random_in_forward():
    model = randomised(tiny_dit()).train()
    state = torch.get_rng_state()
    model(u((2, 4, 8, 8), 1).float(), torch.tensor([5, 6]), torch.tensor([1, 2]))
    assert torch.equal(state, torch.get_rng_state())


def test_sizes():
    assert {name: size["depth"] for name, size in DIT_SIZES.items()} == {"S": 12, "B": 12, "L": 24, "XL": 28}
    assert parse_size("XL/4") == {"hidden_size": 1152, "depth": 28, "num_heads": 16, "patch_size": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 3}, "patch_size: 8 x 8 is not divisible by 3"),
        ({"num_heads": 5}, "num_heads: width 64 is not divisible by 5"),
        ({"attention": "mha"}, "attention: 'mha' is not one of mhsa, vca"),
        ({"mlp_ratio": float("inf")}, "mlp_ratio: inf"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio: nan"),
        ({"mlp_ratio": 1e300}, r"mlp_ratio: 1e\+300"),
        ({"mlp_ratio": 1e-9}, "mlp_ratio: 1e-09"),
        ({"attention_options": {1: 2}}, "attention_options: 1 is not the name of an option"),
        ({"attention": "mhsa", "attention_options": {"stage1": "contrast"}}, "mhsa has no option stage1"),
        ({"attention": "vca", "attention_options": {"stage1": "contrats"}}, "stage1: 'contrats' is not one of"),
        ({"input_size": (8, 0)}, "input_size: "),
        ({"class_dropout_prob": 1.5}, "class_dropout_prob: 1.5"),
        ({"hidden_size": 66, "num_heads": 3}, "hidden_size: 66"),
    ],
)
def test_bad_values_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        tiny_dit(**change)
    with pytest.raises(ValueError, match="size: 'M/2'"):
        parse_size("M/2")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_network_still_tells_times_apart(dtype):
    """Rounding the sinusoids' frequencies would be 23 % wrong; what is left is the MLP's own rounding."""
    torch.manual_seed(0)
    embedder, t = TimestepEmbedder(64), torch.tensor([999, 503, 1])
    exact = embedder(t)
    assert (embedder.to(dtype)(t).float() - exact).norm() < 0.01 * exact.norm()
