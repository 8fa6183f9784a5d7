"""Options of the jobs beside training and sampling, one frozen dataclass a job.

`positional` names the option that is given without a dash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from vcagen.config.options import ImageConfig, ModelConfig, ProcessConfig, Size, VaeConfig


@dataclass(frozen=True)
class InspectConfig:
    """Say what a run folder, a weights file or a folder of latents holds, and check that its tensors are as written.

    vcagen inspect runs/quickstart
    """

    positional: ClassVar = "path"

    path: str
    """Run folder, weights file of ours, public DiT or SiT file, folder of diffusers' DiT, user/name on the Hub, or
    folder of latents, all of which is read."""
    json: str | None = None
    """Also write all of it to this JSON file; - prints JSON instead of the table."""


@dataclass(frozen=True)
class MapsConfig:
    """Draw where the two streams of a run's Visual-Contrast Attention look, on images that the run makes.

    vcagen maps runs/quickstart --labels 3,7 --times 0.2,0.8 --block 2 --query 1,2
    vcagen maps vca_deit_tiny_patch16_224 --weights checkpoint.pth.tar --images cat.jpg,dog.jpg
    """

    positional: ClassVar = "source"

    source: str
    """Run folder, or weights file of ours; with --images the name of a recognition network of timm."""
    images: str | None = None
    """Image files that a recognition network looks at, commas between; labels, times, seed, num_steps, step and vae are
    of runs."""
    labels: str | None = None
    """Labels or class names of the images, commas between. Default: the first two."""
    times: str | None = None
    """Times of the noise on them, commas between: 0 (noise) to 1 of flow, 0 (clean) to 999 of diffusion. Default: a
    fifth and four fifths of that."""
    block: str = "all"
    """all, or blocks from 0, commas between; 1.0 is the first of the second stage of a recognition network."""
    query: str | None = None
    """Row and column, from 0, of the patch whose attention is drawn. Default: the middle."""
    head: NonNegativeInt | None = None
    """Head, from 0. Default: the mean over heads."""
    seed: NonNegativeInt = 0
    """Seed of the images and of the noise."""
    num_steps: PositiveInt | None = None
    """Steps of the sampler. Default: the run's own."""
    weights: str | None = None
    """Which weights of the run: ema, ema_DECAY or raw; of a recognition network its checkpoint. Default: ema."""
    step: NonNegativeInt | None = None
    """Step of the checkpoint. Default: the newest."""
    vae: str | None = None
    """VAE to decode with, where it is not where the weights say."""
    device: str = "cpu"
    """Device of the network: cpu or cuda."""
    out: str | None = None
    """Folder of the pages. Default: maps/ in the run folder, or beside the file."""
    plugin: str | None = None
    """Module to import first, or several with commas."""


@dataclass(frozen=True)
class DemoConfig:
    """Serve a page in the browser: images of a run by class, guidance and sampler, and where its attention looks.

    vcagen demo runs/quickstart
    """

    positional: ClassVar = "source"

    source: str
    """Run folder, or weights file: ours, or a public DiT or SiT file."""
    num_images: PositiveInt = 8
    """Images of the gallery, made in one batch."""
    host: str = "127.0.0.1"
    """Address to serve at; 0.0.0.0 lets other machines in."""
    port: PositiveInt = 7860
    """Port to serve at."""
    weights: str | None = None
    """Which weights of the run: ema, ema_DECAY or raw. Default: ema."""
    step: NonNegativeInt | None = None
    """Step of the checkpoint. Default: the newest."""
    vae: str | None = None
    """VAE to decode with, where it is not where the weights say."""
    device: str = "cpu"
    """Device of the network: cpu or cuda."""
    plugin: str | None = None
    """Module to import first, or several with commas."""


@dataclass(frozen=True)
class ExportConfig:
    """Write one weights file of a run, with all that sampling needs in it, or a folder for the Hub.

    vcagen export runs/quickstart --out digits.safetensors
    """

    positional: ClassVar = "run_dir"

    run_dir: str
    """Run folder; for a hub folder also a weights file."""
    out: str
    """New .safetensors file, or new folder."""
    format: Literal["safetensors", "hub"] = "safetensors"
    """safetensors, or hub: model, VAE, scheduler and card as a folder that diffusers and vcagen load."""
    weights: str = "ema"
    """ema, ema_DECAY or raw."""
    step: NonNegativeInt | None = None
    """Step of the checkpoint. Default: the newest."""
    vae: str | None = None
    """Of a hub folder: the VAE, where it is not where the weights say."""


