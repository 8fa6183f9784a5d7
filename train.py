"""Train a DiT or SiT: python train.py --config configs/quickstart.yaml, or accelerate launch train.py ..."""

from __future__ import annotations

import os

from vcagen.config import command_line as cli
from vcagen.config.options import Config


def main() -> None:
    """Parse, build, fit."""
    config = cli.parse(Config, prog="train.py")
    from vcagen.training import setup as build_training

    if config.dry_run:
        plan = build_training.describe_training(config)
        if int(os.environ.get("RANK", "0")) == 0:
            print(plan)
        return
    trainer = build_training.build_trainer(config)
    trainer.fit()
    if trainer.accelerator.is_main_process:
        from vcagen.paper.plots import plot_losses

        plot_losses(trainer.run)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    cli.run(main)
