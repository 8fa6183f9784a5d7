"""The model card of a network on the Hub: what it is, how to use it, its recipe, and its scores with all they need."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from vcagen import __version__
from vcagen.paper.run_results import Score
from vcagen.sampling.load_run import LoadedRun
from vcagen.system.files import few

CITATION = """@inproceedings{pu2025lineardiff,
  title = {Linear Differential Vision Transformer: Learning Visual Contrasts via Pairwise Differentials},
  author = {Yifan Pu and Jixuan Ying and Qixiu Li and Tianzhu Ye and Dongchen Han and Xiaochen Wang and Ziyi Wang and
            Xinyu Shao and Gao Huang and Xiu Li},
  booktitle = {Advances in Neural Information Processing Systems}, volume = {38}, year = {2025}, note = {arXiv:2511.00833}
}"""  # noqa: E501
"""The paper of the attention, as in the README."""


def card(name: str, run: LoadedRun, scores: Iterable[Score]) -> str:
    """README.md of the folder or repository `name`: `scores` are those of these very weights."""
    config, data = run.config, run.data
    family, process = ("SiT", "flow") if config.process.name == "flow" else ("DiT", "diffusion")
    attention = (
        "Visual-Contrast Attention" if config.model.attention == "vca" else f"attention {config.model.attention}"
    )
    classes = f"{data.num_classes} classes" + (f" ({few(data.class_names, 5)})" if data.class_names else "")
    scale = config.sampling.cfg_scale
    labels: list[str | int] = [*data.class_names[:2]] or [0, 1]
    tags = ["vcagen", "class-conditional", family.lower(), process, config.model.attention]
    return f"""---
library_name: diffusers
pipeline_tag: unconditional-image-generation
tags: [{", ".join(tags)}]
---

# {name}

A class-conditional {family} ({process}) of size {config.model.size} with {attention}, for images of {data.image_size} x
{data.image_size} pixels in {classes}. Trained and exported by vcagen {__version__}.

## Use

With diffusers and the package `vcagen`; any scheduler of diffusers for this process can take the place of its own:

```python
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained("{name}", trust_remote_code=True)
images = pipe(class_labels={labels!r}, guidance_scale={scale}).images
```

The code of the repository is two lines, which import the pipeline from `vcagen`. Without them, with the sampler of the
recipe and one image for each seed and index:

```python
import vcagen

images = vcagen.load("{name}").sample(labels={labels!r})
```

## Recipe

{_table(_recipe(run))}

## Scores

{_scores(list(scores))}

## Citation

```bibtex
{CITATION}
```
"""


def _recipe(run: LoadedRun) -> dict[str, Any]:
    config, train, data = run.config, run.config.train, run.data
    shape = {name: value for name in ("hidden_size", "depth", "num_heads") if (value := getattr(config.model, name))}
    training: dict[str, Any] = {}
    if run.step is not None:  # a public file says nothing of its training
        training = {
            "step": run.step,
            "weights": "raw" if run.ema_decay is None else f"average, decay {run.ema_decay}",
            "batch": train.batch_size,
            "learning rate": train.learning_rate,
            "precision": train.precision,
            "horizontal flip": config.data.horizontal_flip,
            "seed": config.seed,
            "started from": config.init or "random weights",
            "data": config.data.path,
        }
    return {
        "network": ", ".join([config.model.size, *(f"{name} {value}" for name, value in shape.items())]),
        "latents": f"{data.channels} x {data.height} x {data.width}",
        "VAE": f"{data.vae['path']}, SHA-256 {data.vae['sha256'][:12]}" if data.vae["sha256"] else "none, pixels",
        **training,
        "sampler": config.sampling.sampler or "that of the paper",
        "SHA-256 of the weights": run.weights_sha256,
    }


def _scores(scores: list[Score]) -> str:
    if not scores:
        return "None was measured with these weights."
    parts = []
    for score in scores:
        manifest = {**score.facts, **score.sampling, "warnings": score.warnings}
        parts.append(_table(score.metrics) + f"\n\nWith:\n\n```json\n{json.dumps(manifest, indent=2)}\n```")
    return "\n\n".join(parts)


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows.items())])


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
