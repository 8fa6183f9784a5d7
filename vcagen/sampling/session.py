"""A sampling session: the images of a folder that are missing, then their scores."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from tqdm import tqdm

from vcagen.build import sampler_options
from vcagen.config.job_options import EvaluateConfig
from vcagen.config.options import SAMPLING_OPTIONS, SampleConfig
from vcagen.data.images import is_dataset
from vcagen.evaluation.evaluate import Evaluation, later_command
from vcagen.evaluation.extractor import MissingWeights
from vcagen.processes.process import Model
from vcagen.sampling.image_store import ImageStore
from vcagen.sampling.load_run import load
from vcagen.sampling.noise import LabelRule, SeededNoise
from vcagen.system.files import check_writable
from vcagen.system.processes import build_accelerator
from vcagen.system.trackers import log_scores, start_trackers


def run(config: SampleConfig) -> None:
    """Make the images and score them."""
    session = SamplingSession(config)
    if config.dry_run:
        return session.print_plan()
    session.prepare()
    session.make_images()
    session.score()


class SamplingSession:
    """The images of one folder, made and scored by all processes.

    Image i depends on (seed, i) alone. Work units are chunks of `batch` consecutive indices; the last one is padded
    with the indices that would follow, made but never kept, so that the network always sees one batch shape.

    Raises:
        ValueError: no such weights, or options that do not fit them.
    """

    def __init__(self, config: SampleConfig) -> None:
        if (config.run_dir is None) == (config.checkpoint is None):
            raise ValueError("run_dir: give one of --run_dir FOLDER and --checkpoint FILE")
        if config.run_dir and Path(config.run_dir).is_file():
            raise ValueError(f"run_dir: {config.run_dir} is a file; give it as --checkpoint")
        self.config = config
        # The other processes wait while the first measures a reference, which may take longer than ten minutes.
        self.accelerator = build_accelerator(patient=True)
        loaded = load(
            config.run_dir or config.checkpoint or "", weights=config.weights, step=config.step,
            process=config.process, vae=config.vae, device=self.accelerator.device,
        )  # fmt: skip
        self.tf32 = loaded.config.train.tf32 if config.tf32 is None else config.tf32
        for note in loaded.notes:
            self._say(note)
        self.calls, self.bar = 0, tqdm(disable=True)
        self.run = replace(loaded, network=self._network(loaded.network), tf32=self.tf32)
        self.settings = loaded.sampling(
            **{name: getattr(config, name) for name in SAMPLING_OPTIONS if name in config.given}
        )
        self.labels = LabelRule(
            self.settings.labels, loaded.data.num_classes, loaded.data.class_names, chosen="labels" in config.given
        )
        self.noise = SeededNoise(config.seed)
        self.store = ImageStore(
            config.out or self._default_folder(), self.settings.num_images, config.batch,
            image_shape=loaded.image_shape, settings=self._pixel_settings(), facts=self._facts(), npz=config.npz,
        )  # fmt: skip
        self.evaluation: Evaluation | None = None
        self.no_scores = ""

    def print_plan(self) -> None:
        """Print what would be made."""
        if self.accelerator.is_main_process:
            plan = {"out": str(self.store.folder), "chunks": self.store.num_chunks}
            print(json.dumps({**plan, "processes": self.accelerator.num_processes, **self.store.manifest}, indent=2))

    def prepare(self) -> None:
        """Find out what could go wrong before any image is made.

        Raises:
            ValueError: a folder that cannot be written or holds other images, a VAE or a reference that cannot be had.
        """
        if self.settings.cfg_scale == 0:
            self._say("note: cfg_scale 0 ignores the labels: the samples are unconditional")
        check_writable(self.store.folder / "manifest.json")
        self.run.vae.verify()
        if self.settings.reference is not None:
            self._open_evaluation(self.settings.reference)
        if self.accelerator.is_main_process:
            self.store.prepare()

    def make_images(self) -> None:
        """Make the chunks with missing images; each process takes its share."""
        (missing,) = broadcast_object_list([self.store.missing() if self.accelerator.is_main_process else None])
        mine = missing[self.accelerator.process_index :: self.accelerator.num_processes]
        total = min(len(missing) * self.config.batch, self.settings.num_images)
        hidden = not (missing and self.accelerator.is_main_process)
        with tqdm(total=total, unit="img", desc="sampling", disable=hidden) as self.bar:
            try:
                for chunk in mine:
                    indices = self.store.indices(chunk)  # the same for any number of processes
                    y = self.labels(indices, self.noise)  # (N,)
                    images = self.run.images(
                        indices, y, settings=self.settings, noise=self.noise, decode_batch=self.config.decode_batch
                    )
                    self.store.write(indices, images)  # uint8 (N, C, H, W)
                    done = len(indices) * self.accelerator.num_processes  # the others are about as far
                    self.bar.update(min(done, total - self.bar.n))
            finally:
                self.store.flush()
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.store.finish()
            self._say(f"images: {self.store.folder} ({self.calls} network calls in this process)")

    def score(self) -> None:
        """Score the folder, where a reference is given.

        Raises:
            ValueError: there are no weights for the features; how to score later.
        """
        if self.evaluation is not None:
            self._track(self.evaluation.score())
        self.accelerator.end_training()
        if self.no_scores and self.accelerator.is_main_process:
            raise ValueError(self.no_scores)

    def _track(self, result: dict[str, Any] | None) -> None:
        """Show the scores in the trackers of the run, named by the settings of the samples; `result` is rank 0's."""
        names = self.run.config.log.trackers if self.config.run_dir else []
        if not (result and names):
            return
        settings = re.sub(r"^step_\d+_", "", self.store.folder.name)
        try:
            start_trackers(self.accelerator, names, Path(self.config.run_dir or ""))
            log_scores(
                self.accelerator, {f"{settings}/{name}": value for name, value in result["metrics"].items()},
                self.run.step,
            )  # fmt: skip
        except Exception as error:  # whatever a tracker raises; the scores are in results.json
            self._say(f"note: no scores in {', '.join(names)} ({(str(error) or repr(error)).splitlines()[0]})")

    def _network(self, network: Model) -> Model:
        """The network in the precision asked for, compiled if asked for; its calls are counted and shown."""
        network = torch.compile(network, dynamic=False) if self.config.compile else network
        bf16 = self.config.precision == "bf16"

        def counted(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            self.bar.set_postfix_str(f"network calls {self.calls}", refresh=self.calls % 10 == 0)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
                return network(x, t, y).float()

        return counted

    def _open_evaluation(self, reference: str) -> None:
        """Open the reference and the features; images are made all the same where only the features are missing."""
        stored = is_dataset(reference) or reference.endswith(".npz")
        config = EvaluateConfig(
            samples=str(self.store.folder), reference=reference, extractor=self.settings.extractor,
            inception_weights=self.config.inception_weights, num_images=self.settings.num_images,
            image_size=None if stored else self.run.data.image_size,  # cropped as in training
        )  # fmt: skip
        try:
            self.evaluation = Evaluation(config, self.accelerator, shape=self.store.image_shape)
        except MissingWeights as error:
            if self.config.inception_weights is not None:
                raise
            self.no_scores = f"{error}; the images are kept, this scores them: {later_command(config)}"

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            print(text, file=sys.stderr)

    def _default_folder(self) -> Path:
        """samples/ in the run, or here for a weights file, and a folder named by what is most often changed."""
        config, settings = self.config, self.settings
        if config.run_dir:
            parent, name = Path(config.run_dir), f"step_{self.run.step:07d}"
        else:
            parent, name = Path(), Path(config.checkpoint or "").stem
        options = sampler_options(settings)
        name += f"_{config.weights}" if config.weights else ""
        name += f"_{settings.sampler}_{options.get('num_steps') or settings.method}_cfg{settings.cfg_scale}"
        return parent / "samples" / f"{name}_seed{config.seed}_n{settings.num_images}"

    def _pixel_settings(self) -> dict[str, Any]:
        """What decides the pixels besides the number of images and the batch: the rest of manifest.json."""
        config, settings, run = self.config, self.settings, self.run
        guidance = {"cfg_interval": settings.cfg_interval, "guided_channels": settings.guided_channels}
        return {
            "seed": config.seed,
            "step": run.step,
            "ema_decay": run.ema_decay,
            "weights_sha256": run.weights_sha256,
            "process": run.config.process.name,
            "vae": run.data.vae["sha256"] or "identity",
            "sampler": settings.sampler,
            **sampler_options(settings),
            "cfg_scale": settings.cfg_scale,
            **{name: value for name, value in guidance.items() if value is not None},
            "labels": self.labels.given or self.labels.rule,
            "precision": config.precision,
            "compile": config.compile,
            "tf32": self.tf32,
            "kernel": run.config.model.attention_options.kernel,
        }

    def _facts(self) -> dict[str, Any]:
        """What results.json says about how the images were made (PROTOCOL 3.6)."""
        config, settings, run = self.config, self.settings, self.run
        options = {name: value for name, value in sampler_options(settings).items() if name != "num_steps"}
        return {
            "uint8_rule": "floor((x + 1) * 127.5 + 0.5), clamped to 0..255",
            "samples": {"source": "sample.py", "index_rule": "file order", "labels": settings.labels,
                        "dropped": -settings.num_images % config.batch},
            "sampler": {"kind": settings.sampler, "method": None, "steps": sampler_options(settings).get("num_steps"),
                        "cfg_scale": settings.cfg_scale, "cfg_channels": settings.guided_channels,
                        "cfg_interval": settings.cfg_interval, "seed": config.seed,
                        "world_size": self.accelerator.num_processes, "batch": config.batch,
                        "precision": config.precision, "compile": config.compile, "tf32": self.tf32, **options},
            "model": {"config": asdict(run.config.model), "process": run.config.process.name, "step": run.step,
                      "checkpoint_sha256": run.weights_sha256, "ema_decay": run.ema_decay},
            "vae": {"id": run.vae.path, "sha256": run.data.vae["sha256"], "scale": run.vae.scale.factor},
        }  # fmt: skip
