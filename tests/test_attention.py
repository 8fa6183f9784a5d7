"""Visual-Contrast Attention against a float64 evaluation of the paper's equations, and against fused attention."""

import itertools

import pytest
import timm
import torch
import torch.nn.functional as F
from helpers import reference, u
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from vcagen.networks.attention import ATTENTION, VisualContrastAttention, make_attention, pool_by_products

CASES = reference("vca")["cases"]
STAGES = ("contrast", "differential", "vanilla")
TOKENS = ("pool", "emb", "pool+emb")
VARIANTS = [("mhsa", {})] + [
    ("vca", options)
    for options in (
        *({"stage1": a, "stage2": b} for a, b in itertools.product(STAGES, STAGES)),
        *({"positive_tokens": a, "negative_tokens": b} for a, b in itertools.product(TOKENS, TOKENS)),
        {"contrast_grid": (2, 3)},
        {"contrast_grid": (8, 8)},
        {"num_prefix_tokens": 1},
        {"num_prefix_tokens": 2, "value_conv": True},
    )
]


def name_of(variant):
    return variant[0] + ":" + ",".join(map(str, variant[1].values()))


def module_of(case):
    heads, d = case["num_heads"], case["head_dim"]
    keys = ("contrast_grid", "stage1", "stage2", "positive_tokens", "negative_tokens", "block_index")
    module = VisualContrastAttention(heads * d, heads, grid_size=case["grid"], **{k: case[k] for k in keys}).double()
    k, scale = case["k"], case["scale"]
    with torch.no_grad():
        for name, factor, key in (
            ("positive_embedding", scale["embedding"], "positive_embedding"),
            ("negative_embedding", scale["embedding"], "negative_embedding"),
            ("lambda1", scale["lambda_vectors"], "lambda1_vectors"),
            ("lambda2", scale["lambda_vectors"], "lambda2_vectors"),
        ):
            parameter = getattr(module, name)
            if parameter is not None:
                parameter.copy_(factor * u(parameter.shape, k[key]))
    return module


def qkv_of(case):
    shape = (case["batch"], case["num_heads"], case["grid"][0] * case["grid"][1], case["head_dim"])
    return [case["scale"]["qkv"] * u(shape, case["k"][name]) for name in "qkv"]


def layer(variant, grid=(4, 4), dim=16, heads=2):
    """A layer with every parameter away from zero, and an input of two rows."""
    name, options = variant
    torch.manual_seed(0)
    module = make_attention(name, dim, heads, grid_size=grid, block_index=1, **{"contrast_grid": (2, 2), **options}
                            if name == "vca" else options)  # fmt: skip
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.add_(0.3 * u(parameter.shape, 700 + index).to(parameter))
    tokens = grid[0] * grid[1] + options.get("num_prefix_tokens", 0)
    return module, u((2, tokens, dim), 699).float()


def test_eleven_cases_are_stored():
    assert len(CASES) == 11


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['stage1']}-{c['stage2']}-{c['grid']}-{c['contrast_grid']}")
def test_attend_equals_the_equations(case):
    module, (q, k, v) = module_of(case), qkv_of(case)
    for stage in ("lambda1", "lambda2"):
        vectors = getattr(module, stage)
        if vectors is not None:
            assert module._lambda(vectors).item() == pytest.approx(case[stage], rel=1e-9)
    output = module.attend(q, k, v)
    expected = torch.tensor(case["output"], dtype=torch.float64).reshape(output.shape)
    assert (output - expected).abs().max() <= 1e-6 * expected.abs().max()


def fused_attend(module, q, k, v):
    """The contrast stages on fused attention: one call of 2n queries, then the difference of two calls."""
    d, init = module.head_dim, module.lambda_init
    streams = module._streams(module._pool(q)) * d**0.5
    both = F.scaled_dot_product_attention(streams, k, v)
    positive, negative = both.chunk(2, dim=-2)
    values = positive - module._lambda(module.lambda1) * negative
    values = F.rms_norm(values, (d,), module.norm1.weight, 1e-5) * (1 - init)
    plus, minus = (F.scaled_dot_product_attention(q, t, values) for t in streams.chunk(2, dim=-2))
    return F.rms_norm(plus - module._lambda(module.lambda2) * minus, (d,), module.norm2.weight, 1e-5) * (1 - init)


@pytest.mark.parametrize("grid", [(16, 16), (5, 7), (4, 4)])
def test_attend_equals_fused_attention(grid):
    module, _ = layer(("vca", {"contrast_grid": (8, 8)}), grid, dim=32)
    q, k, v = (u((2, 2, grid[0] * grid[1], 16), 710 + i).float() for i in range(3))
    torch.testing.assert_close(module.attend(q, k, v), fused_attend(module, q, k, v), rtol=1e-4, atol=1e-5)


