"""A trained network among diffusers' models and pipelines: what `vcagen export --format hub` writes and loads again.

Files on the Hub import both classes from `vcagen` by name, so these names stay.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    ConfigMixin,
    DDIMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    ImagePipelineOutput,
    ModelMixin,
)
from diffusers.configuration_utils import register_to_config
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.utils.torch_utils import randn_tensor
from safetensors.torch import load_file
from torch import Tensor

from vcagen.build import network_arguments, with_kernel
from vcagen.config.command_line import from_mapping
from vcagen.config.options import Config, ProcessConfig
from vcagen.data.latent_scale import LatentScale
from vcagen.data.latents import DataSpec
from vcagen.networks.dit import DiT
from vcagen.networks.weights import save_weights
from vcagen.processes.guidance import with_cfg
from vcagen.processes.process import check_choice
from vcagen.sampling.noise import LabelRule

CODE = {
    "pipeline.py": "from vcagen import VcagenPipeline  # noqa: F401\n",
    "transformer/modeling.py": "from vcagen import VcagenTransformer  # noqa: F401\n",
}
"""Files of a folder that lead diffusers to the classes here."""
CLOCK = 1000
"""Where diffusers' time starts for a flow; it falls to 0, the data."""


class VcagenTransformer(DiT, ModelMixin, ConfigMixin):  # type: ignore[misc]  # diffusers has no types
    """A DiT with diffusers' clock, which falls from noise to data, and diffusers' sign of a flow: noise - data.

    Args:
        metadata: of the weights: config, data, step, ema_decay.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, metadata: dict[str, Any]) -> None:
        config = from_mapping(Config, metadata["config"])
        model = with_kernel(config.model, "maps")  # any device
        data = DataSpec.from_dict(metadata["data"])
        super().__init__(**network_arguments(model, config.process, data))
        self.is_flow = config.process.name == "flow"
        self._metadata = metadata

    def forward(  # type: ignore[override]  # diffusers' names
        self, hidden_states: Tensor, timestep: Tensor, class_labels: Tensor, return_dict: bool = True
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """(N, C, H, W), diffusers' times () or (N,) and labels (N,) -> (N, out_channels, H, W)."""
        t = timestep.expand(len(hidden_states))
        if self.is_flow:
            output = -super().forward(hidden_states, 1 - t.float() / CLOCK, class_labels)
        else:
            output = super().forward(hidden_states, t, class_labels)
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)

    @wraps(ModelMixin.save_pretrained)
    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """As diffusers', with the metadata in the weights too, so that `vcagen.load` reads them."""
        super().save_pretrained(save_directory, *args, **kwargs)
        for file in Path(save_directory).glob("*.safetensors"):
            save_weights(file, load_file(file), self._metadata)


class VcagenPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Images of classes, by any scheduler of diffusers whose predictions are those of the network.

    Args:
        vae: None for a network of pixels.
    """

    model_cpu_offload_seq = "transformer->vae"
    _optional_components = ["vae"]  # noqa: RUF012  # as diffusers declares it

    def __init__(self, transformer: VcagenTransformer, scheduler: Any, vae: Any = None) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | Sequence[int | str],
        guidance_scale: float = 1.0,
        num_inference_steps: int = 50,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Sample one image a label.

        Args:
            class_labels: labels or class names.
            guidance_scale: uncond + scale (cond - uncond); 1 is off.
            num_inference_steps: steps of the scheduler.
            generator: of the noise, on its own device; a list has one an image.
            latents: the noise itself, standard normal (N, C, H, W).
            output_type: pil, np or pt (N, C, H, W) from 0 to 1, or latent.

        Raises:
            ValueError: a label, a guidance or an output that is not possible, a scheduler of the other process, or
                latents without their VAE.
        """
        check_choice("output_type", output_type, ("pil", "np", "pt", "latent"))
        network, device = self.transformer, self._execution_device
        data = DataSpec.from_dict(network.config.metadata["data"])
        each = np.atleast_1d(np.asarray(class_labels)).tolist()
        y = torch.tensor(LabelRule(each, data.num_classes, data.class_names).given, device=device)
        if self.vae is None and data.vae["sha256"] and output_type != "latent":
            raise ValueError("vae: missing; without it there are latents only: output_type='latent'")
        self._check_scheduler()

        def model(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
            return network(x.to(network.dtype), t, y).sample.float()

        predict = with_cfg(model, y, cfg_scale=guidance_scale, null_label=network.null_label)
        shape = (len(y), data.channels, data.height, data.width)
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        x = self._walk(predict, latents.to(device, torch.float32), num_inference_steps, generator)
        if self.vae is not None and output_type != "latent":
            unscaled = LatentScale(data.vae, device).unscale(x)
            x = self.vae.decode(unscaled.to(self.vae.dtype)).sample.float()
        images = VaeImageProcessor().postprocess(x, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _walk(self, predict: Any, x: Tensor, num_steps: int, generator: Any) -> Tensor:
        """The scheduler's steps from noise x (N, C, H, W), in float32 whatever the network's precision."""
        scheduler, channels = self.scheduler, x.shape[1]
        if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):  # its own default ends a step too late
            scheduler.set_timesteps(sigmas=np.linspace(1, 1 / num_steps, num_steps), device=x.device)
        else:
            scheduler.set_timesteps(num_steps, device=x.device)
        draws = "generator" in inspect.signature(scheduler.step).parameters
        extra = {"generator": generator} if draws else {}
        x = x * getattr(scheduler, "init_noise_sigma", 1.0)
        for t, time in zip(self.progress_bar(scheduler.timesteps), scheduler.timesteps.tolist(), strict=True):
            scaled = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
            x = scheduler.step(predict(scaled, time)[:, :channels], t, x, return_dict=False, **extra)[0]
        return x

    def _check_scheduler(self) -> None:
        """Raise ValueError where the scheduler takes predictions that the network does not make."""
        name, kind = type(self.scheduler).__name__, self.scheduler.config.get("prediction_type", "")
        if self.transformer.is_flow and not (name.startswith("FlowMatch") or kind == "flow_prediction"):
            advice = "prediction_type='flow_prediction', use_flow_sigmas=True, or a FlowMatch scheduler"
            raise ValueError(f"scheduler: {name} is not for a flow; this network needs {advice}")
        if not self.transformer.is_flow and kind != "epsilon":
            raise ValueError(
                f"scheduler: {name} is for {kind or 'a flow'}; this network needs prediction_type='epsilon'"
            )

    def save_config(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """As diffusers', with the code that `from_pretrained` needs beside it."""
        super().save_config(save_directory, push_to_hub=push_to_hub, **kwargs)
        folder = Path(save_directory)
        for name, code in CODE.items():
            (folder / name).write_text(code)
        index = json.loads((folder / "model_index.json").read_text())
        index |= {"_class_name": ["pipeline", "VcagenPipeline"], "transformer": ["modeling", "VcagenTransformer"]}
        (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def scheduler_of(process: ProcessConfig) -> Any:
    """diffusers' scheduler that steps as our first-order samplers, ddim and euler, of diffusion and flow.

    Raises:
        ValueError: a schedule that diffusers cannot say.
    """
    if process.name == "flow":
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=CLOCK)
    beta_end = 20 / process.num_timesteps
    if beta_end > 0.999:
        raise ValueError(f"process.num_timesteps: {process.num_timesteps}; diffusers' schedulers need 21 or more")
    return DDIMScheduler(
        num_train_timesteps=process.num_timesteps, beta_start=beta_end / 200, beta_end=beta_end, clip_sample=False
    )
