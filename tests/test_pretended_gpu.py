"""The project on a GPU that is not there (pretended_gpu.py): devices, types, and that the host does not wait.

Backward passes and whole trainings are in pretended_training.py, which a test here runs in a process of its own.
"""

import json

import pretended_gpu
import pytest
import tiny
import torch
from accelerate.state import AcceleratorState, PartialState
from helpers import image_folder, python, tiny_vae

from vcagen.__main__ import do
from vcagen.build import build_model
from vcagen.config.options import Config, ModelConfig, ProcessConfig, SamplingConfig, to_plain
from vcagen.data.latents import DataSpec, LatentDataset, open_dataset
from vcagen.data.vae import LatentVAE
from vcagen.evaluation.features import InceptionFeatures, PixelFeatures
from vcagen.evaluation.reference import FeatureStatistics, image_digests
from vcagen.evaluation.scores import precision_and_recall
from vcagen.networks.dit import DiT
from vcagen.networks.weights import save_weights
from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import DIFFUSION_FORMS, LinearInterpolant
from vcagen.processes.guidance import with_cfg
from vcagen.processes.samplers import FIXED_METHODS, LAST_STEPS
from vcagen.sampling.load_run import LoadedRun
from vcagen.sampling.noise import SeededNoise
from vcagen.system.files import FORMAT
from vcagen.training.randomness import DrawsAhead, draw, drop_labels

pytestmark = pytest.mark.skipif(pretended_gpu.WHY_NOT is not None, reason=str(pretended_gpu.WHY_NOT))

PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
PROCESSES = {"diffusion": GaussianDiffusion, "flow": LinearInterpolant}
VARIANTS = {
    "mhsa": ("mhsa", {}),
    "vca": ("vca", {}),
    "larger contrast grid": ("vca", {"contrast_grid": (8, 8)}),
    "uneven contrast grid": ("vca", {"contrast_grid": (3, 3)}),
    "vanilla 1": ("vca", {"contrast_grid": (2, 2), "stage1": "vanilla"}),
    "vanilla 2": ("vca", {"contrast_grid": (2, 2), "stage2": "vanilla"}),
    "differential": ("vca", {"contrast_grid": (2, 2), "stage1": "differential", "stage2": "differential"}),
    "emb": ("vca", {"contrast_grid": (2, 2), "positive_tokens": "emb", "negative_tokens": "emb"}),
    "pool": ("vca", {"contrast_grid": (2, 2), "positive_tokens": "pool"}),
    "recomputed maps": ("vca", {"contrast_grid": (2, 2), "recompute_maps": True}),
    "fused": ("vca", {"contrast_grid": (2, 2), "kernel": "fused"}),
}
SAMPLERS = {
    "ddpm": {"sampler": "ddpm", "num_steps": 2},
    "ddim": {"sampler": "ddim", "num_steps": 2, "eta": 0.5},
    "dpmpp": {"sampler": "dpmpp", "num_steps": 2},
    **{f"sde {form}": {"sampler": "sde", "num_steps": 2, "diffusion_form": form} for form in DIFFUSION_FORMS},
    **{f"sde, last {last}": {"sampler": "sde", "num_steps": 2, "last_step": last} for last in LAST_STEPS},
    **{f"ode {method}": {"sampler": "ode", "num_steps": 2, "method": method} for method in FIXED_METHODS},
}
"""All but the adaptive ODE methods, whose steps depend on values."""


@pytest.fixture
def gpu():
    with pretended_gpu.pretended_gpu() as gpu:
        yield gpu
    AcceleratorState._reset_state(reset_partial_state=True)


def network(process, attention="vca", options=None, **others):
    channels = 4 * PROCESSES[process].outputs_per_channel
    return DiT(
        input_size=8, patch_size=2, in_channels=4, out_channels=channels, hidden_size=64, depth=1, num_heads=2,
        num_classes=10, attention=attention, attention_options=options, **others,
    )  # fmt: skip


def on_cuda(*tensors):
    return all(x.device.type == "cuda" and isinstance(x, pretended_gpu.FakeTensor) for x in tensors)


# --- the helper finds what it is there to find ---


def test_a_planted_cpu_tensor_is_found(gpu):
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="device"):
        x + torch.ones(3)
    with pytest.raises((RuntimeError, TypeError), match="numpy"):
        x.numpy()
    net = network("flow").to("cuda")
    net.blocks[0].attn.norm1.weight = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(RuntimeError, match="device"):
        net(torch.zeros(2, 4, 8, 8, device="cuda"), torch.zeros(2, device="cuda"), torch.zeros(2, device="cuda").long())


