"""VCA in timm's recognition networks: tiny ones, against second implementations and under timm's conventions."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from helpers import close, python, readme_block, u
from PIL import Image
from timm.data import Mixup, create_dataset, create_loader
from timm.loss import SoftTargetCrossEntropy
from timm.models import group_parameters
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, accuracy, update_summary

from vcagen.data.images import open_dataset_images
from vcagen.networks.attention import VisualContrastAttention
from vcagen.paper.classifiers import read_top1
from vcagen.recognition import MODELS

DEIT, SWIN = "vca_deit_tiny_patch16_224", "vca_swin_tiny_patch4_window7_224"
_PYRAMID = {"embed_dims": (8, 8, 16, 16), "mlp_ratios": (2, 2, 2, 2), "depths": (1, 1, 2, 1)}
_PVT = {**_PYRAMID, "num_heads": (1, 2, 2, 2), "img_size": 64}
_CSWIN = {**_PYRAMID, "num_heads": (2, 2, 2, 2), "img_size": 112}
TINY = {
    DEIT: {"embed_dim": 16, "num_heads": 2, "depth": 3, "img_size": 64},
    SWIN: {"embed_dim": 8, "num_heads": (1, 2, 2, 2), "depths": (1, 1, 3, 2), "contrast_depths": (1, 1, 2, 0),
           "img_size": 64, "window_size": 2},
    "pvt_tiny": _PVT,
    "vca_pvt_tiny": {**_PVT, "contrast_depths": (1, 1, 2, 1)},
    "cswin_tiny": _CSWIN,
    "vca_cswin_tiny": {**_CSWIN, "contrast_depths": (1, 1, 0, 0)},
}  # fmt: skip
OTHER_SIZE = {DEIT: (96, 32), SWIN: (256, 128), "pvt_tiny": (96, 64), "vca_pvt_tiny": (96, 64),
              "cswin_tiny": (224, 112), "vca_cswin_tiny": (224, 112)}  # fmt: skip


def tiny(name, **options):
    """A tiny network of the family, every parameter away from zero, and two images."""
    side = TINY[name]["img_size"]
    options = {**TINY[name], "num_classes": 3, "in_chans": 2, **options}
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * u(parameter.shape, index).to(parameter))
    return model, u((2, 2, side, side), 999).float()


@pytest.mark.parametrize("name", TINY)
class TestEveryFamily:
    def test_forward_backward_and_state(self, name):
        model, x = tiny(name)
        output = model(x)
        assert output.shape == (2, 3)
        torch.testing.assert_close(model(x[1:]), output[1:], rtol=1e-4, atol=1e-5)
        output.square().sum().backward()
        gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
        still = {"blocks.2.attn.value_conv.weight", "blocks.2.attn.value_conv.bias"} if name == DEIT else set()
        assert {key for key, gradient in gradients.items() if not gradient.any()} == still  # only the class is read
        other, _ = tiny(name, drop_path_rate=0.5)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(x), output)
        other.set_grad_checkpointing()
        other(x).square().sum().backward()
        for key, parameter in other.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[key])

    def test_another_size_and_shape(self, name):
        """What a network for any size makes of it is what one that is built for that size makes."""
        size = OTHER_SIZE[name]
        options = {SWIN: {"img_size": 128}}.get(name, {})  # at 64 its last stage is one window, which timm never shifts
        model, _ = tiny(name, **options, **({} if "cswin" in name else {"dynamic_img_size": True}))
        fixed, _ = tiny(name, img_size=size)
        x = u((2, 2, *size), 1).float()
        output = model(x)
        output.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        fixed.load_state_dict({**model.state_dict(), **resampled_positions(model, fixed)})
        torch.testing.assert_close(fixed(x), output, rtol=1e-4, atol=1e-5)

    def test_features(self, name):
        model, _ = tiny(name)
        x = u((1, 2, TINY[name]["img_size"], TINY[name]["img_size"]), 1).float()
        final, features = model.forward_intermediates(x, indices=[0, 2], norm=False)
        torch.testing.assert_close(final, model.forward_features(x))
        early = model.forward_intermediates(x, indices=[0, 2], stop_early=True, intermediates_only=True)
        assert all(map(torch.equal, features, early))
        torch.manual_seed(0)
        body = timm.create_model(name, features_only=True, out_indices=(0, 2), **{**TINY[name], "in_chans": 2}).eval()
        state = model.state_dict()
        own = {key: state[key.removeprefix("model.").replace("layers_", "layers.")] for key in body.state_dict()}
        body.load_state_dict(own)
        for found, feature, channels, reduction in zip(
            body(x), features, body.feature_info.channels(), body.feature_info.reduction(), strict=True
        ):
            found = found.permute(0, 3, 1, 2) if name == SWIN else found
            torch.testing.assert_close(found, feature)
            assert feature.shape[1] == channels
            assert x.shape[2] / feature.shape[2] == reduction

    def test_conventions_of_timm(self, name):
        model, x = tiny(name, drop_rate=0.1)
        assert timm.data.resolve_data_config({}, model=model)["input_size"] == (3, 224, 224)
        assert timm.data.resolve_data_config({}, model=model)["crop_pct"] == 0.9
        assert timm.is_model(name)
        decayed = {
            id(p) for g in create_optimizer_v2(model, "adamw", weight_decay=0.05).param_groups
            if g["weight_decay"] for p in g["params"]
        }  # fmt: skip
        spared = {key for key, parameter in model.named_parameters() if id(parameter) not in decayed}
        for key, module in model.named_modules():
            if isinstance(module, VisualContrastAttention):
                own = {"positive_embedding", "negative_embedding", "lambda1", "lambda2", "norm1.weight", "norm2.weight"}
                assert {f"{key}.{part}" for part in own} <= spared
                assert not {f"{key}.{part}.weight" for part in ("qkv", "proj", "value_conv")} & spared
        layers = group_parameters(model, model.group_matcher())
        assert sum(map(len, layers.values())) == len(list(model.parameters()))
        model.reset_classifier(7)
        assert model(x).shape == (2, 7)
        assert model.get_classifier().out_features == 7
        model.reset_classifier(0, "")
        assert model(x).shape[-1] == model.num_features
        assert model(x).ndim > 2
        assert torch.equal(model.forward_head(model.forward_features(x), pre_logits=True), model(x))

    @pytest.mark.slow
    def test_compiles_whole(self, name):
        model, x = tiny(name)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        output = compiled(x)
        torch.testing.assert_close(output, model(x), rtol=1e-4, atol=1e-5)
        output.square().sum().backward()


def resampled_positions(model, fixed):
    """The positions of `fixed`: those of `model`, resampled by timm."""
    tables = {}
    for key, table in model.state_dict().items():
        if key.endswith("pos_embed"):
            old, new = ((m.patch_embed if key == "pos_embed" else m.stages[int(key[7])]) for m in (model, fixed))
            prefix = int(key == "pos_embed")  # DeiT's class token
            tables[key] = timm.layers.resample_abs_pos_embed(
                table, list(new.grid_size), list(old.grid_size), num_prefix_tokens=prefix
            )
    return tables


def test_fifteen_names_and_none_of_timms():
    assert len(MODELS) == 15
    assert set(timm.list_models("vca_*")) == {name for name in MODELS if name.startswith("vca_")}
    assert not timm.list_models("vca_*", pretrained=True)


@pytest.mark.parametrize(
    ("name", "kept"),
    [(DEIT, (152, 152)), (SWIN, (163, 173)), ("vca_swin_base_patch4_window7_224", (323, 329))],
)
def test_weights_of_timm_load(name, kept):
    """All of them but Swin's position tables; what misses is what is new in the attention."""
    with torch.device("meta"):
        ours = timm.create_model(name)
        theirs = timm.create_model(name.removeprefix("vca_"))
    weights = theirs.state_dict()
    found = ours.load_state_dict(weights, strict=False, assign=True)
    assert (len(weights) - len(found.unexpected_keys), len(weights)) == kept
    assert all(key.endswith("relative_position_bias_table") for key in found.unexpected_keys)
    new = ("positive_embedding", "negative_embedding", "lambda1", "lambda2", "attn.norm1.weight", "attn.norm2.weight",
           "value_conv.weight", "value_conv.bias")  # fmt: skip
    assert all(key.endswith(new) for key in found.missing_keys)
    assert len(found.missing_keys) == 8 * sum(isinstance(m, VisualContrastAttention) for m in ours.modules())


