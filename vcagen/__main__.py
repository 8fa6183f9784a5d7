"""python -m vcagen: the jobs beside training and sampling."""

from __future__ import annotations

import json
import sys


def encode(args: list[str]) -> None:
    """Images to latent shards, once, before training."""
    from vcagen.config import command_line as cli
    from vcagen.config.job_options import EncodeConfig

    config = cli.parse(EncodeConfig, args, prog="python -m vcagen encode", positional="images")

    from accelerate.utils import gather_object

    from vcagen.build import build_accelerator
    from vcagen.data.encode import encode as encode_images

    accelerator = build_accelerator(patient=True)
    encode_images(
        config,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        gather=gather_object,
        device=accelerator.device,
    )
    accelerator.end_training()


def stats(args: list[str]) -> None:
    """Reference statistics of real images."""
    from vcagen.config import command_line as cli
    from vcagen.config.job_options import StatsConfig
    from vcagen.evaluation.features import load_extractor
    from vcagen.evaluation.reference import open_reference, save_statistics
    from vcagen.system.files import check_writable

    config = cli.parse(StatsConfig, args, prog="python -m vcagen stats", positional="images")
    check_writable(config.out)
    extractor = load_extractor(config.extractor, weights=config.inception_weights)
    reference = open_reference(
        config.images,
        extractor,
        batch=config.batch,
        image_size=config.image_size,
        num_workers=config.num_workers,
    )
    save_statistics(config.out, reference, extractor)
    print(json.dumps({"out": config.out, **reference.record()}, indent=2))


