"""Options of the jobs of python -m vcagen, one frozen dataclass a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vcagen.config.command_line import at_least
from vcagen.config.options import ImageConfig, ModelConfig, ProcessConfig, VaeConfig


@dataclass(frozen=True)
class InspectConfig:
    """Say what a run folder or a weights file holds: step, averages, parameters, configuration, classes, VAE.

    python -m vcagen inspect runs/quickstart
    """

    path: str
    """Run folder, weights file of ours, or public DiT or SiT file."""
    json: str | None = None
    """Also write all of it to this JSON file; - prints JSON instead of the table."""


@dataclass(frozen=True)
class ExportConfig:
    """Write one weights file of a run, with all that sampling needs in it.

    python -m vcagen export runs/quickstart --out digits.safetensors
    """

    run_dir: str
    """Run folder."""
    out: str
    """New .safetensors file."""
    weights: str = "ema"
    """ema, ema_DECAY or raw."""
    step: int | None = None
    """Step of the checkpoint. Default: the newest."""


@dataclass(frozen=True)
class EncodeConfig(ImageConfig):
    """Encode an image folder, or the built-in digits, to latent shards. The same command again does what is missing.

    python -m vcagen encode imagenet/train --out latents/imagenet256
    """

    vae: str | None = None
    """Hub name or local folder of a diffusers AutoencoderKL, or identity. Default: stabilityai/sd-vae-ft-ema; identity
    for the digits."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the VAE."""
    tiling: bool = False
    """Encode in tiles, for large images in small memory."""
    slicing: bool = False
    """Encode one image at a time."""
    images: str = ""
    """Image folder with one folder a class (or none), or digits."""
    out: str = "latents"
    """Folder of the shards."""
    batch: int = 32
    """Images the VAE encodes at once; the mirror images are another batch."""
    shard_size: int = 4096
    """Images a shard."""
    dtype: Literal["float16", "bfloat16"] = "float16"
    """Storage type of the moments."""
    num_workers: int = 4
    """Decoding threads."""
    dry_run: bool = False
    """Print the plan with bytes and time, and stop."""

    def vae_config(self) -> VaeConfig:
        """The section of train.py that these options are."""
        return VaeConfig(path=self.vae, precision=self.precision, tiling=self.tiling, slicing=self.slicing)


@dataclass(frozen=True)
class CostConfig:
    """Parameters and multiply-adds of a table of the paper, or of one network.

    python -m vcagen cost configs/table2.yaml
    python -m vcagen cost --model.size S/2 --model.attention vca
    """

    table: str | None = None
    """Table file, such as configs/table2.yaml; its rows are printed beside the published numbers."""
    model: ModelConfig = field(default_factory=ModelConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    channels: int | None = None
    """Latent channels. Default: the table's, else 4."""
    latent_size: int | None = None
    """Latent height and width. Default: the table's, else 32."""
    num_classes: int | None = None
    """Classes. Default: the table's, else 1000."""
    json: str | None = None
    """Also write the rows to this file."""


@dataclass(frozen=True)
class ReportConfig:
    """Report a table, published numbers beside ours, or one run.

    python -m vcagen report configs/table2.yaml --runs runs/table2 --out report
    python -m vcagen report runs/quickstart
    """

    source: str
    """Table file, such as configs/table2.yaml, or a run folder."""
    runs: str = "runs"
    """Folder below which the table's run folders are."""
    out: str | None = None
    """Folder of the files. Default: report/ in the folder of the runs, or the run folder."""


@dataclass(frozen=True)
class ExperimentConfig:
    """Train, sample and report all runs of a table. The same command again does what is missing.

    python -m vcagen experiment configs/miniature.yaml --runs runs/miniature --jobs 2
    """

    table: str
    """Table file, such as configs/miniature.yaml."""
    runs: str = "runs"
    """Folder below which the table's run folders are."""
    out: str | None = None
    """Folder of the report. Default: report/ in the folder of the runs."""
    jobs: int = 1
    """Runs at a time; from 2 on each has one thread, the fastest way for tiny networks on a CPU."""
    seeds: int | None = None
    """Only so many of the table's seeds. Default: all."""
    steps: int | None = None
    """Training steps, for a trial. Default: the table's."""
    num_images: int | None = None
    """Images to sample, for a trial. Default: the table's."""


@dataclass(frozen=True)
class ExtractorConfig:
    """Features of the scores."""

    extractor: Literal["inception", "pixels"] = "inception"
    """inception (FID) or pixels (weight-free, called fd_pixels)."""
    inception_weights: str | None = None
    """Local file of the Inception weights. Default: torch-fidelity's download."""
    batch: int = 64
    """Images a forward pass."""
    image_size: int | None = None
    """Crop images of a reference folder to this side, as in training. Default: images must have one size."""
    num_workers: int = 4
    """Decoding threads."""

    def __post_init__(self) -> None:
        at_least(self, batch=1, image_size=1, num_workers=1)


@dataclass(frozen=True, kw_only=True)
class StatsConfig(ExtractorConfig):
    """Write the reference statistics of an image folder, an .npz or the built-in digits.

    python -m vcagen stats my/images --image_size 256 --out reference.npz
    """

    images: str
    """Image folder, .npz of images (statistics stored in it are kept), or digits."""
    out: str = "reference.npz"
    """File of the statistics."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.out.endswith(".npz"):
            raise ValueError(f"out: {self.out}; must end in .npz")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(ExtractorConfig):
    """Score a folder or an .npz of samples against a reference: FID, sFID, IS, precision, recall.

    python -m vcagen evaluate runs/sit/samples/FOLDER --reference VIRTUAL_imagenet256_labeled.npz
    """

    samples: str
    """Folder of 8-bit RGB images, output folder of sample.py, or .npz with arr_0; digits for the built-in set."""
    reference: str
    """ADM .npz, image folder, statistics of `vcagen stats`, or digits."""
    num_images: int | None = None
    """Number of samples that must be there. Default: that of manifest.json beside them, or as many as are."""
    precision_recall: bool = True
    """Compute precision and recall, where the reference has images or features."""
    out: str | None = None
    """Result file. Default: results.json beside the images, above a folder called images; results_EXTRACTOR.json
    where that holds scores of another extractor."""
