"""What a run gives away: one weights file, or a folder for the Hub."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from vcagen.config.job_options import ExportConfig
from vcagen.config.options import to_plain
from vcagen.data.vae import LatentVAE
from vcagen.jobs.hub_card import card
from vcagen.networks.dit import DiT
from vcagen.networks.weights import export_weights
from vcagen.paper.run_results import read_run
from vcagen.processes.process import check_choice
from vcagen.sampling.load_run import LoadedRun, load
from vcagen.system.files import FORMAT, atomic_folder


def run(config: ExportConfig) -> None:
    """Write the file or the folder and say which weights it holds.

    Raises:
        ValueError: no such weights, or the file exists; as `export_folder`.
    """
    if config.format == "hub":
        notes = export_folder(config.run_dir, config.out, weights=config.weights, step=config.step, vae=config.vae)
        print(f"{config.out}: {'; '.join(notes)}", file=sys.stderr)
        return
    if config.vae is not None:
        raise ValueError("vae: one weights file holds no VAE; a folder does: --format hub")
    source = export_weights(config.run_dir, config.out, weights=config.weights, step=config.step)
    print(f"{config.out}: {source}", file=sys.stderr)


def export_folder(
    source: str | Path,
    out: str | Path,
    *,
    name: str | None = None,
    weights: str = "ema",
    step: int | None = None,
    vae: str | None = None,
) -> list[str]:
    """Write model, VAE, scheduler and card of a run or weights file as a folder that diffusers and `load` read.

    Args:
        name: what the card calls it. Default: the name of the folder.
        vae: where the VAE is now, if not where the weights say.

    Returns:
        Which weights these are, and what their user should know.

    Raises:
        ValueError: `out` exists, as `load`, or a process for which diffusers has no scheduler.
    """
    from vcagen.jobs.hub_pipeline import VcagenPipeline, VcagenTransformer, scheduler_of

    if Path(out).exists():
        raise ValueError(f"out: {out} exists; choose another folder")
    run = load(source, weights=weights, step=step, vae=vae)
    check_choice("process.name", run.config.process.name, ("diffusion", "flow"))
    network = run.network
    assert isinstance(network, DiT), "load builds it"
    results = read_run(Path(source)).scores if Path(source).is_dir() else []
    scores = [score for score in results if score.sampling.get("weights_sha256") == run.weights_sha256]
    autoencoder = LatentVAE.from_description(run.data.vae, path=run.vae.path).autoencoder()
    if autoencoder is not None:
        autoencoder.register_to_config(**run.vae.scale_fields, _name_or_path="vae")
    run = _without_folders(run)
    transformer = VcagenTransformer(_metadata(run))
    transformer.load_state_dict(network.state_dict())
    pipeline = VcagenPipeline(transformer, scheduler_of(run.config.process), autoencoder)
    with atomic_folder(out) as folder:
        pipeline.save_pretrained(folder)
        (folder / "README.md").write_text(card(name or Path(out).name, run, scores))
    return list(run.notes)


def _without_folders(run: LoadedRun) -> LoadedRun:
    """The run without the paths of this machine: of a folder its last name stays, and the VAE lies beside the model."""
    config, description = run.config, run.data.vae
    config = replace(
        config,
        run_dir=PurePath(config.run_dir).name,
        init=config.init and PurePath(config.init).name,
        data=replace(config.data, path=PurePath(config.data.path).name),
        vae=replace(config.vae, path=None),
        sampling=replace(config.sampling, reference=None),
    )
    is_local = description["sha256"] and Path(run.vae.path).exists()
    data = replace(run.data, vae={**description, **({"path": "vae"} if is_local else {})})
    return replace(run, config=config, data=data)


def _metadata(run: LoadedRun) -> dict[str, Any]:
    """What a weights file of ours says of itself."""
    plain = {"config": to_plain(run.config), "data": run.data.to_dict()}
    return {"format": FORMAT, **plain, "step": run.step, "ema_decay": run.ema_decay}