@dataclass(frozen=True)
class PushConfig:
    """Upload a run to the Hub, as export --format hub writes it.

    vcagen push runs/quickstart user/digits
    """

    positional: ClassVar = ("run_dir", "repo")

    run_dir: str
    """Run folder, weights file, or a folder of export --format hub as it is."""
    repo: str
    """Repository on the Hub: user/name. Made where there is none."""
    private: bool = False
    """Make it a private repository."""
    weights: str = "ema"
    """ema, ema_DECAY or raw."""
    step: NonNegativeInt | None = None
    """Step of the checkpoint. Default: the newest."""
    vae: str | None = None
    """VAE, where it is not where the weights say."""


@dataclass(frozen=True, kw_only=True)
class EncodeConfig(ImageConfig):
    """Encode images of a folder or an archive to latent shards. The same command again does what is missing.

    vcagen encode imagenet/train --out latents/imagenet256
    """

    positional: ClassVar = "images"

    images: str
    """Image folder with one folder a class (or none); a tar of tars such as ILSVRC2012_img_train.tar, a zip with
    dataset.json as EDM2 writes it, parquet files of the Hub ('data/train-*.parquet'); or digits."""
    out: str = "latents"
    """Folder of the shards."""
    vae: str | None = None
    """Hub name or local folder of a diffusers AutoencoderKL, or identity. Default: stabilityai/sd-vae-ft-ema; identity
    for the digits."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the VAE."""
    tiling: bool = False
    """Encode in tiles, for large images in small memory."""
    scaling_factor: PositiveFloat | None = None
    """Factor that brings the latents to unit size. Default: that of the VAE's config.json; where that has latents_mean
    and latents_std, they are applied as well, channel by channel."""
    shift_factor: float | None = None
    """What is taken from the latents before they are scaled. Default: that of the VAE's config.json."""
    batch: PositiveInt = 32
    """Images the VAE encodes at once; the mirror images are another batch."""
    shard_size: PositiveInt = 4096
    """Images a shard."""
    dtype: Literal["float16", "bfloat16"] = "float16"
    """Storage type of the moments."""
    num_workers: NonNegativeInt = 4
    """Decoding processes."""
    plugin: str | None = None
    """Module to import first, or several with commas."""
    dry_run: bool = False
    """Print the plan with bytes and time, and stop."""

    def vae_config(self) -> VaeConfig:
        """The `vae` section of train.py that these options are."""
        return VaeConfig(self.vae, self.precision, self.tiling, self.scaling_factor, self.shift_factor)


@dataclass(frozen=True)
class ConvertVaeConfig:
    """Make a diffusers folder of an autoencoder of Latent Diffusion's code, such as LightningDiT's VA-VAE.

    vcagen convert-vae vavae-imagenet256-f16d32-dinov2.pt --stats latents_stats.pt --out vavae
    """

    positional: ClassVar = "source"

    source: str
    """Weights file (.pt, .ckpt or .safetensors) with encoder and decoder."""
    out: str
    """New folder, which `encode --vae` takes."""
    stats: str | None = None
    """File of LightningDiT's latents_stats.pt: the mean and the std of each latent channel."""
    scaling_factor: PositiveFloat = 1.0
    """Factor that brings the latents to unit size, such as 0.18215 for Stable Diffusion; after the stats, if given."""


@dataclass(frozen=True)
class CostConfig:
    """Parameters, multiply-adds and training memory of one network; `report TABLE` has those of the paper's tables.

    vcagen cost --model.size S/2 --model.attention vca
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    channels: PositiveInt = 4
    """Latent channels."""
    latent_size: Size = 32
    """Latent height and width."""
    num_classes: PositiveInt = 1000
    """Classes."""
    json: str | None = None
    """Also write the numbers to this file."""
    plugin: str | None = None
    """Module to import first, or several with commas."""


@dataclass(frozen=True)
class ReportConfig:
    """Report a table, published numbers beside ours, or one run.

    vcagen report configs/table2.yaml --runs runs/table2 --out report
    vcagen report runs/quickstart
    """

    positional: ClassVar = "source"

    source: str
    """Table file, such as configs/table2.yaml, or a run folder."""
    runs: str = "runs"
    """Folder below which the table's run folders are."""
    out: str | None = None
    """Folder of the files. Default: report/ in the folder of the runs, or the run folder."""
    score: str | None = None
    """Score that stands for a run, such as fid_50k. Default: the newest evaluation of each run."""
    plugin: str | None = None
    """Module to import first, or several with commas."""


