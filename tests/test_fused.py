"""The fused kernels, interpreted on the CPU in processes of their own, and what is refused."""

import json

import pytest
import torch
from helpers import ENV, ROOT, python

from vcagen.networks import fused
from vcagen.networks.attention import VisualContrastAttention

CASES = ROOT / "tests" / "fused_kernels.py"
INTERPRETED = {**ENV, "TRITON_INTERPRET": "1"}
FAST = (
    "two blocks of columns;bins overlap;prefix;bins repeat;several blocks;one token;one contrast token;"
    "pool, emb;emb, pool+emb"
)
FULL = "S;XL;widest;96 wide;class token;class token, bins overlap;odd;128 contrast tokens;pool, pool+emb"


@pytest.mark.skipif(fused.why_not(4, 32, ("contrast", "contrast")) is not None, reason="triton is not installed")
class TestKernels:
    def test_numbers_and_operator(self):
        """One process for all, since to import torch and Triton takes as long as most checks."""
        numbers = [f"float32={FAST}", "zero_weights", "repeats", "half=two blocks of columns"]
        operator = ["autocast", "checkpointing", "flops", "grid", "operator=narrow", "compiles=aot_eager"]
        python(CASES, *operator, *numbers, env=INTERPRETED)

    @pytest.mark.slow
    def test_operator_with_inductor(self):
        python(CASES, "operator=pool, emb;emb, pool+emb", "compiles=inductor", env=INTERPRETED)

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["float32", "half"])
    def test_full_grid_of_shapes(self, precision):
        python(CASES, f"{precision}={FAST};narrow;emb, emb;{FULL}", env=INTERPRETED, timeout=3000)


@pytest.mark.slow
def test_nothing_spills_at_width_64_on_compute_capability_90(tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    file = tmp_path / "kernels.json"
    options = ["--capabilities", "[90]", "--head_dims", "[64]", "--json", file]
    python("-m", "vcagen", "bench", "kernels", "--compile_only", *options, env=ENV)
    kernels = json.loads(file.read_text())["rows"]
    assert [row["kernel"] for row in kernels] == ["forward", "backward"]
    assert all(row["stack"] == row["spills"] == 0 and row["blocks"] >= 2 for row in kernels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage1": "vanilla"}, "kernel: fused computes both stages as contrast, not vanilla and contrast"),
        ({"contrast_grid": (8, 17)}, "kernel: fused holds up to 128 contrast tokens, not 136"),
        ({"num_heads": 4}, "kernel: fused needs heads 32 to 128 wide, not 16"),
        ({"kernel": "flash"}, "kernel: 'flash' is not one of maps, fused"),
    ],
)
def test_what_fused_cannot_do_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        VisualContrastAttention(64, **{"num_heads": 2, "grid_size": 4, "kernel": "fused", **options})


def test_fused_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="kernel: fused needs triton, which is not installed"):
        VisualContrastAttention(64, 2, grid_size=4, kernel="fused")


@pytest.mark.skipif(fused.why_not(4, 32, ("contrast", "contrast")) is not None, reason="triton is not installed")
def test_fused_on_the_cpu_is_refused_at_the_call(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    layer = VisualContrastAttention(64, 2, grid_size=4, kernel="fused")
    with pytest.raises(ValueError, match="kernel: fused runs on CUDA devices, not on cpu"):
        layer(torch.zeros(1, 16, 64))


@pytest.mark.parametrize("width", range(32, 129, 2))
def test_column_blocks_hold_all_columns_without_much_padding(width):
    first, second = fused.column_blocks(width)
    assert all(block & (block - 1) == 0 and (block >= 16 or block == second == 0) for block in (first, second))
    assert width <= first + second < width + 16 + width // 4
    assert second == 0 or width > first


def test_an_old_triton_is_refused(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.4.0")
    assert fused.why_not(4, 32, ("contrast", "contrast")) == (
        "needs triton 3.5 or newer, which PyTorch 2.9 brings, not 3.4.0"
    )
