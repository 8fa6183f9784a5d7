"""Sample images from a run or a weights file, and score them: python sample.py --run_dir runs/x --num_images 50000."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcagen.config import command_line as cli
from vcagen.config.options import SAMPLER_OPTIONS, SampleConfig, SamplingConfig

if TYPE_CHECKING:
    import torch

    from vcagen.evaluation.evaluate import Evaluator
    from vcagen.sampling.image_store import SampleStore
    from vcagen.sampling.load_run import LoadedRun
    from vcagen.sampling.noise import LabelRule


def main() -> None:
    """Parse, load, make the images, score them."""
    config = cli.parse(SampleConfig, prog="sample.py")
    source = config.run_dir or config.checkpoint
    if source is None or (config.run_dir and config.checkpoint):
        raise ValueError("run_dir: give one of --run_dir FOLDER and --checkpoint FILE")
    if config.run_dir and Path(config.run_dir).is_file():
        raise ValueError(f"run_dir: {config.run_dir} is a file; give it as --checkpoint")

    import torch
    from accelerate.utils import broadcast_object_list

    from vcagen.build import build_accelerator, build_sampler
    from vcagen.evaluation.image_source import result_path
    from vcagen.sampling.image_store import SampleStore
    from vcagen.sampling.load_run import load_run
    from vcagen.sampling.noise import LabelRule, SeededNoise, generate_images, missing_chunks, resolve_sampling
    from vcagen.system.files import check_writable, write_json

    # The other processes wait while the first measures a reference, which may take longer than the usual ten minutes.
    accelerator = build_accelerator(patient=True)
    torch.backends.cudnn.allow_tf32 = False  # the patch embedding is a convolution
    device, main_process = accelerator.device, accelerator.is_main_process
    run = load_run(
        source, weights=config.weights, step=config.step, process=config.process, vae=config.vae, device=device
    )
    settings = resolve_sampling(config, run.config.sampling, run.config.process.name)
    check_values(config, settings, run)
    assert settings.labels is not None, "settings are resolved"
    labels = LabelRule(settings.labels, run.data.num_classes, run.data.class_names)
    network = torch.compile(run.model, dynamic=False) if config.compile else run.model
    sample = build_sampler(
        network, run.process, settings, null_label=run.model.null_label, bf16=config.precision == "bf16"
    )
    decode = partial(run.vae.decode, batch=config.decode_batch or config.batch)
    store = SampleStore(
        config.out or default_folder(config, settings, run.step),
        settings.num_images or 0,
        config.batch,
        image_shape=run.image_shape,
        settings=pixel_settings(config, settings, run, labels),
        png=config.png,
        npz=config.npz,
    )
    if config.dry_run:
        if main_process:
            plan = {"out": str(store.folder), "chunks": store.num_chunks, "processes": accelerator.num_processes}
            print(json.dumps({**plan, **store.manifest}, indent=2))
        return
    if settings.cfg_scale == 0 and main_process:
        print("note: cfg_scale 0 ignores the labels: the samples are unconditional", file=sys.stderr)
    check_writable(store.folder / "manifest.json")
    run.vae.verify()  # a VAE that cannot be had is told now, not after the first sample

    scores, no_scores = open_scores(config, settings, store, device, main_process)
    made = facts(config, settings, run, store, accelerator.num_processes)
    if main_process:
        store.prepare()
        write_json(store.folder / "facts.json", made)  # for scores that come later
    (chunks,) = broadcast_object_list([missing_chunks(store, scores) if main_process else None])
    calls = generate_images(
        sample,
        decode,
        store,
        chunks=chunks,
        noise=SeededNoise(config.seed),
        labels=labels,
        latent_shape=run.latent_shape,
        device=device,
        scores=scores,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    accelerator.wait_for_everyone()
    if main_process:
        store.finish()
        print(f"images: {store.folder} ({calls} network calls in this process)", file=sys.stderr)
        if scores is not None:
            result = scores.finalize(sampling=store.manifest, extractor={"batch": config.batch}, **made)
            write_json(result_path(str(store.folder), scores.extractor.name), result)
            print(json.dumps(result["metrics"], indent=2))
            for warning in result["warnings"]:
                print(f"warning: {warning}", file=sys.stderr)
    accelerator.end_training()
    if no_scores and main_process:
        raise ValueError(no_scores)


def check_values(config: SampleConfig, settings: SamplingConfig, run: LoadedRun) -> None:
    """Raise ValueError, by name, for values that do not fit the run."""
    trained, channels = run.config.process.name, run.latent_shape[0]
    if not 0 <= config.seed < 2**63:
        raise ValueError(f"seed: {config.seed} is not in 0..2^63 - 1")
    if config.process not in (None, trained):
        raise ValueError(f"process: {config.process}; the weights were trained for {trained}")
    if config.decode_batch is not None and config.decode_batch < 1:
        raise ValueError(f"decode_batch: {config.decode_batch}; needs at least 1")
    if settings.guided_channels is not None and settings.guided_channels > channels:
        raise ValueError(f"guided_channels: {settings.guided_channels}; the latents have {channels}")


def default_folder(config: SampleConfig, settings: SamplingConfig, step: int | None) -> Path:
    """samples/ in the run, or here for a weights file, and a folder named by what is most often changed."""
    if config.run_dir:
        parent, name = Path(config.run_dir), f"step_{step:07d}"
    else:
        parent, name = Path(), Path(config.checkpoint or "").stem
    name += f"_{config.weights}" if config.weights else ""
    name += f"_{settings.sampler}_{settings.num_steps or settings.method}_cfg{settings.cfg_scale}"
    return parent / "samples" / f"{name}_seed{config.seed}_n{settings.num_images}"


def pixel_settings(config: SampleConfig, settings: SamplingConfig, run: LoadedRun, labels: LabelRule) -> dict[str, Any]:
    """What decides the pixels besides the number of images and the batch: the rest of manifest.json."""
    values = asdict(settings)
    for name in ("num_images", "reference", "extractor"):
        del values[name]
    return {
        "seed": config.seed,
        "step": run.step,
        "ema_decay": run.ema_decay,
        "weights_sha256": run.weights_sha256,
        "process": run.config.process.name,
        "vae": run.data.vae["sha256"] or "identity",
        **{name: value for name, value in values.items() if value is not None},
        "labels": labels.given or labels.rule,
        "precision": config.precision,
        "compile": config.compile,
    }


def open_scores(
    config: SampleConfig, settings: SamplingConfig, store: SampleStore, device: torch.device, main_process: bool
) -> tuple[Evaluator | None, str]:
    """The evaluator, or None and why there is none though a reference was given: images are made all the same.

    Raises:
        ValueError: a reference or extractor that does not fit, or images that would neither be kept nor scored.
    """
    from vcagen.evaluation.evaluate import Evaluator
    from vcagen.evaluation.features import load_extractor
    from vcagen.evaluation.reference import check_reference_path, open_reference

    if settings.reference is None:
        if not store.keeps_images:
            raise ValueError("png: without png, npz and reference nothing would be kept")
        return None, ""
    check_reference_path(settings.reference)
    try:
        extractor = load_extractor(settings.extractor or "inception", weights=config.inception_weights, device=device)
    except ValueError as error:
        if config.inception_weights is not None or not store.keeps_images:
            raise
        kept = store.folder / "images" if store.png else store.npz
        command = f"python -m vcagen evaluate {kept} --reference {settings.reference} --inception_weights PATH"
        return None, f"{error}; the images are kept, this scores them: {command}"
    reference = open_reference(settings.reference, extractor, shape=store.image_shape) if main_process else None
    scores = Evaluator(extractor, reference, store.num_images, folder=store.folder / "features")
    scores.check_shape(store.image_shape)
    return scores, ""


def facts(
    config: SampleConfig, settings: SamplingConfig, run: LoadedRun, store: SampleStore, world_size: int
) -> dict[str, Any]:
    """What results.json says about how the images were made (PROTOCOL 3.6)."""
    options = {name: getattr(settings, name) for name in SAMPLER_OPTIONS if name not in ("method", "num_steps")}
    return {
        "uint8_rule": "floor((x + 1) * 127.5 + 0.5), clamped to 0..255",
        "samples": {"source": "sample.py", "index_rule": "file order", "labels": settings.labels,
                    "dropped": store.num_chunks * store.batch - store.num_images},
        "sampler": {"kind": settings.sampler, "method": settings.method, "steps": settings.num_steps,
                    "cfg_scale": settings.cfg_scale, "cfg_channels": settings.guided_channels,
                    "cfg_interval": settings.cfg_interval, "seed": config.seed, "world_size": world_size,
                    "batch": config.batch, "precision": config.precision, "compile": config.compile,
                    **{name: value for name, value in options.items() if value is not None}},
        "model": {"config": asdict(run.config.model), "process": run.config.process.name, "step": run.step,
                  "checkpoint_sha256": run.weights_sha256, "ema_decay": run.ema_decay},
        "vae": {"id": run.vae.path, "sha256": run.data.vae["sha256"], "scale": run.vae.scaling_factor},
    }  # fmt: skip


if __name__ == "__main__":
    cli.run(main)
