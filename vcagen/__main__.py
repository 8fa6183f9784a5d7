"""The jobs: vcagen JOB, or python -m vcagen JOB."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import vcagen
from vcagen.config import command_line, job_options
from vcagen.config.options import Config, SampleConfig

JOBS: dict[str, tuple[type[Any], str]] = {
    "encode": (job_options.EncodeConfig, "vcagen.data.encode"),
    "train": (Config, "vcagen.training.setup"),
    "sample": (SampleConfig, "vcagen.sampling.session"),
    "convert-vae": (job_options.ConvertVaeConfig, "vcagen.jobs.convert_vae"),
    "evaluate": (job_options.EvaluateConfig, "vcagen.evaluation.evaluate"),
    "stats": (job_options.StatsConfig, "vcagen.jobs.stats"),
    "experiment": (job_options.ExperimentConfig, "vcagen.paper.sweep"),
    "report": (job_options.ReportConfig, "vcagen.jobs.report"),
    "cost": (job_options.CostConfig, "vcagen.jobs.cost"),
    "inspect": (job_options.InspectConfig, "vcagen.jobs.inspect"),
    "maps": (job_options.MapsConfig, "vcagen.jobs.maps"),
    "demo": (job_options.DemoConfig, "vcagen.jobs.demo"),
    "export": (job_options.ExportConfig, "vcagen.jobs.export"),
    "push": (job_options.PushConfig, "vcagen.jobs.push"),
    "bench attention": (job_options.AttentionBenchConfig, "vcagen.bench.attention"),
    "bench kernels": (job_options.KernelsBenchConfig, "vcagen.bench.kernels"),
    "bench train": (job_options.TrainBenchConfig, "vcagen.bench.train"),
    "bench recognition": (job_options.RecognitionBenchConfig, "vcagen.bench.recognition"),
    "bench sample": (job_options.SampleBenchConfig, "vcagen.bench.sample"),
    "bench calls": (job_options.CallsBenchConfig, "vcagen.bench.calls"),
    "bench vae": (job_options.VaeBenchConfig, "vcagen.bench.vae"),
}
"""Name -> its options, and the module whose `run` does it; imported when it is called, so that --help is quick."""


def main(args: list[str]) -> None:
    """List the jobs, or do one.

    Raises:
        ValueError: unknown job.
    """
    if not args or args[0] in ("-h", "--help"):
        print("usage: vcagen JOB [options]\n\njobs:")
        width = max(map(len, JOBS)) + 2
        for job, (options, _) in JOBS.items():
            print(f"  {job:<{width}}{(options.__doc__ or '').splitlines()[0]}")
        print("\nvcagen JOB --help shows the options. train.py and sample.py are the jobs train and sample.")
    elif args[0] == "--version":
        print(vcagen.__version__)
    elif (name := next((name for name in (" ".join(args[:2]), args[0]) if name in JOBS), None)) is None:
        raise ValueError(f"{' '.join(args[:2])}: unknown job; choose from {', '.join(JOBS)}")
    else:
        do(name, args[len(name.split()) :], prog=f"vcagen {name}")


def do(name: str, args: list[str], *, prog: str) -> None:
    """Do the job `name` with these arguments."""
    options, module = JOBS[name]
    config = command_line.parse(options, args, prog=prog)
    importlib.import_module(module).run(config)


def start(name: str | None = None) -> None:
    """Entry point of a process: the console script, or a script of one job; a mistake is one line and exit code 2."""
    args = sys.argv[1:]
    command_line.run(lambda: main(args) if name is None else do(name, args, prog=f"{name}.py"))


if __name__ == "__main__":
    start()
