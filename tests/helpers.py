"""What tests share: the reference formula, stored answers, and command lines run as a user would."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def u(shape, k):
    """The deterministic numbers of tests/reference: float64 in [-1, 1], row-major."""
    i = np.arange(int(np.prod(shape)), dtype=np.float64)
    x = np.sin(i * 12.9898 + k * 78.233) * 43758.5453
    return torch.from_numpy(2 * (x - np.floor(x) - 0.5)).reshape(shape)


def reference(name):
    """The stored answers in tests/reference/NAME.json."""
    return json.loads((ROOT / "tests" / "reference" / f"{name}.json").read_text())


def close(actual, expected, tolerance=1e-6):
    """Assert agreement, relative to the largest expected number."""
    expected = torch.as_tensor(expected, dtype=actual.dtype).reshape(actual.shape)
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def reference_network():
    """The float64 network of dit.json and sit.json, with 8 output channels and weights made by the formula."""
    from vcagen.networks.dit import DiT

    model = DiT(**reference("dit")["config"], out_channels=8).double().eval()
    names = sorted(name for name in model.state_dict() if name != "pos_embed")
    weights = {name: 0.1 * u(model.state_dict()[name].shape, k) for k, name in enumerate(names, start=1)}
    model.load_state_dict({**weights, "pos_embed": model.pos_embed})
    return model


def draw(seed=0):
    """A randn_like with a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    return lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype)


def no_noise(x):
    """A randn_like for tests of everything else."""
    return torch.zeros_like(x)


def python(*args, code=0, timeout=300, env=None, cwd=ROOT):
    """Run `python ARGS` in its own process, assert the exit code, and return (stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True, text=True, timeout=timeout, env={**ENV, **(env or {})}, cwd=cwd,
    )  # fmt: skip
    assert done.returncode == code, f"exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def readme_block(name, page="README.md"):
    """The lines of the code block that follows the comment <!-- name --> in the README or another page."""
    block = re.search(rf"<!-- {name} -->\n```\w*\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert block, f"{page} has no block {name}"
    return block.group(1).strip().splitlines()


def torchrun(num_processes, *args, code=0, **kwargs):
    """Run `python ARGS` under torchrun with that many processes on this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    if args[0] == "-m":
        launcher, args = [*launcher, "-m"], args[1:]
    return python(*launcher, *args, code=code, **kwargs)


def user_error(*args, **kwargs):
    """Run a command that must fail as a user's mistake does; return its one line."""
    _, stderr = python(*args, code=2, **kwargs)
    assert "Traceback" not in stderr, stderr
    lines = [line for line in stderr.splitlines() if line.startswith("error")]
    assert len(lines) == 1, stderr
    return lines[0]


def tiny_vae(folder, *, seed=0, scaling_factor=None, shift_factor=None, latent_channels=4, image_channels=3):
    """Save a random AutoencoderKL with 8x downsampling to `folder`; return its path as text.

    Its scaling factor is 1 / the std of its latents on noise images, unless one is given.
    """
    from diffusers import AutoencoderKL

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        vae = AutoencoderKL(
            block_out_channels=(8, 8, 8, 8), norm_num_groups=4, layers_per_block=1, sample_size=32,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=latent_channels, shift_factor=shift_factor,
            in_channels=image_channels, out_channels=image_channels,
        )  # fmt: skip
        if scaling_factor is None:
            with torch.no_grad():
                images = torch.rand(8, image_channels, 32, 32) * 2 - 1
                scaling_factor = 1 / vae.encode(images).latent_dist.sample().std().item()
    vae.register_to_config(scaling_factor=scaling_factor)
    vae.save_pretrained(folder)
    return str(folder)


def image_folder(root, counts, *, size=40, seed=0):
    """Write random colour-gradient PNGs root/CLASS/000.png, ...; `counts` is class name -> number. Returns `root`."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            corners = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(corners).resize((size, size + 4), Image.Resampling.BICUBIC).save(
                root / name / f"{i:03}.png"
            )
    return root


def random_inception(path):
    """Write a state dict of torch-fidelity's Inception with random weights that keep activations alive; returns `path`.

    Batch norms are calibrated on random pictures: with their initial statistics the activations would vanish.
    """
    from unittest import mock

    from torch_fidelity import feature_extractor_inceptionv3 as inception

    with (
        torch.random.fork_rng(),
        mock.patch.object(inception, "load_state_dict_from_url", return_value={}),
        mock.patch.object(inception.FeatureExtractorInceptionV3, "load_state_dict"),
    ):
        torch.manual_seed(0)
        network = inception.FeatureExtractorInceptionV3("random", ["2048"], verbose=False)
    generator = torch.Generator().manual_seed(0)
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
            module.train()
    network(random_pictures(16, 96, seed=123))
    network.eval()
    torch.save(network.state_dict(), path)
    return str(path)


def random_pictures(count, size, *, channels=3, seed=0):
    """Smooth random colour pictures, uint8 (count, channels, size, size)."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, 6, 6, generator=generator) * 255
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=True)
    noise = torch.randn(count, channels, size, size, generator=generator) * 8
    return (smooth + noise).clamp(0, 255).to(torch.uint8)


def frechet_of_few(x, y):
    """Frechet distance of rows (N, D) and (M, D), N and M <= D, by the nuclear norm of their centred product."""
    x, y = x.double(), y.double()
    mean_x, mean_y = x.mean(0), y.mean(0)
    x, y = (x - mean_x) / (len(x) - 1) ** 0.5, (y - mean_y) / (len(y) - 1) ** 0.5
    cross = torch.linalg.svdvals(x @ y.T).sum()
    return ((mean_x - mean_y).square().sum() + x.square().sum() + y.square().sum() - 2 * cross).item()


def damaged_npz(path, **arrays):
    """A compressed .npz whose first array cannot be unpacked; its headers and its directory are whole."""
    import zipfile

    np.savez_compressed(path, **arrays)
    with zipfile.ZipFile(path) as archive:
        member = archive.infolist()[0]
    data = bytearray(path.read_bytes())
    middle = member.header_offset + 30 + len(member.filename) + 20 + member.compress_size // 2
    data[middle : middle + 64] = b"\xff" * len(data[middle : middle + 64])
    path.write_bytes(data)
    return str(path)
