"""python -m vcagen: the jobs beside training and sampling."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One command: its line in the list, and the function that parses the rest of the line and does it."""

    help: str
    main: Callable[[list[str]], None]


JOBS: dict[str, Job] = {}


def main(args: list[str]) -> None:
    """List the jobs, or do one.

    Raises:
        ValueError: unknown job.
    """
    if not args or args[0] in ("-h", "--help"):
        print("usage: python -m vcagen JOB [options]\n\njobs:")
        for name, job in JOBS.items():
            print(f"  {name:<10}{job.help}")
        print("\npython -m vcagen JOB --help shows the options. Training and sampling: train.py and sample.py.")
        return
    if args[0] not in JOBS:
        raise ValueError(f"{args[0]}: unknown job; choose from {', '.join(JOBS)}")
    JOBS[args[0]].main(args[1:])


if __name__ == "__main__":
    from vcagen import cli

    cli.run(lambda: main(sys.argv[1:]))
