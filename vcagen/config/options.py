"""Typed configuration: one frozen dataclass a subject, a docstring a field. Defaults are the paper's recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeInt,
    OpenUnitInterval,
    PositiveFloat,
    PositiveInt,
    restricted_number_type,
)

Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**63)], docstring="int restricted to be 0..2^63 - 1")
Size = restricted_number_type("Size", int, [(">=", 1), ("<=", 2**16)], docstring="int restricted to be 1..65536")
Rate = restricted_number_type("Rate", float, [(">=", 0), ("<", float("inf"))], docstring="float restricted to be ≥0")
Decay = restricted_number_type("Decay", float, [(">=", 0), ("<", 1)], docstring="float restricted to be in [0, 1)")


@dataclass(frozen=True)
class VcaOptions:
    """Options of Visual-Contrast Attention; those of Tables 3 and 4 replace a stage or the making of the tokens."""

    contrast_grid: tuple[PositiveInt, PositiveInt] = (8, 8)
    """Rows and columns of the contrast tokens."""
    stage1: Literal["contrast", "differential", "vanilla"] = "contrast"
    """Stage I, global contrast."""
    stage2: Literal["contrast", "differential", "vanilla"] = "contrast"
    """Stage II, patch-wise attention."""
    positive_tokens: Literal["pool", "emb", "pool+emb"] = "pool+emb"
    """What the positive stream is made of: pooled queries, learned embeddings, or their sum."""
    negative_tokens: Literal["pool", "emb", "pool+emb"] = "pool+emb"
    """What the negative stream is made of."""
    value_conv: bool = False
    """Add a depthwise 3 x 3 convolution of the values; the paper's parameters contain it in recognition, Table 1."""
    kernel: Literal["auto", "maps", "fused"] = "auto"
    """How it is computed: maps (plain PyTorch), fused (one CUDA kernel a direction), or auto: fused where a measurement
    says that it is faster on this GPU, else maps. A run keeps what it was started with."""
    recompute_maps: bool = False
    """Compute the maps again in the backward pass rather than keep them: less memory, more time."""


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    size: str = "S/2"
    """Size and patch size: S, B, L or XL, a slash, and the side of a patch, such as 1, 2, 4 or 8."""
    attention: str = "mhsa"
    """Attention of every block: mhsa (plain) or vca (Visual-Contrast Attention)."""
    attention_options: VcaOptions = field(default_factory=VcaOptions)
    """Options of the attention, where it has them."""
    hidden_size: PositiveInt | None = None
    """Width, where it differs from the named size."""
    depth: Size | None = None  # type: ignore[valid-type]
    """Number of blocks, where it differs from the named size."""
    num_heads: PositiveInt | None = None
    """Number of attention heads, where it differs from the named size."""
    mlp_ratio: PositiveFloat = 4.0
    """Hidden width of the MLP over the width of the network."""
    class_dropout_prob: ClosedUnitInterval = 0.1
    """Probability that a label is dropped in training, for guidance; 0 makes a network without a null label."""
    gradient_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more time."""


@dataclass(frozen=True)
class ProcessConfig:
    """The process that is learned."""

    name: str = "diffusion"
    """diffusion (DiT: DDPM with learned variance) or flow (SiT: linear interpolant, velocity)."""
    num_timesteps: PositiveInt = 1000
    """Steps of the diffusion schedule; flow has none."""


@dataclass(frozen=True)
class VaeConfig:
    """Images to latents and back."""

    path: str | None = None
    """Hub name or local folder of a diffusers AutoencoderKL, or identity for pixel-space training. Default: the VAE of
    the shards; without shards stabilityai/sd-vae-ft-ema, and identity for the digits."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the VAE."""
    tiling: bool = False
    """Encode and decode in tiles, for large images in small memory."""
    scaling_factor: PositiveFloat | None = None
    """Factor that brings the latents to unit size. Default: that of the VAE's config.json; where that has latents_mean
    and latents_std, they are applied as well, channel by channel."""
    shift_factor: float | None = None
    """What is taken from the latents before they are scaled. Default: that of the VAE's config.json."""


