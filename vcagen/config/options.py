"""Typed configuration: one frozen dataclass a subject, a docstring a field. Defaults are the paper's recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    size: str = "S/2"
    """Size and patch size: S, B, L or XL, a slash, 2, 4 or 8."""
    attention: str = "mhsa"
    """Attention of every block: mhsa (plain) or vca (Visual-Contrast Attention)."""
    attention_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the attention, such as contrast_grid, stage1, stage2, positive_tokens, negative_tokens."""
    hidden_size: int | None = None
    """Width, where it differs from the named size."""
    depth: int | None = None
    """Number of blocks, where it differs from the named size."""
    num_heads: int | None = None
    """Number of attention heads, where it differs from the named size."""
    patch_size: int | None = None
    """Patch size, where it differs from the named size."""
    mlp_ratio: float = 4.0
    """Hidden width of the MLP over the width of the network."""
    class_dropout_prob: float = 0.1
    """Probability that a label is dropped in training, for guidance; 0 makes a network without a null label."""
    gradient_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more time."""


@dataclass(frozen=True)
class ProcessConfig:
    """The process that is learned."""

    name: Literal["diffusion", "flow"] = "diffusion"
    """diffusion (DiT: DDPM with learned variance) or flow (SiT: linear interpolant, velocity)."""
    num_timesteps: int = 1000
    """Steps of the diffusion schedule; flow has none."""


@dataclass(frozen=True)
class VaeConfig:
    """Pixels to latents and back."""

    path: str | None = None
    """Hub name or local folder of a diffusers AutoencoderKL, or identity for pixel-space training. Default: the VAE of
    the shards; without shards stabilityai/sd-vae-ft-ema, and identity for the digits."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the VAE."""
    tiling: bool = False
    """Encode and decode in tiles, for large images in small memory."""
    slicing: bool = False
    """Encode and decode one image at a time, for small memory."""


@dataclass(frozen=True)
class ImageConfig:
    """How an image folder is read."""

    image_size: int | None = None
    """Side of the centre crop in pixels. Default: that of the shards; without shards 256, and 8 for the digits."""
    on_bad_image: Literal["error", "skip"] = "error"
    """Unreadable files: list them all and stop, or leave them out and list them in the output."""
    allow_empty_classes: bool = False
    """Let a class folder without images keep its label."""


@dataclass(frozen=True)
class DataConfig:
    """What the network is trained on."""

    path: str = "latents"
    """Folder of shards made by `vcagen encode`, digits for the built-in set, or an image folder (from_images)."""
    from_images: bool = False
    """Read `path` as an image folder and encode in the training loop: for small sets."""
    images: ImageConfig = field(default_factory=ImageConfig)
    """How the image folder is read (from_images)."""
    horizontal_flip: bool = True
    """Use the mirror image half of the time."""
    num_workers: int = 4
    """Loader processes a training process."""


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation."""

    steps: int = 400_000
    """Optimizer steps of the whole run."""
    batch_size: int = 256
    """Images a step over all processes."""
    micro_batch_size: int | None = None
    """Images a forward pass of one process; the rest is accumulated. Default: no accumulation."""
    learning_rate: float = 1e-4
    """Constant learning rate of AdamW."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: float | None = None
    """Clip the gradient to this norm. Default: no clipping."""
    ema_decays: list[float] = field(default_factory=lambda: [0.9999])
    """Decays of the averaged weights; the first is the one sampled from."""
    ema_warmup: bool = False
    """Let the decay of step k be at most (1 + k) / (10 + k)."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Autocast; the weights stay in float32."""
    compile: bool = False
    """Run the network through torch.compile."""
    tf32: bool = False
    """Allow TF32 matrix products on GPUs."""
    deterministic: bool = False
    """Use deterministic kernels only: bit-exact resume on GPUs, slower."""


@dataclass(frozen=True)
class LogConfig:
    """What is written while training, and when. May change when a run goes on."""

    log_every: int = 100
    """Steps between lines of metrics.jsonl."""
    preview_every: int = 10_000
    """Steps between preview grids; 0 for none."""
    preview_images: int = 16
    """Images of a preview grid."""
    trackers: list[str] = field(default_factory=list)
    """Trackers of accelerate: tensorboard, wandb, trackio."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved. May change when a run goes on."""

    save_every: int = 5_000
    """Steps between checkpoints."""
    keep_last: int = 2
    """Newest checkpoints to keep."""
    keep_every: int = 50_000
    """Keep every checkpoint whose step is a multiple of this; 0 for none."""