def test_stages_of_swin_base():
    """Two blocks of stage 3 attend to the stage, sixteen keep timm's windows, every second one shifted."""
    with torch.device("meta"):
        stages = timm.create_model("vca_swin_base_patch4_window7_224").layers
    kinds = [[type(block.attn).__name__ for block in stage.blocks] for stage in stages]
    vca, window = "VisualContrastAttention", "WindowAttention"
    assert kinds == [[vca] * 2, [vca] * 2, [vca] * 2 + [window] * 16, [window] * 2]
    assert [block.shift_size[0] for block in stages[2].blocks[2:]] == [0, 3] * 8
    attentions = [block.attn for stage in stages for block in stage.blocks if type(block.attn).__name__ == vca]
    assert [a.contrast_grid[0] for a in attentions] == [3, 3, 4, 4, 7, 7]
    inits = [0.8 - 0.6 * math.exp(-0.3 * index) for index in range(6)]
    assert [a.lambda_init for a in attentions] == pytest.approx(inits)


def test_options_of_tables_3_and_4():
    options = {"stage2": "vanilla", "negative_tokens": "pool", "value_conv": False}
    model, x = tiny(DEIT, contrast_grid=2, attention_options=options)
    assert model(x).shape == (2, 3)
    assert all(block.attn.lambda2 is None and block.attn.value_conv is None for block in model.blocks)