@dataclass(frozen=True)
class ImageConfig:
    """How an image folder is read."""

    image_size: Size | None = None  # type: ignore[valid-type]
    """Side of the centre crop in pixels. Default: that of the shards; without shards 256, and 8 for the digits."""
    on_bad_image: Literal["error", "skip"] = "error"
    """Unreadable files: list them all and stop, or leave them out and list them in the output."""
    allow_empty_classes: bool = False
    """Let a class folder without images keep its label."""
    grayscale: bool = False
    """Read images as one channel, for a VAE of one channel or identity; colours become their luma."""


@dataclass(frozen=True)
class DataConfig:
    """What the network is trained on."""

    path: str = "latents"
    """Folder of shards made by `vcagen encode` or of latents of LightningDiT, a built-in set (digits, fashion,
    fashion:FOLDER), or an image folder (from_images)."""
    from_images: bool = False
    """Read `path` as an image folder and encode in the training loop: for small sets."""
    images: ImageConfig = field(default_factory=ImageConfig)
    """How the image folder is read (from_images)."""
    horizontal_flip: bool = True
    """Use the mirror image half of the time."""
    num_workers: NonNegativeInt = 4
    """Loader processes a training process."""


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation."""

    steps: PositiveInt = 400_000
    """Optimizer steps of the whole run."""
    batch_size: PositiveInt = 256
    """Images a step over all processes."""
    micro_batch_size: PositiveInt | None = None
    """Images a forward pass of one process; the rest is accumulated. Default: no accumulation."""
    learning_rate: Rate = 1e-4  # type: ignore[valid-type]
    """Constant learning rate of AdamW."""
    weight_decay: Rate = 0.0  # type: ignore[valid-type]
    """Weight decay of AdamW."""
    max_grad_norm: PositiveFloat | None = None
    """Clip the gradient to this norm. Default: no clipping."""
    ema_decays: list[Decay] = field(default_factory=lambda: [0.9999])  # type: ignore[valid-type]
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
    """Use deterministic kernels only: bit-exact resume on GPUs or several processes, slower."""


@dataclass(frozen=True)
class LogConfig:
    """What is written while training, and when. May change when a run goes on."""

    log_every: PositiveInt = 100
    """Steps between lines of metrics.jsonl."""
    preview_every: NonNegativeInt = 10_000
    """Steps between preview grids of up to 64 images; 0 for none."""
    trackers: list[str] = field(default_factory=list)
    """Trackers of accelerate: tensorboard, wandb, trackio. They get the log, the previews and, from sample.py, the
    scores; a resumed run is the same run there."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved. May change when a run goes on."""

    save_every: PositiveInt = 5_000
    """Steps between checkpoints."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_every: NonNegativeInt = 50_000
    """Keep every checkpoint whose step is a multiple of this; 0 for none."""


@dataclass(frozen=True)
class SamplingConfig:
    """How images are made and scored. A run's own `sampling` section takes the place of these defaults."""

    sampler: str | None = None
    """Sampler: ddpm, ddim or dpmpp for diffusion, sde or ode for flow. Default: the first of the process."""
    num_steps: PositiveInt = 250
    """Steps of the sampler; adaptive ODE methods choose their own."""
    method: str = "dopri5"
    """ODE method: euler, midpoint, heun2 or rk4 take num_steps, dopri5 takes the tolerances."""
    atol: PositiveFloat = 1e-6
    """Absolute tolerance of adaptive methods."""
    rtol: PositiveFloat = 1e-3
    """Relative tolerance of adaptive methods."""
    eta: ClosedUnitInterval = 0.0
    """Noise of DDIM, 0 to 1."""
    diffusion_form: str = "sigma"
    """Diffusion coefficient of the SDE."""
    last_step: str = "Mean"
    """Last step of the SDE: Mean, Tweedie, Euler or none."""
    last_step_size: OpenUnitInterval = 0.04
    """Size of the SDE's last step."""
    cfg_scale: float = 1.0
    """Guidance: uncond + scale * (cond - uncond); 1 is off."""
    cfg_interval: tuple[float, float] | None = None
    """Guide only where low <= t <= high, in the process's own time. Default: everywhere."""
    guided_channels: PositiveInt | None = None
    """Guide only the first channels (3 repeats published DiT numbers). Default: all."""
    num_images: PositiveInt = 50_000
    """Images to make."""
    labels: str = "random"
    """random, balanced, or labels or class names separated by commas, used in turn."""
    reference: str | None = None
    """Reference of the scores: ADM .npz, image folder or archive, statistics of `vcagen stats`, or digits. Default: no
    scores."""
    extractor: str = "inception"
    """Features of the scores: inception, pixels or fashion."""