@dataclass(frozen=True)
class SamplingConfig:
    """How images are made and scored. Options left out: the run's `sampling` section, then the recipe."""

    sampler: str | None = None
    """Sampler: ddpm or ddim for diffusion, sde or ode for flow. Recipe: the first."""
    num_steps: int | None = None
    """Steps of the sampler, none for adaptive ODE methods. Recipe: 250."""
    method: str | None = None
    """ODE method, by torchdiffeq's name. Recipe: dopri5."""
    atol: float | None = None
    """Absolute tolerance of adaptive methods. Recipe: 1e-6."""
    rtol: float | None = None
    """Relative tolerance of adaptive methods. Recipe: 1e-3."""
    eta: float | None = None
    """Noise of DDIM, 0 to 1. Recipe: 0."""
    diffusion_form: str | None = None
    """Diffusion coefficient of the SDE. Recipe: sigma."""
    last_step: str | None = None
    """Last step of the SDE: Mean, Tweedie, Euler or none. Recipe: Mean."""
    last_step_size: float | None = None
    """Size of the SDE's last step. Recipe: 0.04."""
    cfg_scale: float | None = None
    """Guidance: uncond + scale * (cond - uncond); 1 is off. Recipe: 1."""
    cfg_interval: tuple[float, float] | None = None
    """Guide only where low <= t <= high, in the process's own time. Recipe: everywhere."""
    guided_channels: int | None = None
    """Guide only the first channels (3 repeats published DiT numbers). Recipe: all."""
    num_images: int | None = None
    """Images to make. Recipe: 50000."""
    labels: str | None = None
    """random, balanced, or labels or class names separated by commas, used in turn. Recipe: random."""
    reference: str | None = None
    """Reference of the scores: ADM .npz, image folder, statistics of `vcagen stats`, or digits. Recipe: no scores."""
    extractor: Literal["inception", "pixels"] | None = None
    """Features of the scores. Recipe: inception."""


GENERAL_SAMPLING = ("cfg_scale", "cfg_interval", "guided_channels", "num_images", "labels", "reference", "extractor")
SAMPLER_OPTIONS = tuple(
    field.name for field in fields(SamplingConfig) if field.name not in ("sampler", *GENERAL_SAMPLING)
)
"""Fields of SamplingConfig that some samplers have and others have not."""


@dataclass(frozen=True)
class Config:
    """Train a DiT or SiT. The same command again goes on where the run stopped.

    accelerate launch train.py --config configs/sit.yaml --run_dir runs/x --model.size S/2 --model.attention vca
    """

    run_dir: str
    """Run folder: config, metrics, checkpoints, weights, previews, samples."""
    seed: int = 0
    """Seed of the initial weights and of every step."""
    init: str | None = None
    """Weights to start from: a run, a file of ours, or a public DiT or SiT file."""
    dry_run: bool = False
    """Build everything, print cost, memory and plan, and stop."""
    model: ModelConfig = field(default_factory=ModelConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    vae: VaeConfig = field(default_factory=VaeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass(frozen=True)
class SampleConfig(SamplingConfig):
    """Sample images and score them. The same command again makes only what is missing.

    accelerate launch sample.py --run_dir runs/x --num_images 50000 --reference VIRTUAL_imagenet256_labeled.npz
    """

    run_dir: str | None = None
    """Run folder whose newest averaged weights are sampled."""
    checkpoint: str | None = None
    """Weights file instead of a run: ours, or a public DiT or SiT file."""
    process: Literal["diffusion", "flow"] | None = None
    """What a public file was trained for, where neither its name (DiT, SiT) nor its arguments tell."""
    weights: str | None = None
    """Which weights of the run: ema, ema_DECAY or raw. Default: ema."""
    step: int | None = None
    """Step of the run's checkpoint. Default: the newest."""
    out: str | None = None
    """Output folder. Default: samples/ in the run, named by step, sampler and guidance."""
    seed: int = 0
    """Seed: image i depends on (seed, i) alone."""
    batch: int = 64
    """Images a network call of one process."""
    decode_batch: int | None = None
    """Images the VAE decodes at once. Default: batch."""
    precision: Literal["no", "bf16"] = "no"
    """Autocast of the network; the VAE stays in its own precision."""
    compile: bool = False
    """Run the network through torch.compile."""
    png: bool = True
    """Write images/000000.png, ..."""
    npz: bool = False
    """Write samples.npz as the ADM evaluator reads it."""
    vae: str | None = None
    """VAE to decode with, where it is not where the weights say."""
    inception_weights: str | None = None
    """Local file of the Inception weights. Default: torch-fidelity's download."""
    dry_run: bool = False
    """Print the plan and stop."""


def plain(config: Config) -> dict[str, Any]:
    """A configuration as nested dicts, lists and scalars: what YAML and JSON give back."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return values


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; attention_options is one value."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) and key != "attention_options"
        result |= flat(value, f"{before}{key}.") if nested else {before + key: value}
    return result


MUTABLE = (
    "log",
    "checkpoint",
    "sampling",
    "vae",
    "dry_run",
    "data.path",
    "data.num_workers",
    "model.gradient_checkpointing",
    "train.steps",
    "train.micro_batch_size",
    "train.compile",
    "train.deterministic",
)
"""What may change when a run goes on. The data may have moved: its description is compared instead."""


def may_change(key: str) -> bool:
    """Whether the option of that dotted name may change when a run goes on."""
    return any(key == name or key.startswith(f"{name}.") for name in MUTABLE)