@dataclass(frozen=True)
class ExperimentConfig:
    """Train, sample and report all runs of a table. The same command again does what is missing.

    vcagen experiment configs/miniature.yaml --runs runs/miniature --jobs 2
    """

    positional: ClassVar = "table"

    table: str
    """Table file, such as configs/miniature.yaml."""
    runs: str = "runs"
    """Folder below which the table's run folders are."""
    out: str | None = None
    """Folder of the report. Default: report/ in the folder of the runs."""
    jobs: PositiveInt = 1
    """Runs at a time; from 2 on each has one thread, the fastest way for tiny networks on a CPU."""
    seeds: PositiveInt | None = None
    """Only so many of the table's seeds. Default: all."""
    steps: PositiveInt | None = None
    """Training steps, for a trial. Default: the table's."""
    num_images: PositiveInt | None = None
    """Images to sample, for a trial. Default: the table's."""
    rows: str | None = None
    """Only the rows whose run folder this pattern matches, such as '*-vca*'. Default: all."""
    set: dict[str, Any] = field(default_factory=dict)
    """Dotted options of train.py for all rows, over the table's: '{"model.depth": 12}'."""
    plugin: str | None = None
    """Module to import first, or several with commas."""


@dataclass(frozen=True)
class ExtractorConfig:
    """Features of the scores."""

    extractor: str = "inception"
    """inception (FID), pixels (weight-free, called fd_pixels) or fashion (fd_fashion, of a classifier)."""
    inception_weights: str | None = None
    """Local file of the Inception weights. Default: torch-fidelity's download."""
    batch: PositiveInt = 64
    """Images a forward pass."""
    image_size: Size | None = None
    """Crop images of a reference folder to this side, as in training. Default: images must have one size."""
    num_workers: NonNegativeInt = 4
    """Decoding processes."""
    plugin: str | None = None
    """Module to import first, or several with commas."""


@dataclass(frozen=True, kw_only=True)
class StatsConfig(ExtractorConfig):
    """Write the reference statistics of an image folder, an .npz or the built-in digits.

    vcagen stats my/images --image_size 256 --out reference.npz
    """

    positional: ClassVar = "images"

    images: str
    """Image folder or archive, .npz of images (statistics stored in it are kept), or digits."""
    out: str = "reference.npz"
    """File of the statistics."""
    grayscale: bool = False
    """Read the images as one channel, for samples of one channel."""

    def __post_init__(self) -> None:
        if not self.out.endswith(".npz"):
            raise ValueError(f"out: {self.out}; must end in .npz")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(ExtractorConfig):
    """Score a folder or an .npz of samples against a reference: FID, sFID, IS, precision, recall.

    vcagen evaluate runs/sit/samples/FOLDER --reference VIRTUAL_imagenet256_labeled.npz
    """

    positional: ClassVar = "samples"

    samples: str
    """Folder of 8-bit RGB images, output folder of sample.py, or .npz with arr_0; digits for the built-in set."""
    reference: str
    """ADM .npz, image folder or archive, statistics of `vcagen stats`, or digits."""
    num_images: PositiveInt | None = None
    """Number of samples that must be there. Default: that of manifest.json beside them, or as many as are."""
    precision_recall: bool = True
    """Compute precision and recall, where the reference has images or features."""
    out: str | None = None
    """Result file. Default: results.json beside the images, above a folder called images; results_EXTRACTOR.json
    where that holds scores of another extractor."""