@dataclass(frozen=True)
class Config:
    """Train a DiT or SiT. Resume with the same command.

    accelerate launch train.py --config configs/sit.yaml --run_dir runs/x --model.size S/2 --model.attention vca
    """

    run_dir: str
    """Run folder: config, metrics, checkpoints, previews, samples."""
    seed: Seed = 0  # type: ignore[valid-type]  # made at run time
    """Seed of the initial weights and of every step."""
    init: str | None = None
    """Weights to start from: a run, a file of ours, a public DiT or SiT file, a folder of diffusers' DiT, or user/name
    on the Hub. Model options that are not given are then its own."""
    dry_run: bool = False
    """Build everything, print cost, memory and plan, and stop."""
    plugin: str | None = None
    """Module to import first, or several with commas: what they add to the registries can then be named."""
    model: ModelConfig = field(default_factory=ModelConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    vae: VaeConfig = field(default_factory=VaeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    given: frozenset[str] | None = field(default=None, compare=False)
    """Names of the options that were given; the parser fills it in. None: not from a command line."""


@dataclass(frozen=True)
class SampleConfig(SamplingConfig):
    """Sample images and score them. The same command again makes only what is missing.

    accelerate launch sample.py --run_dir runs/x --num_images 50000 --reference VIRTUAL_imagenet256_labeled.npz
    """

    run_dir: str | None = None
    """Run folder whose newest averaged weights are sampled."""
    checkpoint: str | None = None
    """Weights instead of a run: a file of ours, a public DiT or SiT file, a folder of diffusers' DiT, or user/name on
    the Hub."""
    process: str | None = None
    """diffusion or flow, where neither the name (DiT, SiT) nor the arguments of a public file tell."""
    weights: str | None = None
    """Which weights: ema, ema_DECAY or raw; of a file of others also the name of a set in it. Default: ema."""
    step: NonNegativeInt | None = None
    """Step of the run's checkpoint. Default: the newest."""
    out: str | None = None
    """Output folder. Default: samples/ in the run, named by step, sampler and guidance."""
    seed: Seed = 0  # type: ignore[valid-type]  # made at run time
    """Seed: image i depends on (seed, i) alone."""
    batch: PositiveInt = 64
    """Images a network call of one process."""
    decode_batch: PositiveInt | None = None
    """Images the VAE decodes at once. Default: batch."""
    precision: Literal["no", "bf16"] = "no"
    """Autocast of the network; the VAE stays in its own precision."""
    compile: bool = False
    """Run the network through torch.compile."""
    tf32: bool | None = None
    """Allow TF32 matrix products of the network on GPUs; VAE and scores stay exact. Default: as in its training."""
    npz: bool = False
    """Write samples.npz as the ADM evaluator reads it, beside the PNG files."""
    vae: str | None = None
    """VAE to decode with, where it is not where the weights say."""
    inception_weights: str | None = None
    """Local file of the Inception weights. Default: torch-fidelity's download."""
    dry_run: bool = False
    """Print the plan and stop."""
    plugin: str | None = None
    """Module to import first, or several with commas."""
    given: frozenset[str] = frozenset()
    """Names of the options that were given; the parser fills it in."""


SAMPLING_OPTIONS = tuple(option.name for option in fields(SamplingConfig))


def to_plain(config: Config) -> dict[str, Any]:
    """A configuration as nested dicts, lists and scalars: what YAML and JSON give back."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(replace(config, given=None))))
    del values["given"]
    return values


def flatten(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        result |= flatten(value, f"{before}{key}.") if isinstance(value, Mapping) else {before + key: value}
    return result


MUTABLE = (
    "log",
    "checkpoint",
    "sampling",
    "vae",
    "dry_run",
    "plugin",
    "data.path",
    "data.num_workers",
    "model.gradient_checkpointing",
    "model.attention_options.kernel",
    "model.attention_options.recompute_maps",
    "train.steps",
    "train.micro_batch_size",
    "train.compile",
    "train.deterministic",
)
"""What may change when a run goes on. The data may have moved: its description is compared instead."""


def may_change(key: str) -> bool:
    """Whether the option of that dotted name may change when a run goes on."""
    return any(key == name or key.startswith(f"{name}.") for name in MUTABLE)
