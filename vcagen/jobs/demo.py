"""A page in the browser: images of a run, and where its Visual-Contrast Attention looks."""

from __future__ import annotations

import sys
from functools import lru_cache
from io import BytesIO
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from vcagen.config.job_options import DemoConfig
from vcagen.jobs.map_pages import contrast_page, query_page
from vcagen.jobs.maps import contrast_chunks, look, parse_times
from vcagen.networks.maps import layer_names
from vcagen.processes.samplers import fixed_step_samplers
from vcagen.sampling.image_store import to_pil
from vcagen.sampling.load_run import LoadedRun, load

try:
    import gradio
except ModuleNotFoundError as error:
    raise ValueError('demo: gradio is missing; pip install "vcagen[demo]"') from error

SMALLEST = 128
"""Images of fewer pixels are shown enlarged."""


def run(config: DemoConfig) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        ValueError: no run.
        OSError: the port is taken.
    """
    loaded = load(config.source, weights=config.weights, step=config.step, vae=config.vae, device=config.device)
    print(*loaded.notes, sep="\n", file=sys.stderr)
    page = build_page(Demo(loaded, config.num_images))
    page.launch(server_name=config.host, server_port=config.port, share=False, show_error=True)


class Demo:
    """What the page asks for. The latents of its last choices are kept, so that the maps need no new images.

    Args:
        num_images: of a gallery, all of one class.
    """

    def __init__(self, run: LoadedRun, num_images: int) -> None:
        self.run, self.num_images = run, num_images
        self.samplers = fixed_step_samplers(run.config.process.name)
        own = run.sampling()
        same = [name for name, (given, _) in self.samplers.items()
                if all(getattr(own, option) == value for option, value in given.items())]  # fmt: skip
        self.default_sampler = (same or [*self.samplers])[0]
        self.latents = lru_cache(maxsize=8)(self._latents)

    def _latents(self, label: int, guidance: float, sampler: str, calls: float, seed: int) -> Tensor:
        chosen, calls_of_step = self.samplers[sampler]
        options: dict[str, Any] = {**chosen, "num_steps": max(1, int(calls) // calls_of_step), "cfg_scale": guidance}
        return self.run.latents([label] * self.num_images, seed=seed, batch=self.num_images, **options)

    def sample(self, label: int, guidance: float, sampler: str, calls: float, seed: int) -> list[Image.Image]:
        """The images of the gallery."""
        pixels = self.run.vae.decode(self.latents(label, guidance, sampler, calls, seed))
        images = [to_pil(image.permute(1, 2, 0).cpu().numpy()) for image in pixels]
        scale = -(-SMALLEST // min(images[0].size))
        return [image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST) for image in images]

    def maps(
        self, label: int, guidance: float, sampler: str, calls: float, seed: int, image: int, block: str, row: float,
        column: float,
    ) -> tuple[Image.Image | None, Image.Image]:  # fmt: skip
        """The pages of an image of the gallery: Stage I with the block among others, and the patch in that block."""
        latents = self.latents(label, guidance, sampler, calls, seed)[image : image + 1]
        inputs, maps = look(self.run, latents, torch.tensor([label]), parse_times(None, self.run), seed=seed)
        query = query_page(inputs, block, maps[block], (int(row), int(column)))
        chunk = next((chunk for chunk in contrast_chunks(maps) if block in chunk), None)
        return None if chunk is None else _drawn(contrast_page(inputs, chunk)), _drawn(query)


def build_page(demo: Demo) -> Any:
    """The page, a gradio Blocks; its functions are `/sample` and, with Visual-Contrast Attention, `/maps`."""
    run = demo.run
    names = run.data.class_names or [str(label) for label in range(run.data.num_classes)]
    own = run.sampling()
    with gradio.Blocks(title="vcagen", analytics_enabled=False, fill_width=True) as page:
        gradio.Markdown(f"# vcagen\n{run.config.process.name}, {run.config.model.attention}, {run.step} steps")
        with gradio.Row():
            with gradio.Column(scale=1, min_width=240):
                guided = run.null_label is not None
                choices = [
                    gradio.Dropdown([(name, label) for label, name in enumerate(names)], value=0, label="class"),
                    gradio.Slider(0, 10, own.cfg_scale if guided else 1, step=0.1, label="guidance (1 is off)",
                                  interactive=guided),
                    gradio.Dropdown([*demo.samplers], value=demo.default_sampler, label="sampler"),
                    gradio.Slider(1, 250, min(own.num_steps, 50), step=1, label="network calls"),
                    gradio.Number(0, label="seed", precision=0, minimum=0),
                ]  # fmt: skip
                button = gradio.Button("Make images", variant="primary")
            with gradio.Column(scale=2):
                gallery = gradio.Gallery(
                    label="images", columns=4, format="png", show_label=False, buttons=[], allow_preview=False
                )
        made = button.click(demo.sample, choices, gallery, api_name="sample")
        if run.config.model.attention == "vca":
            assert isinstance(run.network, nn.Module)
            layers = layer_names(run.network)
            rows, columns = next(iter(layers)).grid_size
            gradio.Markdown("## Where the streams look\nChoose an image above, and below the patch that asks.")
            with gradio.Row():
                image = gradio.Number(0, label="image", precision=0, minimum=0, maximum=demo.num_images - 1)
                patch = [
                    gradio.Dropdown([*layers.values()], label="block"),
                    gradio.Slider(0, rows - 1, rows // 2, step=1, label="row"),
                    gradio.Slider(0, columns - 1, columns // 2, step=1, label="column"),
                ]
            plain: dict[str, Any] = {"format": "png", "show_label": False, "container": False, "buttons": []}
            stage1 = gradio.Image(**plain, label="Stage I")
            stage2 = gradio.Image(**plain, label="Stage II, and both stages")
            maps = {"fn": demo.maps, "inputs": [*choices, image, *patch], "outputs": [stage1, stage2]}
            gradio.on([image.submit, *(part.change for part in patch)], **maps, api_name="maps")
            made.success(**maps, api_visibility="private")

            def choose(event: gradio.SelectData) -> int:
                return int(event.index)

            gallery.select(choose, None, image, api_visibility="private").success(**maps, api_visibility="private")
    return page


def _drawn(figure: Figure) -> Image.Image:
    file = BytesIO()
    figure.savefig(file, format="png")
    return Image.open(file)
