"""DiT and SiT with Visual-Contrast Attention, from training to scores that others can repeat.

The public names are imported from their rooms when they are first used: `import vcagen` itself imports no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

_ROOMS = {
    "networks.attention": ("ATTENTION", "VisualContrastAttention"),
    "networks.dit": ("DiT",),
    "networks.maps": ("contrast_maps",),
    "processes": ("PROCESSES",),
    "processes.diffusion": ("GaussianDiffusion",),
    "processes.flow": ("LinearInterpolant",),
    "processes.guidance": ("with_cfg",),
    "processes.samplers": (
        "SAMPLERS",
        "Sampler",
        "ddim_sample",
        "ddpm_sample",
        "dpmpp_sample",
        "ode_sample",
        "sde_sample",
    ),
    "data.image_set": ("ImageSet",),
    "data.images": ("DATASETS",),
    "evaluation.evaluate": ("Evaluator", "fid"),
    "evaluation.extractor": ("Extractor", "Features"),
    "evaluation.features": ("EXTRACTORS",),
    "evaluation.scores": ("METRICS",),
    "sampling.load_run": ("load",),
    "config.options": ("Config",),
    "training.setup": ("build_trainer",),
    "jobs.hub_pipeline": ("VcagenPipeline", "VcagenTransformer"),
}
_HOMES = {name: f"{__name__}.{room}" for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({"__version__", *_HOMES})