@dataclass(frozen=True)
class AttentionBenchConfig:
    """Time Visual-Contrast Attention and plain fused attention in turns, forward and with the backward pass."""

    tokens: list[PositiveInt] = field(default_factory=lambda: [256, 1024])
    """Token counts N, square numbers; the paper's latents of 256 pixels have 256 at patch size 2."""
    widths: list[PositiveInt] = field(default_factory=lambda: [384])
    """Widths D: 384 is S, 768 is B, 1152 is XL."""
    head_width: PositiveInt = 64
    """Width of a head, which divides all widths; XL has heads of 72."""
    precisions: list[Literal["float32", "bfloat16"]] = field(default_factory=lambda: ["float32"])
    """Types of inputs and weights."""
    modes: list[Literal["eager", "compiled"]] = field(default_factory=lambda: ["eager", "compiled"])
    """Without and with torch.compile, for both attentions."""
    parts: list[Literal["attend", "layer"]] = field(default_factory=lambda: ["attend", "layer"])
    """The attention on given q, k and v, and the layer with its projections."""
    contrast_side: PositiveInt = 8
    """Side of the contrast grid."""
    recognition: bool = False
    """In place of tokens, widths, head_width and contrast_side the shapes of DeiT-T (N 196, n 49) and of the first
    stage of Swin-T (N 3,136, n 9), whose layers convolve the values."""
    batch_tokens: PositiveInt | None = None
    """Tokens of a batch. Default: 2,048 on a CPU, 8 images of 256; 65,536 elsewhere, where less would time launches."""
    seconds: PositiveFloat = 3.0
    """Time of each measurement."""
    threads: PositiveInt | None = None
    """CPU threads. Default: as torch finds best."""
    device: str = "cpu"
    """Device to measure on: cpu or cuda."""
    json: str | None = None
    """File to write the numbers to as well."""
    plot: str | None = None
    """PNG file to draw the ratios over the tokens in as well."""


