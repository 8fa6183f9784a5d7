"""The job `stats`: reference statistics of real images."""

from __future__ import annotations

import json

from vcagen.config.job_options import StatsConfig
from vcagen.evaluation.features import load_extractor
from vcagen.evaluation.reference import open_reference, save_statistics
from vcagen.system.files import check_writable


def run(config: StatsConfig) -> None:
    """Measure the images and write their statistics."""
    check_writable(config.out)
    reference = open_reference(
        config.images,
        load_extractor(config.extractor, weights=config.inception_weights),
        batch=config.batch,
        image_size=config.image_size,
        num_workers=config.num_workers,
        grayscale=config.grayscale,
    )
    save_statistics(config.out, reference)
    print(json.dumps({"out": config.out, **reference.record()}, indent=2))