def test_waits_are_counted(gpu):
    x = torch.ones(3, device="cuda")
    assert gpu.waits == []
    for wait in (x.sum().item, x.tolist, x.cpu, x.nonzero, lambda: torch.ones(3).copy_(x), lambda: bool(x.any())):
        before = len(gpu.waits)
        wait()
        assert len(gpu.waits) > before, wait


def test_cpu_tensors_stay_real(gpu):
    assert torch.tensor([2.0, 3.0]).sum().item() == 5
    assert torch.randn(2, generator=torch.Generator().manual_seed(3)).equal(
        torch.randn(2, generator=torch.Generator("cpu").manual_seed(3))
    )
    assert gpu.waits == []


def test_nothing_is_left():
    before = torch.empty, torch.tensor, torch.Generator, torch.cuda.is_available
    with pretended_gpu.pretended_gpu(), torch.device("meta"):
        assert torch.tensor([1.0]).is_meta
        assert torch.empty(2).is_meta
    assert (torch.empty, torch.tensor, torch.Generator, torch.cuda.is_available) == before
    assert not torch.cuda.is_available()
    with torch.device("meta"):
        assert torch.empty(2).is_meta
    with pytest.raises((RuntimeError, AssertionError)):
        torch.empty(2, device="cuda")


# --- networks and losses ---


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_networks(gpu, variant, precision):
    attention, options = VARIANTS[variant]
    net = network("flow", attention, options).to("cuda")
    x, y = torch.zeros(2, 4, 8, 8, device="cuda"), torch.tensor([1, 10], device="cuda")
    with torch.autocast("cuda", PRECISIONS[precision], enabled=precision != "no"):
        output = net(x, torch.tensor([0.1, 0.2], device="cuda"), y)
    assert on_cuda(output)
    assert output.dtype == (PRECISIONS[precision] or torch.float32)
    assert gpu.waits == []


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", PROCESSES)
@torch.no_grad()
def test_losses(gpu, name, precision):
    process, net = PROCESSES[name](), network(name).to("cuda")

    def model(*args):
        with torch.autocast("cuda", PRECISIONS[precision], enabled=precision != "no"):
            return net(*args)

    draws = DrawsAhead(lambda step: draw(0, step, 4, (4, 8, 8), process, 0.1), torch.device("cuda"))(3)
    assert on_cuda(draws.dropped, draws.t, draws.noise, draws.posterior)
    y = drop_labels(torch.zeros(4, dtype=torch.int64).to("cuda"), draws.dropped, net.null_label)
    for given in ({"t": draws.t, "noise": draws.noise}, {"generator": torch.Generator("cuda")}, {}):
        losses = process.losses(model, draws.posterior, y, **given)
        assert on_cuda(*losses.values())
        assert {loss.dtype for loss in losses.values()} == {torch.float32}
    assert gpu.waits == []


# --- VAE ---


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory):
    return tiny_vae(tmp_path_factory.mktemp("vae"))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_vae(gpu, vae_folder, precision):
    vae = LatentVAE(vae_folder, precision=precision, device="cuda")
    moments = vae.encode_uint8(torch.zeros(2, 3, 48, 48, dtype=torch.uint8))
    latents = vae.sample(moments, torch.zeros(2, 4, 6, 6, device="cuda"))
    assert on_cuda(moments, latents, vae.sample(moments.half(), torch.zeros(2, 4, 6, 6, device="cuda")))
    assert moments.dtype == latents.dtype == torch.float32
    assert gpu.waits == []
    images = vae.decode(latents, batch=1)
    assert on_cuda(images)
    assert (images.dtype, images.shape) == (torch.uint8, (2, 3, 48, 48))
    assert len(gpu.waits) == 2  # whether latents and images are finite


def test_encoding(gpu, vae_folder, tmp_path):
    """The whole job, on the device that accelerate picks."""
    images = image_folder(tmp_path / "images", {"a": 3, "b": 2})
    do("encode", [str(images), "--out", str(tmp_path / "latents"), "--image_size", "32", "--vae", vae_folder,
                  "--num_workers", "0"], prog="encode")  # fmt: skip
    assert PartialState().device.type == "cuda"
    assert len(LatentDataset(tmp_path / "latents")) == 5


# --- samplers ---