def evaluate(args: list[str]) -> None:
    """FID, sFID, IS, precision and recall of a folder or .npz of samples."""
    from vcagen.config import command_line as cli
    from vcagen.config.job_options import EvaluateConfig
    from vcagen.evaluation.evaluate import evaluate_images
    from vcagen.evaluation.features import load_extractor
    from vcagen.evaluation.image_source import open_samples, result_path, sample_facts, sample_manifest
    from vcagen.evaluation.reference import check_reference_path, open_reference
    from vcagen.system.files import check_writable, write_json

    config = cli.parse(EvaluateConfig, args, prog="python -m vcagen evaluate", positional="samples")
    check_reference_path(config.reference)
    manifest, facts = sample_manifest(config.samples), sample_facts(config.samples)
    out = config.out or result_path(config.samples, config.extractor)
    expected = manifest.get("num_images") if config.num_images is None else config.num_images
    samples = open_samples(config.samples, num_workers=config.num_workers, expected=expected)
    check_writable(out)
    extractor = load_extractor(config.extractor, weights=config.inception_weights)
    extractor.check_shape(samples.shape, samples.path)
    reference = open_reference(
        config.reference,
        extractor,
        batch=config.batch,
        image_size=config.image_size,
        num_workers=config.num_workers,
        rows=config.precision_recall,
        shape=samples.shape,
    )
    result = evaluate_images(samples, extractor, reference, batch=config.batch, sampling=manifest, **facts)
    write_json(out, result)
    print(json.dumps(result["metrics"], indent=2))
    for warning in result["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"result: {out}", file=sys.stderr)


def cost(args: list[str]) -> None:
    """Parameters and multiply-adds, of a table of the paper or of one network."""
    from dataclasses import replace

    from vcagen.config import command_line as cli
    from vcagen.config.job_options import CostConfig
    from vcagen.config.options import Config
    from vcagen.paper.table import Latents, Row, load_table

    config = cli.parse(CostConfig, args, prog="python -m vcagen cost", positional="table")

    from vcagen.build import build_cost
    from vcagen.jobs.cost import cost_table
    from vcagen.paper.report import data_spec
    from vcagen.system.files import write_json

    if config.table is None:
        name = f"{config.process.name} {config.model.size} {config.model.attention}"
        title, latents = "", Latents()
        rows = [(Row(name, "", {}, {}), Config("", model=config.model, process=config.process))]
    else:
        table = load_table(config.table)
        title, latents, rows = table.title, table.latents, [(row, row.config()) for row in table.rows]
    given = {"channels": config.channels, "size": config.latent_size, "num_classes": config.num_classes}
    data = data_spec(replace(latents, **{name: value for name, value in given.items() if value is not None}))
    costs = [(row, build_cost(c.model, c.process, data)) for row, c in rows]
    text, values = cost_table(title, costs)
    print(text)
    if config.json:
        write_json(config.json, values)


def report(args: list[str]) -> None:
    """A table of the paper with our scores beside the published ones, or one run."""
    from pathlib import Path

    from vcagen.config import command_line as cli
    from vcagen.config.job_options import ReportConfig
    from vcagen.paper.table import load_table

    config = cli.parse(ReportConfig, args, prog="python -m vcagen report", positional="source")
    table = None if Path(config.source).is_dir() else load_table(config.source)

    from vcagen.paper.report import report_run, report_table

    if table is None:
        out = config.out or config.source
        text = report_run(config.source, config.out)
    else:
        out = config.out or f"{config.runs}/report"
        text = report_table(table, Path(config.source).stem, config.runs, out)
    print(text)
    print(f"report: {out}", file=sys.stderr)


def experiment(args: list[str]) -> None:
    """Train, sample and report all runs of a table, such as configs/miniature.yaml."""
    from pathlib import Path

    from vcagen.config import command_line as cli
    from vcagen.config.job_options import ExperimentConfig
    from vcagen.paper.table import load_table

    config = cli.parse(ExperimentConfig, args, prog="python -m vcagen experiment", positional="table")
    given = {"train.steps": config.steps, "sampling.num_images": config.num_images}
    options = {key: value for key, value in given.items() if value is not None}
    table = load_table(config.table, seeds=config.seeds, options=options)

    from vcagen.paper.report import report_table
    from vcagen.paper.sweep import run_experiment

    run_experiment(table, config.runs, jobs=config.jobs)
    out = config.out or f"{config.runs}/report"
    print(report_table(table, Path(config.table).stem, config.runs, out))
    print(f"report: {out}", file=sys.stderr)


def bench(args: list[str]) -> None:
    """Speed of a part, each against a yardstick in the same run."""
    import importlib
    import pkgutil

    import vcagen.bench

    modules = pkgutil.iter_modules(vcagen.bench.__path__)
    names = sorted(module.name for module in modules if not module.name.startswith("_"))
    if not args or args[0] in ("-h", "--help"):
        print(f"usage: python -m vcagen bench NAME [options]\n\nnames: {', '.join(names)}")
        print("\nexample: python -m vcagen bench attention --json attention.json")
        return
    if args[0] not in names:
        raise ValueError(f"{args[0]}: unknown benchmark; choose from {', '.join(names)}")
    importlib.import_module(f"vcagen.bench.{args[0]}").main(args[1:])


def inspect(args: list[str]) -> None:
    """What a run or a weights file holds."""
    from vcagen.config import command_line as cli
    from vcagen.config.job_options import InspectConfig
    from vcagen.jobs.inspect import describe, table
    from vcagen.system.files import write_json

    config = cli.parse(InspectConfig, args, prog="python -m vcagen inspect", positional="path")
    description = describe(config.path)
    if config.json == "-":
        print(json.dumps(description, indent=2))
        return
    print(table(description))
    if config.json:
        write_json(config.json, description)


def export(args: list[str]) -> None:
    """One weights file of a run, to give away."""
    from vcagen.config import command_line as cli
    from vcagen.config.job_options import ExportConfig
    from vcagen.networks import weights as checkpoints

    config = cli.parse(ExportConfig, args, prog="python -m vcagen export", positional="run_dir")
    source = checkpoints.export_weights(config.run_dir, config.out, weights=config.weights, step=config.step)
    print(f"{config.out}: {source}", file=sys.stderr)


JOBS = {job.__name__: job for job in (encode, cost, experiment, report, bench, stats, evaluate, inspect, export)}


def main(args: list[str]) -> None:
    """List the jobs, or do one.

    Raises:
        ValueError: unknown job.
    """
    if not args or args[0] in ("-h", "--help"):
        print("usage: python -m vcagen JOB [options]\n\njobs:")
        for name, job in JOBS.items():
            print(f"  {name:<12}{job.__doc__}")
        print("\npython -m vcagen JOB --help shows the options. Training and sampling: train.py and sample.py.")
        return
    if args[0] not in JOBS:
        raise ValueError(f"{args[0]}: unknown job; choose from {', '.join(JOBS)}")
    JOBS[args[0]](args[1:])


if __name__ == "__main__":
    from vcagen.config import command_line as cli

    cli.run(lambda: main(sys.argv[1:]))