def test_pooling_bins_are_those_of_adaptive_pooling():
    for grid, contrast in (((4, 6), (2, 3)), ((5, 7), (2, 3)), ((2, 2), (4, 4)), ((8, 8), (8, 8)), ((9, 6), (3, 4))):
        module = VisualContrastAttention(8, 2, grid_size=grid, contrast_grid=contrast, num_prefix_tokens=1)
        q = u((1, 2, 1 + grid[0] * grid[1], 4), 1).float()
        field = q[:, :, 1:].reshape(2, *grid, 4).permute(0, 3, 1, 2)
        expected = F.adaptive_avg_pool2d(field, contrast).flatten(2).mT.reshape(1, 2, -1, 4)
        torch.testing.assert_close(module._pool(q), expected)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_every_variant(variant):
    module, x = layer(variant)
    output = module(x)
    assert output.shape == x.shape
    output.square().mean().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any() or name == "qkv.bias", name
    copy, _ = layer(variant)
    copy.load_state_dict(module.state_dict())
    assert torch.equal(copy(x), output)
    torch.testing.assert_close(module(x[1:]), output[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "variant",
    [*VARIANTS[:2], *(pytest.param(variant, marks=pytest.mark.slow) for variant in VARIANTS[2:])],
    ids=name_of,
)
def test_compiles_whole_with_a_dynamic_batch(variant):
    module, x = layer(variant)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch in (x, x.repeat(2, 1, 1), x.repeat(3, 1, 1)):
        torch.testing.assert_close(compiled(batch), module(batch), rtol=1e-5, atol=1e-6)
    compiled(x).square().mean().backward()


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(16, 16), (5, 7)])
def test_inductor_agrees(grid):
    module, x = layer(("vca", {"contrast_grid": (8, 8)}), grid)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)


def test_options_create_only_what_they_need():
    def names(**options):
        return {name for name, _ in layer(("vca", options))[0].named_parameters()} - {
            "qkv.weight", "qkv.bias", "proj.weight", "proj.bias",
        }  # fmt: skip

    embeddings = {"positive_embedding", "negative_embedding"}
    first, second = {"lambda1", "norm1.weight"}, {"lambda2", "norm2.weight"}
    assert names() == embeddings | first | second
    assert names(stage1="vanilla", stage2="vanilla") == set()
    assert names(stage1="differential", stage2="differential") == first | second
    assert names(stage2="vanilla") == embeddings | first
    assert names(positive_tokens="pool") == {"negative_embedding"} | first | second
    module, _ = layer(("vca", {}))
    assert module.positive_embedding.shape == (2, 4, 8)
    assert module.lambda1.shape == (4, 8)


class LargestTensor(TorchDispatchMode):
    """Records the largest output of any operation."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return output


def test_memory_grows_linearly_with_tokens():
    largest = {}
    for side in (16, 32, 64, 128):
        module = VisualContrastAttention(32, 2, grid_size=side).to("meta")
        x = torch.empty(1, side * side, 32, device="meta", requires_grad=True)
        with LargestTensor() as record:
            module(x).sum().backward()
        largest[side * side] = record.numel
    assert largest[256] < 256 * 256 * 2
    assert all(largest[tokens] == largest[256] * tokens // 256 for tokens in largest)


def test_attend_takes_six_units_where_the_equations_take_seven():
    """A unit is n T D multiply-adds; test_cost.py checks the count of the equations."""
    with torch.device("meta"):
        module = VisualContrastAttention(64, 2, grid_size=8, contrast_grid=4)
        q, k, v = torch.randn(3, 1, 2, 64, 32)
    with FlopCounterMode(display=False) as counter:
        module.attend(q, k, v)
    assert counter.get_total_flops() == 2 * 6 * 16 * 64 * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("side", [16, 64])
@pytest.mark.parametrize("std", [30.0, 1.0, 0.001])
def test_half_precision(dtype, side, std):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 1e-2}[dtype]
    torch.manual_seed(0)
    module = VisualContrastAttention(128, 2, grid_size=side)
    q, k, v = (std * torch.randn(1, 2, side * side, 64) for _ in range(3))
    exact = module.double().attend(q.double(), k.double(), v.double())
    module.to(dtype)
    rounded = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    output = module.attend(*rounded)
    assert output.dtype == dtype
    output.float().mean().backward()
    assert output.isfinite().all()
    assert all(x.grad.isfinite().all() for x in rounded)
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
    if std <= 1:
        assert (output.double() - exact).norm() <= tolerance * exact.norm()


def test_autocast_keeps_softmax_lambda_and_norm_in_float32():
    module, x = layer(("vca", {"contrast_grid": (8, 8)}), (16, 16), dim=32)
    kinds = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            name = function.overloadpacket.__name__
            if name in ("_softmax", "exp", "rsqrt", "_fused_rms_norm"):
                kinds.setdefault(name, set()).add((output if torch.is_tensor(output) else output[0]).dtype)
            return output

    with torch.autocast("cpu", torch.bfloat16), Watch():
        output = module(x)
    assert {"_softmax", "exp"} < kinds.keys()
    assert all(dtypes == {torch.float32} for dtypes in kinds.values()), kinds
    assert (output.float() - module(x)).norm() <= 0.03 * module(x).norm()


@pytest.mark.parametrize("variant", VARIANTS[1:], ids=name_of)
def test_attend_in_float32_under_autocast_has_gradients(variant):
    module, x = layer(variant)
    q, k, v = (u((2, 2, x.shape[1], 8), 720 + i).float().requires_grad_() for i in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        output = module.attend(q, k, v)
    output.float().square().mean().backward()
    assert all(tensor.grad.dtype == torch.float32 and tensor.grad.any() for tensor in (q, k, v))


def test_pooling_of_whole_bins_is_deterministic():
    """Adaptive pooling has no deterministic gradient on GPUs: Table 2's grids (2, 4, 8, 16 to 8) do not use it."""
    for side in (2, 4, 8, 16):
        module = VisualContrastAttention(8, 2, grid_size=side)
        seen = set()

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                seen.add(str(function))  # noqa: B023
                return function(*args, **(kwargs or {}))

        with Watch():
            module(torch.randn(1, side * side, 8)).sum().backward()
        assert not any("adaptive" in name for name in seen)