def loaded_run(process, vae_folder=None, **sampling):
    vae = LatentVAE(vae_folder or "identity", channels=4, device="cuda")
    data = DataSpec(
        channels=4, height=8, width=8, num_classes=10, class_names=(), image_size=8, vae=vae.description()
    )  # fmt: skip
    config = Config("", model=ModelConfig(), process=ProcessConfig(process), sampling=SamplingConfig(**sampling))
    net = network(process).to("cuda").eval().requires_grad_(False)

    def autocast(x, t, y):
        with torch.autocast(x.device.type, torch.bfloat16):
            return net(x, t, y).float()

    return LoadedRun(autocast, PROCESSES[process](), vae, config, data, 0, None, "")


@pytest.mark.parametrize("options", SAMPLERS.values(), ids=SAMPLERS)
def test_samplers(gpu, options):
    run = loaded_run("diffusion" if options["sampler"].startswith("d") else "flow", cfg_scale=1.5)
    settings, y = run.sampling(**options), torch.zeros(2, dtype=torch.int64)
    images = run.images(range(2), y, settings=settings, noise=SeededNoise(0))
    assert on_cuda(images)
    assert images.dtype == torch.uint8
    assert gpu.waits == ["_local_scalar_dense.default"]  # whether the images are finite, not in any step


@pytest.mark.parametrize("guidance", [
    {"cfg_scale": 1.0}, {"cfg_scale": 0.0}, {"cfg_scale": 4.0, "guided_channels": 3},
    {"cfg_scale": 4.0, "interval": (0.2, 0.7)},
])  # fmt: skip
@pytest.mark.parametrize("name", PROCESSES)
def test_guidance(gpu, name, guidance):
    y = torch.tensor([1, 2], device="cuda")
    predict = with_cfg(network(name).to("cuda"), y, null_label=10, **guidance)
    for time in (0, 1) if name == "diffusion" else (0.1, 0.5):
        assert on_cuda(predict(torch.zeros(2, 4, 8, 8, device="cuda"), time))
    assert gpu.waits == []


def test_images_of_a_vae(gpu, vae_folder):
    images = loaded_run("flow", vae_folder).sample([3, 4, 5], batch=2, output="tensor", num_steps=2)
    assert (images.device.type, images.shape) == ("cpu", (3, 3, 64, 64))


# --- evaluation ---


def check_evaluation(extractor):
    statistics = FeatureStatistics(extractor, 8, 6, class_scores=True)
    images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    for _ in range(2):
        features = extractor(images)
        assert on_cuda(features.pool)
        statistics.add(features, image_digests(images))
    measured = statistics.measured()
    assert measured.pool.mean.device.type == measured.pool.cov.device.type == measured.rows.device.type == "cpu"
    assert len(precision_and_recall(measured, measured)) == 2 * len(extractor.precision_recall)


def test_pixel_statistics(gpu):
    check_evaluation(PixelFeatures(device="cuda"))


@pytest.mark.slow
def test_inception_statistics(inception_weights, gpu):
    check_evaluation(InceptionFeatures(inception_weights, device="cuda"))


def test_a_whole_session(gpu, tmp_path):
    """sample.py from a weights file: accelerate picks the device, images and scores are written."""
    config = tiny.config(tmp_path / "run")
    dataset, _ = open_dataset(config.data, config.vae, device="cpu")
    metadata = {"format": FORMAT, "config": to_plain(config), "data": dataset.spec.to_dict(), "step": 0}
    weights = tmp_path / "weights.safetensors"
    save_weights(weights, build_model(config.model, config.process, dataset.spec).state_dict(),
                 {**metadata, "ema_decay": None})  # fmt: skip
    PartialState._reset_state()
    do("sample", ["--checkpoint", str(weights), "--num_images", "6", "--batch", "4", "--num_steps", "2",
                  "--precision", "bf16", "--reference", "digits", "--extractor", "pixels",
                  "--out", str(tmp_path / "out")], prog="sample.py")  # fmt: skip
    assert PartialState().device.type == "cuda"
    assert len(list((tmp_path / "out" / "images").iterdir())) == 6
    assert "fd_pixels_6" in json.dumps(json.loads((tmp_path / "out" / "results.json").read_text()))


# --- backward passes and whole trainings ---


@pytest.mark.slow
def test_training(tmp_path):
    try:
        env = pretended_gpu.shim(tmp_path)
    except OSError as error:
        pytest.skip(f"no shim for backward passes: {error}")
    python("-m", "pytest", "-q", "-x", "tests/pretended_training.py", env=env, timeout=900)