@dataclass(frozen=True)
class RecognitionBenchConfig:
    """Time whole recognition networks of timm, plain and with Visual-Contrast Attention, in turns."""

    models: list[str] = field(default_factory=lambda: ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
    """Plain networks, by timm's names; each is compared with vca_NAME."""
    batch: PositiveInt = 8
    """Images at once, of the size that the network is made for."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of images and weights."""
    modes: list[Literal["eager", "compiled"]] = field(default_factory=lambda: ["eager", "compiled"])
    """Without and with torch.compile."""
    seconds: PositiveFloat = 10.0
    """Time of each measurement."""
    threads: PositiveInt | None = None
    """CPU threads. Default: as torch finds best."""
    device: str = "cpu"
    """Device to measure on: cpu or cuda."""
    json: str | None = None
    """File to write the numbers to as well."""


@dataclass(frozen=True)
class TrainBenchConfig:
    """Time whole training steps (data, forward, backward, optimizer, EMA), bare networks and a peer, in turns.

    The attentions of one size, precision and mode take turns, then make room for the next ones.
    """

    sizes: list[str] = field(default_factory=lambda: ["S/2"])
    """Networks, on latents (4, 32, 32)."""
    attentions: list[str] = field(default_factory=lambda: ["mhsa", "vca"])
    """Attentions; with mhsa among them the others are compared with it."""
    precisions: list[Literal["float32", "bf16"]] = field(default_factory=lambda: ["float32"])
    """float32, or autocast to bfloat16."""
    modes: list[Literal["eager", "compiled"]] = field(default_factory=lambda: ["eager"])
    """Without and with torch.compile."""
    process: str = "diffusion"
    """Process that is learned."""
    batch: PositiveInt = 8
    """Images a step."""
    peer: str | None = None
    """module.path:callable that makes a network forward(x, t, y), timed in turns, eager in float32, with AdamW."""
    seconds: PositiveFloat = 60.0
    """Time of the measurement, over all networks."""
    peak_tflops: PositiveFloat | None = None
    """The device's rate in TFLOP/s for that precision, such as 989 of an H100 in bf16: prints the share of it that the
    network's own products reach (model FLOP use)."""
    threads: PositiveInt | None = None
    """CPU threads. Default: as torch finds best."""
    json: str | None = None
    """File to write the numbers to as well."""


@dataclass(frozen=True)
class SampleBenchConfig:
    """Time whole sampling sessions against the same network and VAE calls alone, in turns, all of random weights."""

    size: str = "S/2"
    """Network."""
    attention: str = "mhsa"
    """Its attention."""
    process: str = "diffusion"
    """Process, sampled by its default sampler."""
    image_size: PositiveInt = 256
    """Side of the images in pixels."""
    vae: str = "random"
    """random: the size of Stable Diffusion's, downsampling by 8; or a hub name or local folder."""
    num_images: PositiveInt | None = None
    """Images of a session. Default: two batches."""
    batch: PositiveInt | None = None
    """Images a network call. Default: 4 on a CPU, 128 on a GPU."""
    precision: Literal["no", "bf16"] = "no"
    """Autocast of the network."""
    compile: bool = False
    """Run the network through torch.compile."""
    num_steps: PositiveInt = 10
    """Steps of the sampler; the recipe's 250 make the share of all but the noise 25 times smaller."""
    repeats: PositiveInt = 3
    """Pairs of sessions; the fastest of each kind count."""
    json: str | None = None
    """File to write the numbers to as well."""


@dataclass(frozen=True)
class VaeBenchConfig:
    """Time what stands between images and a training step: decoding and encoding of the VAE, reading of shards."""

    batch: PositiveInt = 1
    """Images that a VAE of the size of Stable Diffusion's, of random weights, takes at once."""
    image_size: PositiveInt = 256
    """Their side in pixels, a multiple of 8."""
    repeats: PositiveInt = 2
    """Measurements of each; the fastest counts."""
    items: PositiveInt = 20_000
    """Latents of a synthetic set of shards, 32 KiB each with their mirror images."""
    read_batch: PositiveInt = 256
    """Latents of a batch that is read."""
    num_workers: NonNegativeInt = 2
    """Loader processes of the second reading; 0 leaves it out."""
    seconds: PositiveFloat = 5.0
    """Time of each measurement of reading."""
    device: str = "cpu"
    """Device of the VAE."""
    json: str | None = None
    """File to write the numbers to as well."""


@dataclass(frozen=True, kw_only=True)
class CallsBenchConfig:
    """Score a run over the number of network calls, for every sampler, with and without guidance; resumable.

    vcagen bench calls runs/quickstart --reference digits --extractor pixels
    """

    positional: ClassVar = "run_dir"

    run_dir: str
    """Run folder or weights file of ours."""
    reference: str
    """Reference of the scores, as that of sample.py."""
    extractor: str = "inception"
    """Features of the scores."""
    calls: list[PositiveInt] = field(default_factory=lambda: [5, 10, 20, 50, 100, 250])
    """Network calls; a method with several a step makes as many steps as fit."""
    cfg_scales: list[float] = field(default_factory=lambda: [1.0, 1.5])
    """Guidance; 1 is off. A guided call sees every image twice."""
    num_images: PositiveInt = 1000
    """Images a point, with balanced labels."""
    batch: PositiveInt = 250
    """Images a network call."""
    device: str = "cpu"
    """Device of the network."""
    threads: PositiveInt | None = None
    """CPU threads. Default: as torch finds best."""
    out: str | None = None
    """Folder of calls.json and calls.png. Default: that of the run or of the file."""
    plugin: str | None = None
    """Module to import first, or several with commas."""


@dataclass(frozen=True)
class KernelsBenchConfig:
    """Time the fused kernels beside the maps and plain flash attention on this GPU, or compile them for any.

    vcagen bench kernels --save
    vcagen bench kernels --compile_only
    """

    compile_only: bool = False
    """Compile ahead of time and print registers, spills and shared memory; needs no GPU."""
    save: bool = False
    """Keep the times on this machine, where `kernel: auto` finds them."""
    head_dims: list[PositiveInt] = field(default_factory=lambda: [64, 72])
    """Head widths; 64 is that of S and B, 72 that of XL."""
    token_sides: list[PositiveInt] = field(default_factory=lambda: [16, 32, 64])
    """Sides of the token grid; the first is compiled for."""
    contrast_grid: tuple[PositiveInt, PositiveInt] = (8, 8)
    """Rows and columns of the contrast grid."""
    precisions: list[Literal["float32", "bfloat16", "float16"]] = field(default_factory=lambda: ["bfloat16"])
    """Types of the projection."""
    num_heads: PositiveInt = 6
    """Heads of the layers that are timed."""
    batch_tokens: PositiveInt = 65536
    """Tokens of a batch that is timed."""
    seconds: PositiveFloat = 2.0
    """Time of each measurement."""
    capabilities: list[PositiveInt] = field(default_factory=lambda: [80, 90, 120])
    """Compute capabilities to compile for: 80 is A100, 90 H100 and H200, 120 RTX 50."""
    rows: list[PositiveInt] = field(default_factory=list)
    """Rows of a block to compile. Default: those that a call takes."""
    warps: list[PositiveInt] = field(default_factory=list)
    """Warps to compile. Default: those that a call takes."""
    stages: list[PositiveInt] = field(default_factory=list)
    """Pipeline stages to compile. Default: those that a call takes."""
    json: str | None = None
    """File to write the numbers to as well."""
