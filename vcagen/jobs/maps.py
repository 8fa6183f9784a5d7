"""Where the streams of Visual-Contrast Attention look, on images that the run itself makes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from vcagen.config.job_options import MapsConfig
from vcagen.jobs.map_pages import COLUMNS, Input, contrast_page, query_page
from vcagen.networks.attention import VisualContrastAttention
from vcagen.networks.maps import ContrastMaps, Grid, contrast_maps, watching
from vcagen.sampling.load_run import LoadedRun, load
from vcagen.sampling.noise import LabelRule, SeededNoise
from vcagen.system.files import atomic_file


def run(config: MapsConfig) -> None:
    """Write the pages as PNG files.

    Raises:
        ValueError: no run, a network without VCA, or a label, time, block, query or head that is not there.
    """
    loaded = load(config.source, weights=config.weights, step=config.step, vae=config.vae, device=config.device)
    print(*loaded.notes, sep="\n", file=sys.stderr)
    layer = next(iter(vca_layers(loaded).values()))
    rule = config.labels or ",".join(map(str, range(min(2, loaded.data.num_classes))))
    labels = LabelRule(rule, loaded.data.num_classes, loaded.data.class_names).given
    if not labels:
        raise ValueError(f"labels: {rule}; give labels or class names with commas between")
    times = parse_times(config.times, loaded)
    count = len(vca_layers(loaded))
    blocks = list(range(count)) if config.block == "all" else _whole("block", config.block, [count])
    height, width = layer.grid_size
    y, x = (height // 2, width // 2) if config.query is None else _whole("query", config.query, [height, width])
    head = None if config.head is None else _whole("head", str(config.head), [layer.num_heads])[0]
    given = {} if config.num_steps is None else {"num_steps": config.num_steps}
    settings, noise, classes = loaded.sampling(**given), SeededNoise(config.seed), torch.tensor(labels)
    latents = loaded.latents_of(range(len(labels)), classes, settings=settings, noise=noise)
    inputs, maps = look(loaded, latents, classes, times, seed=config.seed)
    chosen = {name: maps[name] for index, name in enumerate(maps) if index in blocks}
    path = Path(config.source)
    out = Path(config.out or (path if path.is_dir() else path.parent) / "maps")
    for name, figure in tqdm(pages(inputs, chosen, (y, x), head), desc="maps", unit="page"):
        with atomic_file(out / f"{name}.png") as temporary:
            figure.savefig(temporary, format="png")
    print(f"pages: {out}", file=sys.stderr)


def vca_layers(run: LoadedRun) -> dict[str, VisualContrastAttention]:
    """The layers of VCA of a run's network, by their names on the pages.

    Raises:
        ValueError: the network has none.
    """
    assert isinstance(run.network, nn.Module)
    layers = [layer for layer in run.network.modules() if isinstance(layer, VisualContrastAttention)]
    if not layers:
        raise ValueError(f"attention: {run.config.model.attention}; only vca has the maps of two streams")
    return {f"block {index}": layer for index, layer in enumerate(layers)}


def look(
    run: LoadedRun, latents: Tensor, y: Tensor, times: Sequence[float], *, seed: int = 0
) -> tuple[list[Input], dict[str, ContrastMaps]]:
    """The maps of every layer, at each image and each time.

    Args:
        latents: of clean images (N, C, h, w).
        y: their labels (N,).
        times: of the process.
        seed: of the noise.

    Returns:
        The N * times inputs of the network, those of an image together; and the maps of all of them by layer.
    """
    count, names = len(latents), run.data.class_names
    clean = run.vae.decode(latents)
    noise = SeededNoise(seed).of_steps(range(count))(latents)
    x, y_each, noise = (part.repeat_interleave(len(times), 0) for part in (latents, y, noise))
    t = torch.tensor(list(times) * count, device=latents.device)
    found: dict[str, ContrastMaps] = {}
    seen: list[Tensor] = []
    name_of = {layer: name for name, layer in vca_layers(run).items()}

    def network(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        seen.append(x_t)
        return run.network(x_t, t, labels)

    def see(layer: VisualContrastAttention, tokens: Tensor, grid_size: Grid) -> None:
        found[name_of[layer]] = contrast_maps(layer, tokens, grid_size)

    assert isinstance(run.network, nn.Module)
    with torch.no_grad(), watching(run.network, see):
        run.process.losses(network, x, y_each.to(latents.device), t=t, noise=noise)
    pictures = run.vae.decode(seen[0])
    inputs = []
    for i in range(len(x)):
        label = int(y_each[i])
        name = names[label] if names and not names[label].isdecimal() else f"class {label}"
        picture, image = (each.permute(1, 2, 0).cpu().numpy() for each in (pictures[i], clean[i // len(times)]))
        inputs.append(Input(f"{shorten(name, 16, placeholder='...')}\nt = {times[i % len(times)]:g}", picture, image))
    return inputs, found


def pages(
    inputs: Sequence[Input], maps: dict[str, ContrastMaps], query: tuple[int, int], head: int | None = None
) -> Iterator[tuple[str, Figure]]:
    """File names and figures: of Stage I, then of the query in each block."""
    chunks = contrast_chunks(maps)
    for index, chunk in enumerate(chunks, start=1):
        yield "contrast" if len(chunks) == 1 else f"contrast_{index}", contrast_page(inputs, chunk, head=head)
    for name, layer in maps.items():
        yield f"query_{name.replace(' ', '_')}", query_page(inputs, name, layer, query, head=head)


def contrast_chunks(maps: dict[str, ContrastMaps]) -> list[dict[str, ContrastMaps]]:
    """The layers whose Stage I has two streams, as many together as a page of them holds."""
    names = [name for name in maps if maps[name].stage1.negative is not None]
    return [{name: maps[name] for name in names[i : i + COLUMNS]} for i in range(0, len(names), COLUMNS)]


def parse_times(text: str | None, run: LoadedRun) -> list[float]:
    """Times of the process: whole numbers where its own are. Default: a fifth and four fifths of the way."""
    whole = not run.process.sample_t(1, torch.Generator()).is_floating_point()
    end = run.config.process.num_timesteps - 1 if whole else 1
    if text is None:
        return [round(end * share) if whole else end * share for share in (0.2, 0.8)]
    try:
        times = [int(part) if whole else float(part) for part in text.split(",")]
    except ValueError:
        times = []
    if not times or not all(0 <= time <= end for time in times):
        raise ValueError(f"times: {text}; needs {'whole ' if whole else ''}numbers from 0 to {end}, commas between")
    return times


def _whole(option: str, text: str, counts: Sequence[int]) -> list[int]:
    """Whole numbers with commas between, the i-th below counts[i], or all below the only count."""
    parts = [part.strip() for part in text.split(",")]
    limits = counts if len(counts) > 1 else list(counts) * len(parts)
    if len(parts) != len(limits) or not all(
        part.isdecimal() and int(part) < limit for part, limit in zip(parts, limits, strict=True)
    ):
        valid = " and ".join(f"0 to {count - 1}" for count in counts)
        raise ValueError(f"{option}: {text}; the network has {valid}")
    return [int(part) for part in parts]