def layer_norm(state, key, x, eps):
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed * state[f"{key}.weight"] + state[f"{key}.bias"]


def linear(state, key, x):
    return x @ state[f"{key}.weight"].mT + state[f"{key}.bias"]


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def reduced_attention(state, key, x, grid, heads, ratio):
    """PVT's equations: keys and values of x' = norm(W_s reshape(x, R)), R the ratio of both sides."""
    reduced = x
    if ratio > 1:
        rows, columns = grid[0] // ratio, grid[1] // ratio
        patches = x.reshape(len(x), rows, ratio, columns, ratio, -1).permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)
        weight, bias = state[f"{key}.sr.weight"].flatten(1), state[f"{key}.sr.bias"]
        reduced = layer_norm(state, f"{key}.norm", patches @ weight.mT + bias, 1e-5)
    q = heads_of(linear(state, f"{key}.q", x), heads)
    k, v = (heads_of(part, heads) for part in linear(state, f"{key}.kv", reduced).chunk(2, -1))
    maps = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return linear(state, f"{key}.proj", (maps @ v).transpose(1, 2).flatten(2))


def cross_shaped_attention(state, key, x, grid, heads, stripe):
    """CSwin's equations token by token: attention and LePE see the tokens of one's own stripe."""
    rows, columns = (side.flatten() for side in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
    groups = [torch.zeros_like(rows)] if stripe is None else [columns // stripe, rows // stripe]
    q, k, v = linear(state, f"{key}.qkv", x).chunk(3, -1)
    kernel, bias = state[f"{key}.value_conv.weight"], state[f"{key}.value_conv.bias"]
    outputs = []
    for part, stripes in zip(torch.arange(x.shape[-1]).chunk(len(groups)), groups, strict=True):
        together = stripes[:, None] == stripes
        one, two, three = (heads_of(y[..., part], heads // len(groups)) for y in (q, k, v))
        logits = (one @ two.mT / one.shape[-1] ** 0.5).masked_fill(~together, -torch.inf)
        out = (logits.softmax(-1) @ three).transpose(1, 2).flatten(2) + bias[part]
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                near = (rows == rows[:, None] + down) & (columns == columns[:, None] + right) & together
                out = out + kernel[part, 0, down + 1, right + 1] * (near.to(v.dtype) @ v[..., part])
        outputs.append(out)
    return linear(state, f"{key}.proj", torch.cat(outputs, -1))


@pytest.mark.parametrize("name", ["pvt_tiny", "cswin_tiny"])
def test_plain_pyramids_are_those_of_the_papers(name):
    """The whole network once more, from its weights and the papers' equations, in float64."""
    model, x = tiny(name)
    model, x = model.double(), x.double()
    state, options = model.state_dict(), TINY[name]
    pvt = name == "pvt_tiny"
    kernels, paddings, eps = ((4, 2, 2, 2), (0,) * 4, 1e-6) if pvt else ((7, 3, 3, 3), (2, 1, 1, 1), 1e-5)
    field = x
    for stage in range(4):
        key, stride = f"stages.{stage}", 2 if stage else 4
        assert state[f"{key}.embed.weight"].shape[2] == kernels[stage]
        field = F.conv2d(field, state[f"{key}.embed.weight"], state[f"{key}.embed.bias"], stride, paddings[stage])
        grid = field.shape[2:]
        tokens = layer_norm(state, f"{key}.embed_norm", field.flatten(2).mT, 1e-5)
        tokens = tokens + state[f"{key}.pos_embed"] if pvt else tokens
        for index in range(options["depths"][stage]):
            block, heads = f"{key}.blocks.{index}", options["num_heads"][stage]
            normed = layer_norm(state, f"{block}.norm1", tokens, eps)
            if pvt:
                ratio = (8, 4, 2, 1)[stage]
                tokens = tokens + reduced_attention(state, f"{block}.attn", normed, grid, heads, ratio)
            else:
                stripe = (1, 2, 7, None)[stage]
                tokens = tokens + cross_shaped_attention(state, f"{block}.attn", normed, grid, heads, stripe)
            hidden = linear(state, f"{block}.mlp.fc1", layer_norm(state, f"{block}.norm2", tokens, eps))
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
            tokens = tokens + linear(state, f"{block}.mlp.fc2", hidden)
        field = tokens.mT.unflatten(2, grid)
    tokens = tokens if pvt else layer_norm(state, "norm", tokens, eps)
    close(model(x), linear(state, "head", tokens.mean(1)), 1e-9)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (DEIT, {"pretrained": True}, f"pretrained: no weights of {DEIT} are published; train it"),
        ("cswin_tiny", {"pretrained": True}, "pretrained: no weights of cswin_tiny are published"),
        (DEIT, {"contrast_grid": (7, 0)}, "contrast_grid: "),
        (DEIT, {"qk_norm": True}, "qk_norm: Visual-Contrast Attention does not have it"),
        (DEIT, {"attention_options": {"stage": 1}}, "attention_options: vca has no option stage"),
        (SWIN, {"contrast_grids": (3, 4)}, "contrast_grids: 2 values for 4 stages"),
        (SWIN, {"contrast_grids": (3, 4, 0, 7)}, "contrast_grids: 0 is not a positive integer"),
        (SWIN, {"contrast_depths": (2, 1, 2, 0)}, "contrast_depths: 2 of the 1 blocks of a stage"),
        (SWIN, {"img_size": 160}, "img_size: windows of 2 x 2 do not divide the 5 x 5 tokens .* multiples of 64"),
        ("vca_pvt_tiny", {"contrast_depths": (1, 1, 2)}, "contrast_depths: 3 values for 4 stages"),
        ("vca_pvt_tiny", {"img_size": 0}, "img_size: 0 is not a positive integer"),
        ("vca_pvt_tiny", {"global_pool": "token"}, "global_pool: 'token' is not 'avg' or ''"),
        ("vca_cswin_tiny", {"img_size": 128}, "img_size: stripes of 7 do not divide the 8 x 8 tokens .* of 112"),
    ],
)
def test_bad_values_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        tiny(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "size", "message"),
    [
        (SWIN, {"dynamic_img_size": True}, 160, "img_size: windows of 2 x 2 do not divide the 5 x 5 tokens"),
        ("cswin_tiny", {}, 128, "img_size: stripes of 7 do not divide the 8 x 8 tokens of a stage; choose sides that"),
        ("vca_pvt_tiny", {}, 96, "img_size: a stage has 24 x 24 tokens and positions for 16 x 16; give img_size"),
    ],
)
def test_images_that_do_not_fit_are_refused(name, options, size, message):
    model, _ = tiny(name, **options)
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(1, 2, size, size))