@pytest.mark.parametrize("grid", [(16, 12), (15, 17), (3, 2)])
def test_odd_grids(grid):
    module, x = layer(("vca", {"contrast_grid": (8, 8)}), grid)
    assert module(x).shape == x.shape


def test_equal_tokens_are_finite():
    module, x = layer(("vca", {}))
    same = x[:, :1].expand_as(x).contiguous().requires_grad_()
    output = module(same)
    output.sum().backward()
    assert output.isfinite().all()
    assert same.grad.isfinite().all()
    assert torch.allclose(output, output[:, :1].expand_as(output), atol=1e-6)


def test_prefix_tokens_stay_out_of_the_pooling():
    module, x = layer(("vca", {"num_prefix_tokens": 1}))
    q = u((1, 2, 17, 8), 5).float()
    changed = q.clone()
    changed[:, :, 0] += 1
    assert torch.equal(module._pool(q), module._pool(changed))
    assert not torch.allclose(module(x)[:, 1:], layer(("vca", {}))[0](x[:, 1:]), atol=1e-4)  # but they are keys


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads: width 16 is not divisible by 3"),
        ({"num_heads": 16}, "num_heads: 16 heads of dim 16 are 1 wide"),
        ({"num_heads": 0}, "num_heads: "),
        ({"grid_size": (0, 4)}, "grid_size: "),
        ({"contrast_grid": (8, 8, 8)}, "contrast_grid: "),
        ({"contrast_grid": 2.5}, "contrast_grid: "),
        ({"stage1": "linear"}, "stage1: 'linear' is not one of contrast, differential, vanilla"),
        ({"negative_tokens": "pool+pool"}, "negative_tokens: 'pool\\+pool'"),
        ({"block_index": -1}, "block_index: -1"),
    ],
)
def test_bad_values_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        VisualContrastAttention(**{"dim": 16, "num_heads": 2, "grid_size": 4, **change})


def test_a_token_count_that_does_not_fit_raises():
    module, x = layer(("vca", {}))
    with pytest.raises(ValueError, match=r"grid_size: 4 x 4 .* the input has 15"):
        module(x[:, 1:])
    with pytest.raises(ValueError, match=r"grid_size: 4 x 4 .* the input has 17"):
        module.attend(*(torch.zeros(1, 2, 17, 8) for _ in range(3)))


def test_registry():
    assert set(ATTENTION) == {"mhsa", "vca"}
    module, x = layer(("mhsa", {}))
    q, k, v = module.qkv(x).reshape(2, 16, 3, 2, 8).permute(2, 0, 3, 1, 4)
    expected = module.proj((q @ k.mT / 8**0.5).softmax(-1).matmul(v).transpose(1, 2).reshape(2, 16, 16))
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize(("grid", "contrast"), [((15, 17), (7, 7)), ((5, 7), (3, 2)), ((14, 14), (8, 8))])
def test_pooling_by_products_is_the_adaptive_pooling(grid, contrast):
    q = torch.randn(2, 3, grid[0] * grid[1], 8, dtype=torch.float64)
    field = q.reshape(2 * 3, *grid, 8).permute(0, 3, 1, 2)
    expected = torch.nn.functional.adaptive_avg_pool2d(field, contrast).permute(0, 2, 3, 1).reshape(2, 3, -1, 8)
    torch.testing.assert_close(pool_by_products(q, grid, contrast), expected)


