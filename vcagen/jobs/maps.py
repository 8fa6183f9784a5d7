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
from vcagen.jobs.classifier_maps import load_classifier, look_at_images
from vcagen.jobs.map_pages import COLUMNS, Input, contrast_page, query_page
from vcagen.networks.attention import VisualContrastAttention
from vcagen.networks.maps import ContrastMaps, Grid, contrast_maps, layer_names, watching
from vcagen.sampling.load_run import LoadedRun, load
from vcagen.sampling.noise import LabelRule, SeededNoise
from vcagen.system.files import atomic_file, few


def run(config: MapsConfig) -> None:
    """Write the pages as PNG files.

    Raises:
        ValueError: no run or network, one without VCA, or a label, time, block, query or head that is not there.
    """
    if config.images is None:
        run = load(config.source, weights=config.weights, step=config.step, vae=config.vae, device=config.device)
        print(*run.notes, sep="\n", file=sys.stderr)
        network = run.network
        labels, times = _labels(config.labels, run), parse_times(config.times, run)
    else:
        network = load_classifier(config.source, config.weights).to(config.device)
    assert isinstance(network, nn.Module)
    queries = _queries(config, layer_names(network))
    if config.images is None:
        given = {} if config.num_steps is None else {"num_steps": config.num_steps}
        latents = run.latents(labels, seed=config.seed, batch=len(labels), **given)
        inputs, maps = look(run, latents, torch.tensor(labels), times, seed=config.seed)
    else:
        inputs, maps = look_at_images(network, config.images.split(","))
    chosen = {name: maps[name] for name in queries}
    path = Path(config.source)
    out = Path(config.out or (path if path.is_dir() else path.parent) / "maps")
    drawn = pages(inputs, chosen, queries, config.head)
    for name, figure in tqdm(drawn, desc="maps", unit="page", total=len(contrast_chunks(chosen)) + len(chosen)):
        with atomic_file(out / f"{name}.png") as temporary:
            figure.savefig(temporary, format="png")
    print(f"pages: {out}", file=sys.stderr)


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
    count, names, device = len(latents), run.data.class_names, run.vae.device
    latents = latents.to(device)
    clean = run.vae.decode(latents)
    noise = SeededNoise(seed).of_steps(range(count))(latents)
    x, y_each, noise = (part.repeat_interleave(len(times), 0) for part in (latents, y, noise))
    t = torch.tensor(list(times) * count, device=device)
    found: dict[str, ContrastMaps] = {}
    seen: list[Tensor] = []
    assert isinstance(run.network, nn.Module)
    name_of = layer_names(run.network)

    def network(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        seen.append(x_t)
        return run.network(x_t, t, labels)

    def see(layer: VisualContrastAttention, tokens: Tensor, grid_size: Grid) -> None:
        found[name_of[layer]] = contrast_maps(layer, tokens, grid_size)

    with torch.no_grad(), watching(run.network, see):
        run.process.losses(network, x, y_each.to(device), t=t, noise=noise)
    pictures = run.vae.decode(seen[0])
    inputs = []
    for i in range(len(x)):
        label = int(y_each[i])
        name = names[label] if names and not names[label].isdecimal() else f"class {label}"
        picture, image = (each.permute(1, 2, 0).cpu().numpy() for each in (pictures[i], clean[i // len(times)]))
        inputs.append(Input(f"{shorten(name, 16, placeholder='...')}\nt = {times[i % len(times)]:g}", picture, image))
    return inputs, found


def pages(
    inputs: Sequence[Input], maps: dict[str, ContrastMaps], queries: dict[str, tuple[int, int]], head: int | None = None
) -> Iterator[tuple[str, Figure]]:
    """File names and figures: of Stage I, then of the query in each block."""
    chunks = contrast_chunks(maps)
    for index, chunk in enumerate(chunks, start=1):
        yield "contrast" if len(chunks) == 1 else f"contrast_{index}", contrast_page(inputs, chunk, head=head)
    for name, layer in maps.items():
        yield f"query_{name.replace(' ', '_')}", query_page(inputs, name, layer, queries[name], head=head)


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


def _labels(text: str | None, run: LoadedRun) -> list[int]:
    """The labels that are named; the first two by default."""
    rule = text or ",".join(map(str, range(min(2, run.data.num_classes))))
    labels = LabelRule(rule, run.data.num_classes, run.data.class_names).given
    if not labels:
        raise ValueError(f"labels: {rule}; give labels or class names with commas between")
    return labels


def _queries(config: MapsConfig, layers: dict[VisualContrastAttention, str]) -> dict[str, tuple[int, int]]:
    """The blocks that are asked for by their names, and the patch that asks in each: the middle by default."""
    wanted = None if config.block == "all" else [part.strip() for part in config.block.split(",")]
    numbers = [name.removeprefix("block ") for name in layers.values()]
    if missing := [part for part in wanted or () if part not in numbers]:
        raise ValueError(f"block: {missing[0]}; the blocks with VCA are {few(numbers, 6)}")
    queries = {}
    for (layer, name), number in zip(layers.items(), numbers, strict=True):
        if wanted is not None and number not in wanted:
            continue
        if config.head is not None and config.head >= layer.num_heads:
            raise ValueError(f"head: {config.head}; {name} has 0 to {layer.num_heads - 1}")
        height, width = layer.grid_size
        query = f"{height // 2},{width // 2}" if config.query is None else config.query
        y, _, x = (part.strip() for part in query.partition(","))
        if not (y.isdecimal() and x.isdecimal() and int(y) < height and int(x) < width):
            raise ValueError(f"query: {query}; {name} takes row,column from 0,0 to {height - 1},{width - 1}")
        queries[name] = int(y), int(x)
    return queries