def test_another_input_size_of_swin_is_checked():
    model, x = tiny(SWIN)
    model.set_input_size((128, 128), window_size=4)
    assert model(F.interpolate(x, (128, 128))).shape == (2, 3)
    with pytest.raises(ValueError, match="img_size: windows of 3 x 3 do not divide the 8 x 8 tokens"):
        model.set_input_size((128, 128), window_size=3)


def test_snippet_of_the_page(capsys):
    exec("\n".join(readme_block("use", "docs/recognition.md")), {})
    assert capsys.readouterr().out == "torch.Size([2, 10])\n[(1, 28, 28, 192), (1, 7, 7, 768)]\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (DEIT, {"patch_size": 8, "embed_dim": 64, "num_heads": 4, "depth": 3, "contrast_grid": 2}),
        ("vca_pvt_tiny", {**TINY["vca_pvt_tiny"], "embed_dims": (16, 32, 64, 64)}),
    ],
)
def test_training_by_the_functions_of_timm(tmp_path, name, shape):
    """The recipe of docs/recognition.md on a folder of digits, as timm's train.py does it, up to its summary.csv."""
    digits = open_dataset_images("digits")
    for i in range(600):
        folder = tmp_path / ("train" if i < 500 else "val") / str(digits.labels[i])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits[i][0].numpy()).resize((32, 32)).save(folder / f"{i}.png")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, drop_path_rate=0.05, in_chans=1, **{**shape, "img_size": 32})
    loaders = [
        create_loader(create_dataset("", tmp_path, split=split, input_img_mode="L"), (1, 32, 32), 20,
                      is_training=split == "train", use_prefetcher=False, num_workers=0, scale=(0.8, 1), hflip=0,
                      mean=(0.5,), std=(0.5,), crop_pct=1.0, re_prob=0.1, persistent_workers=False)
        for split in ("train", "val")
    ]  # fmt: skip
    mixup, loss_of = Mixup(0.2, 0.2, label_smoothing=0.1, num_classes=10), SoftTargetCrossEntropy()
    optimizer = create_optimizer_v2(model, "adamw", lr=2e-3, weight_decay=0.05)
    scheduler, epochs = create_scheduler_v2(optimizer, num_epochs=8, warmup_epochs=1, warmup_lr=1e-4, min_lr=1e-4)
    ema = ModelEmaV3(model, decay=0.9)
    for epoch in range(epochs):
        model.train()
        for images, targets in loaders[0]:
            images, soft = mixup(images, targets)
            loss = loss_of(model(images), soft)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
        scheduler.step(epoch + 1)
        ema.eval()
        with torch.inference_mode():
            top1 = sum(accuracy(ema(images), targets)[0].item() for images, targets in loaders[1]) / len(loaders[1])
        metrics = {"loss": loss.item()}, {"top1": top1}
        summary = tmp_path / name / "summary.csv"
        summary.parent.mkdir(exist_ok=True)
        update_summary(epoch, *metrics, filename=summary, write_header=epoch == 0)
    found = read_top1(tmp_path, name)
    assert found.percent == pytest.approx(top1)
    assert found.source == f"{name}/summary.csv, epoch {epochs - 1}"
    assert top1 > 25  # ten classes


@pytest.mark.slow
def test_the_digits_of_the_page():
    table, _ = python("docs/digit_classifiers.py", "--steps", 60, "--seeds", 2)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert [row[0] for row in rows[2:]] == ["DeiT", "DeiT + VCA"]
    for row in rows[2:]:
        assert 190_000 < int(row[1].replace(",", "")) < 220_000
        each = [float(value) for value in row[2].split(",")]
        assert sum(each) / 2 == pytest.approx(float(row[3]), abs=0.1)
        assert all(12 < value <= 100 for value in each)  # 10 by chance