def test_convolution_of_the_values():
    """The layer with it less the layer without it, before the projection, is torch's own convolution of v."""
    module, x = layer(("vca", {"num_prefix_tokens": 1, "value_conv": True}), (3, 5))
    module.proj = torch.nn.Identity()
    with_it, conv, module.value_conv = module(x), module.value_conv, None
    v = module.qkv(x)[..., 32:]
    local = F.conv2d(v[:, 1:].mT.reshape(2, 16, 3, 5), conv.weight, conv.bias, padding=1, groups=16)
    expected = torch.cat([torch.zeros(2, 1, 16), local.flatten(2).mT], 1)
    torch.testing.assert_close(with_it - module(x), expected, rtol=1e-4, atol=1e-5)
    assert conv.weight.shape == (16, 1, 3, 3)


@pytest.mark.parametrize("options", [{}, {"recompute_maps": True}])
def test_a_grid_at_the_call_is_that_of_the_constructor(options):
    variant = ("vca", {"num_prefix_tokens": 1, "value_conv": True, **options})
    wide, x = layer(variant, (3, 5))
    square, _ = layer(variant)
    square.load_state_dict(wide.state_dict())
    assert torch.equal(square(x, (3, 5)), wide(x))
    assert not torch.allclose(square(x, (5, 3)), wide(x), atol=1e-4)
    with pytest.raises(ValueError, match="grid_size: 4 x 4 with 1 prefix tokens holds 17 tokens, the input has 16"):
        square(x)
    with pytest.raises(ValueError, match="grid_size: 3 x 6 with 1 prefix tokens holds 19 tokens, the input has 16"):
        square(x, (3, 6))


def test_masks_are_refused():
    module, x = layer(("vca", {}))
    assert torch.equal(module(x, attn_mask=None, is_causal=False), module(x))
    for options in ({"attn_mask": torch.zeros(16, 16)}, {"is_causal": True}):
        with pytest.raises(ValueError, match="there is nothing to mask"):
            module(x, **options)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("deit_tiny_patch16_224", 1), ("deit_tiny_distilled_patch16_224", 2), ("vit_small_patch14_reg4_dinov2", 5)],
)
def test_in_the_networks_of_timm(name, prefix):
    network = timm.create_model(name, img_size=56, depth=2, num_classes=3).eval()
    assert network.num_prefix_tokens == prefix
    for index, block in enumerate(network.blocks):
        block.attn = VisualContrastAttention(
            network.embed_dim, block.attn.num_heads, grid_size=network.patch_embed.grid_size, block_index=index,
            contrast_grid=2, num_prefix_tokens=prefix, value_conv=True,
        )  # fmt: skip
    images = u((2, 3, 56, 56), 1).float()
    output = network(images)
    assert output.shape == (2, 3)
    torch.testing.assert_close(network(images[1:]), output[1:], rtol=1e-4, atol=1e-5)


def test_parameters_have_their_shapes_where_nothing_is_initialised():
    """diffusers' loaders build networks with torch's initialisers switched off: they return None."""
    from diffusers.models.modeling_utils import no_init_weights

    expected = {name: p.shape for name, p in VisualContrastAttention(16, 2, grid_size=4).named_parameters()}
    with no_init_weights():
        module = VisualContrastAttention(16, 2, grid_size=4)
    assert {name: p.shape for name, p in module.named_parameters()} == expected


def test_parameters_are_drawn_afresh_after_the_meta_device():
    torch.manual_seed(0)
    expected = VisualContrastAttention(64, 2, grid_size=4)
    assert expected.lambda1.std().item() == pytest.approx(0.1, rel=0.3)
    assert expected.positive_embedding.std().item() == pytest.approx(0.0176, rel=0.05)  # 0.02, truncated
    assert expected.positive_embedding.abs().max() <= 0.04
    with torch.device("meta"):
        module = VisualContrastAttention(64, 2, grid_size=4)
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    module.qkv.reset_parameters()
    module.proj.reset_parameters()
    module.reset_parameters()
    for name in ("positive_embedding", "negative_embedding", "lambda1", "lambda2"):
        assert torch.equal(getattr(module, name), getattr(expected, name)), name
