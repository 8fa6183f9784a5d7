"""train.py with FSDP on CPU processes, which accelerate offers on GPUs only: its state is told otherwise."""

import sys
from pathlib import Path

import torch
import yaml
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from helpers import ROOT

from vcagen.config import command_line
from vcagen.config.options import Config
from vcagen.system.processes import build_accelerator
from vcagen.training import setup

PRESET = yaml.safe_load((ROOT / "configs" / "accelerate" / "fsdp.yaml").read_text())["fsdp_config"]


def sharded(**options):
    accelerator = build_accelerator(**options)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=PRESET["fsdp_version"],
        auto_wrap_policy=PRESET["fsdp_auto_wrap_policy"].lower(),
        transformer_cls_names_to_wrap=[PRESET["fsdp_transformer_layer_cls_to_wrap"]],
        reshard_after_forward=PRESET["fsdp_reshard_after_forward"],
        state_dict_type=PRESET["fsdp_state_dict_type"],
    )
    accelerator.state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    return accelerator


if __name__ == "__main__":
    setup.build_accelerator = sharded
    trainer = setup.build_trainer(command_line.parse(Config, sys.argv[1:], prog=Path(__file__).name))
    trainer.fit()
    torch.distributed.destroy_process_group()
