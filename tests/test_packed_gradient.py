"""The split of the packed projection, and maps that are computed again: the same numbers with fewer bytes."""

import pytest
import torch
from torch import nn

from vcagen.networks.attention import make_attention, split_qkv


def plain_split(qkv):
    return qkv.permute(2, 0, 3, 1, 4).unbind()


def run(layer, x):
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("name", ["mhsa", "vca"])
def test_outputs_stay_bit_for_bit_and_gradients_agree(name, monkeypatch):
    torch.manual_seed(0)
    layer = make_attention(name, 64, 4, grid_size=(4, 6))
    x = torch.randn(2, 24, 64)
    packed = run(layer, x)
    monkeypatch.setattr("vcagen.networks.attention.split_qkv", plain_split)
    unpacked = run(layer, x)
    assert torch.equal(packed[0], unpacked[0])
    torch.testing.assert_close(packed[1:], unpacked[1:], rtol=1e-6, atol=1e-6)


def test_plain_attention_is_timms():
    from timm.layers.attention import Attention

    torch.manual_seed(0)
    ours = make_attention("mhsa", 64, 4, grid_size=4)
    torch.manual_seed(0)
    theirs = Attention(64, 4, qkv_bias=True)
    x = torch.randn(2, 16, 64)
    for fused in (True, False):
        ours.fused_attn = theirs.fused_attn = fused
        ours_run, theirs_run = run(ours, x), run(theirs, x)
        assert torch.equal(ours_run[0], theirs_run[0])
        torch.testing.assert_close(ours_run[1:], theirs_run[1:], rtol=1e-6, atol=1e-6)


def test_gradient_is_packed_in_the_layout_of_the_projection():
    qkv = torch.randn(2, 5, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    q, k, v = split_qkv(qkv)
    (gradient,) = torch.autograd.grad((q * k.detach()).sum() + v.square().sum(), qkv)
    assert gradient.is_contiguous()
    assert gradient[:, :, 1].abs().max() == 0
    assert torch.autograd.gradcheck(split_qkv, qkv)


@pytest.mark.parametrize("autocast", [False, True])
def test_recomputed_maps_give_the_same_gradients_and_keep_less(autocast):
    torch.manual_seed(0)
    kept = make_attention("vca", 64, 4, grid_size=8, contrast_grid=(4, 4))
    again = make_attention("vca", 64, 4, grid_size=8, contrast_grid=(4, 4), recompute_maps=True)
    again.load_state_dict(kept.state_dict())
    x = torch.randn(2, 64, 64)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert all(map(torch.equal, run(kept, x), run(again, x)))
        assert kept_bytes(again, x) < 0.5 * kept_bytes(kept, x)


def kept_bytes(layer, x):
    sizes = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x)
    assert out.requires_grad
    return sum(sizes.values())


def test_recomputed_maps_compile():
    torch.manual_seed(0)
    layer = make_attention("vca", 64, 4, grid_size=4, contrast_grid=(2, 2), recompute_maps=True)
    x = torch.randn(2, 16, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, x), run(layer, x))


def test_recomputed_maps_of_the_fused_kernels_are_refused():
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="recompute_maps: kernel: fused keeps no maps"):
        make_attention("vca", 64, 2, grid_size=4, kernel="fused", recompute_maps=True)
