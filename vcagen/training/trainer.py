"""The training loop: a run is a function of its configuration and seed, whatever happens to the machines."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from vcagen.build import build_model
from vcagen.config.options import Config, flatten, to_plain
from vcagen.data.latents import MomentsDataset, collate_whole
from vcagen.data.vae import LatentVAE
from vcagen.networks.cost import activation_bytes, measure, state_bytes
from vcagen.networks.dit import DiT
from vcagen.networks.maps import mean_contrast
from vcagen.processes.process import Process
from vcagen.sampling.image_store import PREVIEW, save_grid
from vcagen.sampling.load_run import LoadedRun
from vcagen.system.files import FORMAT, reading, write_text
from vcagen.system.interruption import Interruption
from vcagen.system.processes import any_process
from vcagen.system.run_folder import latest_checkpoint, lock_run
from vcagen.system.trackers import log_image, start_trackers
from vcagen.training.checkpoint import load_checkpoint, prune_checkpoints, read_state, remove_leftovers, save_checkpoint
from vcagen.training.ema import EMA
from vcagen.training.metrics_log import MetricsLog
from vcagen.training.randomness import DrawsAhead, StepDraws, StepSampler, draw, drop_labels

PREVIEW_BATCH = 16
"""So many images of a preview are made at once: the VAE's decoder takes more memory than a training step leaves."""
CONTRAST_IMAGES = 8
"""So many images tell how far the streams of VCA differ."""


def local_part(batch_size: int, rank: int, world_size: int) -> slice:
    """Positions of the global batch that a process works on.

    Raises:
        ValueError: the batch cannot be shared equally; names the process counts that can.
    """
    if batch_size % world_size:
        valid = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
        counts = f"valid process counts: {', '.join(map(str, valid))}"
        raise ValueError(f"train.batch_size: {batch_size} images cannot be shared by {world_size} processes; {counts}")
    size = batch_size // world_size
    return slice(rank * size, (rank + 1) * size)


class Trainer:
    """Trains a network on latents: step, EMA, log, checkpoint, resume, preview.

    Args:
        network: on the CPU, with its initial weights.
        process: its `losses` are minimised.
        vae: samples latents from moments, and decodes the images of the previews.
        dataset: moments and labels.
    """

    def __init__(
        self,
        config: Config,
        *,
        accelerator: Accelerator,
        network: DiT,
        process: Process,
        vae: LatentVAE,
        dataset: MomentsDataset,
    ) -> None:
        self.config = config
        self.run_dir = Path(config.run_dir)
        self.accelerator, self.device = accelerator, accelerator.device
        self.process, self.vae, self.dataset = process, vae, dataset
        train = config.train
        self.part = local_part(train.batch_size, accelerator.process_index, accelerator.num_processes)
        local = self.part.stop - self.part.start
        micro = min(train.micro_batch_size or local, local)
        self.micro_batches = [slice(start, min(start + micro, local)) for start in range(0, local, micro)]
        self.network = network.train()
        self.model, self.optimizer = self._prepare(network)
        self.scaler = accelerator.scaler  # of the losses, for fp16 alone
        self.emas = [EMA(network.parameters(), decay, warmup=train.ema_warmup) for decay in train.ema_decays]
        self.draws = DrawsAhead(self._draw, self.device)
        self.metrics = MetricsLog(accelerator, self.run_dir)
        self.grad_norm: Tensor | None = None
        """Norm of the last gradient that was measured, before clipping; on the device."""
        self.step = 0
        """Steps done."""

    def _prepare(self, network: DiT) -> tuple[nn.Module, Any]:
        """The network as it is called (autocast, DDP or FSDP, compiled), and its optimizer."""
        train = self.config.train
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=train.learning_rate, weight_decay=train.weight_decay, fused=True)
        model = torch.compile(network) if train.compile else network
        sharded = self.accelerator.is_fsdp2
        if sharded:  # autocast, as without FSDP; accelerate's policy would round t, lambda and the norms too
            policy = MixedPrecisionPolicy(output_dtype=torch.float32, cast_forward_inputs=False)
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
        model, wrapped = self.accelerator.prepare(model, optimizer)
        if sharded:
            model.forward = self.accelerator.autocast()(model.forward)
        return model, wrapped

    # --- the loop ---

    def fit(self) -> None:
        """Train to the last step, from the newest checkpoint where there is one.

        Returns early, after a checkpoint, when asked to stop by SIGTERM or Ctrl-C.

        Raises:
            ValueError: another training in the run folder, a checkpoint that cannot be resumed, or a loss that is not
                finite; nothing is saved then.
        """
        with self._claim():
            self.resume()
            with Interruption(self.accelerator) as stop, self._progress() as bar:
                for moments, y in self.batches():
                    self.train_step(moments, y)
                    bar.update()
                    last = self.step == self.config.train.steps
                    stopped = stop.agreed() and not last
                    if self._logs(self.step):
                        self.write_metrics(bar)
                    if last or stopped or self._due(self.config.checkpoint.save_every):
                        self.save()
                    if not stopped and (last or self._due(self.config.log.preview_every)):
                        self.preview()
                    if stopped:
                        self._say(f"stopped after step {self.step}, saved; the same command goes on")
                        break

    def train_step(self, moments: Tensor, y: Tensor) -> None:
        """One optimizer step on our part of the global batch. Does not wait for the device.

        Args:
            moments: (n, M, h, w).
            y: labels (n,).
        """
        draws = self.draws(self.step)  # our rows of the global batch, from (seed, step) alone
        y = drop_labels(y, draws.dropped, self.network.null_label)
        for rows in self.micro_batches:
            with self.accumulate(rows):
                x_start = self.vae.sample(moments[rows], draws.posterior[rows])  # (n, C, h, w)
                losses = self.process.losses(self.model, x_start, y[rows], t=draws.t[rows], noise=draws.noise[rows])
                self.accelerator.backward(losses["loss"].sum() / len(y))
            self.metrics.add(self.step + 1, losses)
        self.clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for ema in self.emas:
            ema.update(self.network.parameters(), self.step)
        self.step += 1

    def _draw(self, step: int) -> StepDraws:
        """The random numbers of our rows of the global batch, from (seed, step) alone."""
        data, train = self.dataset.spec, self.config.train
        return draw(
            self.config.seed, step, train.batch_size, (data.channels, data.height, data.width), self.process,
            self.network.class_dropout_prob,
        ).part(self.part)  # fmt: skip

    def accumulate(self, rows: slice) -> AbstractContextManager[Any]:
        """Gradients are shared by the processes in the last micro-batch only."""
        return nullcontext() if rows is self.micro_batches[-1] else self.accelerator.no_sync(self.model)

    def clip_gradients(self) -> None:
        """Clip the gradient to max_grad_norm; without that, measure its norm for a log line."""
        limit = self.config.train.max_grad_norm
        if limit is not None or self._logs(self.step + 1):
            norm = self.accelerator.clip_grad_norm_(self.network.parameters(), math.inf if limit is None else limit)
            self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm.detach()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Our parts of the batches of the steps to come: moments (n, M, h, w) and labels (n,), on the device."""
        data, train = self.config.data, self.config.train
        sampler = StepSampler(
            len(self.dataset), train.batch_size, self.config.seed, horizontal_flip=data.horizontal_flip
        )
        loader = DataLoader(
            self.dataset,
            batch_sampler=sampler.batches(self.step, train.steps, self.part),
            collate_fn=collate_whole,
            num_workers=0 if self.dataset.in_memory else data.num_workers,
            worker_init_fn=_ignore_signals,
            pin_memory=self.device.type == "cuda" and not self.dataset.in_memory,
        )
        for moments, y in loader:
            yield moments.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def _due(self, every: int) -> bool:
        """Whether the steps done are a multiple of that; 0: never."""
        return every > 0 and self.step % every == 0

    def _logs(self, step: int) -> bool:
        """Whether a step has a line of metrics.jsonl."""
        return step % self.config.log.log_every == 0 or step == self.config.train.steps

    def _warm_up(self) -> None:
        """A backward pass that is thrown away, so that all steps sum gradients in the same order.

        DDP orders its buckets by the first backward pass: without this, the first step after a resume sums otherwise.
        """
        n = self.micro_batches[0].stop
        data = self.dataset.spec
        draws = draw(0, 0, n, (data.channels, data.height, data.width), self.process, 0.0).to(self.device)
        y = torch.zeros(n, dtype=torch.int64, device=self.device)
        for _ in range(2):  # buckets are rebuilt at the start of the second pass
            losses = self.process.losses(self.model, draws.noise, y, t=draws.t, noise=draws.posterior)
            losses["loss"].sum().backward()
            self.optimizer.zero_grad()

    # --- log ---

    def write_metrics(self, bar: tqdm[Any]) -> None:
        """Write a line of metrics.jsonl with means since the last one. Waits for the device.

        Raises:
            ValueError: a loss that is not finite.
        """
        norm = math.nan if self.grad_norm is None else float(self.grad_norm)
        line = self.metrics.write(
            self.step,
            grad_norm=norm if math.isfinite(norm) else None,  # fp16 overflows, and JSON has no infinity
            learning_rate=self.config.train.learning_rate,
            **self.contrast(),
        )
        bar.set_postfix(loss=f"{line['loss']:.4f}", images_per_s=f"{line['images_per_second']:.1f}")

    def contrast(self) -> dict[str, float | None]:
        """How far the streams of VCA differ (`mean_contrast`), on the main process; not under FSDP.

        Always on the same images, times and noise: a function of weights and seed alone.
        """
        sharded = isinstance(self.network, FSDPModule)  # one rank alone cannot run it
        if not self.accelerator.is_main_process or sharded or self.config.model.attention != "vca":
            return {}
        x_start, y, draws = self._contrast_inputs
        found = mean_contrast(
            self.network, lambda: self.process.losses(self.network, x_start, y, t=draws.t, noise=draws.noise)
        )
        return {name: value if math.isfinite(value) else None for name, value in found.items()}

    @cached_property
    def _contrast_inputs(self) -> tuple[Tensor, Tensor, StepDraws]:
        """Images evenly spaced in the set, their labels, and draws of their own."""
        data, count = self.dataset.spec, min(CONTRAST_IMAGES, len(self.dataset))
        items = [(i * len(self.dataset) // count, False) for i in range(count)]
        moments, y = self.dataset.__getitems__(items)
        draws = draw(
            self.config.seed, -1, count, (data.channels, data.height, data.width), self.process, 0.0
        ).to(self.device)  # fmt: skip
        return self.vae.sample(moments.to(self.device), draws.posterior), y.to(self.device), draws

    def _progress(self) -> tqdm[Any]:
        return tqdm(
            total=self.config.train.steps,
            initial=self.step,
            unit="step",
            desc="train",
            dynamic_ncols=True,
            disable=not self.accelerator.is_main_process,
        )

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(text, file=sys.stderr)

    # --- checkpoints ---

    @contextmanager
    def _claim(self) -> Iterator[None]:
        """Keep other trainings out of the run folder; write config.yaml, start the trackers.

        Raises:
            ValueError: another training is there; in all processes.
        """
        main, config = self.accelerator.is_main_process, to_plain(self.config)
        lock = lock_run(self.run_dir) if main else nullcontext()
        if any_process(self.accelerator, lock is None):
            raise ValueError(f"run_dir: {self.run_dir} is in use by another training")
        with lock or nullcontext():
            if main:
                remove_leftovers(self.run_dir)
                write_text(self.run_dir / "config.yaml", yaml.safe_dump(config, sort_keys=False))
            shown = {key: v if isinstance(v, int | float | str) else str(v) for key, v in flatten(config).items()}
            start_trackers(self.accelerator, self.config.log.trackers, self.run_dir, shown)
            yield

    def save(self) -> None:
        """Write a checkpoint of the steps done.

        Raises:
            ValueError: a loss or weights that are not finite; nothing is written.
        """
        losses = self.metrics.state()
        norms = torch.stack(torch._foreach_norm([parameter.detach() for parameter in self.network.parameters()]))
        norms = norms.full_tensor() if isinstance(norms, DTensor) else norms
        if any_process(self.accelerator, not norms.isfinite().all()):
            raise ValueError(f"weights: not finite after step {self.step}; not saved")
        main, settings = self.accelerator.is_main_process, self.config.checkpoint
        save_checkpoint(
            self.run_dir, self.step, self.network, self.emas, self.optimizer.optimizer, main=main,
            metadata={"format": FORMAT, "config": to_plain(self.config), "data": self.dataset.spec.to_dict()},
            state={
                "num_items": len(self.dataset),
                "num_processes": self.accelerator.num_processes,
                "losses": losses,
                "scaler": None if self.scaler is None else self.scaler.state_dict(),
            },
        )  # fmt: skip
        if main:
            prune_checkpoints(self.run_dir, keep_last=settings.keep_last, keep_every=settings.keep_every)
        self.accelerator.wait_for_everyone()
        self.metrics.restart_clock()

    def resume(self) -> None:
        """Restore the newest checkpoint, where there is one, and get ready for the next step.

        Raises:
            ValueError: the data is not that of the checkpoint, or a damaged checkpoint or log.
        """
        folder = latest_checkpoint(self.run_dir)
        state = None if folder is None else read_state(folder)
        found = 0 if state is None else state["step"]
        steps = self.accelerator.gather(torch.tensor([found], device=self.device)).tolist()
        if len(set(steps)) > 1:
            raise ValueError(f"run_dir: {self.run_dir} is not the same for all processes: they find steps {steps}")
        if folder is not None and state is not None:
            if state["num_items"] != len(self.dataset):
                raise ValueError(f"data: {len(self.dataset)} images, {folder} was trained on {state['num_items']}")
            load_checkpoint(folder, self.network, self.emas, self.optimizer.optimizer)
            self.step = state["step"]
            if self.scaler is not None and state["scaler"] is not None:
                with reading(folder / "state.json"):
                    self.scaler.load_state_dict(state["scaler"])
            self._say(f"{self.run_dir}: going on from {folder.name}")
            if state["num_processes"] != self.accelerator.num_processes:
                self._say(
                    f"{self.accelerator.num_processes} processes now, {state['num_processes']} before; "
                    "batches, noise and times are the same"
                )
        self.metrics.resume({"sums": {}, "images": 0} if state is None else state["losses"], self.step)
        self.accelerator.wait_for_everyone()
        self.metrics.restart_clock()
        if self.step >= self.config.train.steps:
            self._say(f"{self.run_dir}: has all its {self.config.train.steps} steps; more by --train.steps")
        elif self.config.train.deterministic and self.accelerator.num_processes > 1:
            self._warm_up()

    # --- preview and plan ---

    def preview(self) -> None:
        """Write previews/step_0000000.png: images of the averaged network, the same seeds and balanced labels always.

        Sampling may fail with early weights; that is said and does not end the training.
        """
        if self.config.log.preview_every and self.accelerator.is_main_process:
            count = math.isqrt(min(PREVIEW, self.config.train.batch_size)) ** 2
            self.network.eval()
            try:
                with self.emas[0].applied(self.network.parameters()):
                    images = self.averaged_run().sample(
                        [i % self.dataset.spec.num_classes for i in range(count)], seed=self.config.seed,
                        output="tensor", batch=min(count, PREVIEW_BATCH, self.micro_batches[0].stop),
                    )  # fmt: skip
                assert isinstance(images, Tensor)
                save_grid(file := self.run_dir / "previews" / f"step_{self.step:07d}.png", images)
                log_image(self.accelerator, "preview", file, self.step)
            except ValueError as error:
                self._say(f"no preview of step {self.step}: {error}")
            self.network.train()
        self.accelerator.wait_for_everyone()
        self.metrics.restart_clock()

    def averaged_run(self) -> LoadedRun:
        """The network as `load` would give it, but for its weights."""
        return LoadedRun(
            network=self.network, process=self.process, vae=self.vae, config=self.config, data=self.dataset.spec,
            step=self.step, ema_decay=self.emas[0].decay, weights_sha256="",
            tf32=self.config.train.tf32,
        )  # fmt: skip

    def plan(self) -> str:
        """What a dry run prints: cost, memory, batches, steps."""
        train, data, n = self.config.train, self.dataset.spec, len(self.dataset)
        with torch.device("meta"):
            meta = build_model(self.config.model, self.config.process, data)
        cost = measure(meta)
        local, micro = self.part.stop - self.part.start, self.micro_batches[0].stop
        state = state_bytes(meta, len(self.emas))
        activations = activation_bytes(meta, micro, train.precision)
        processes = self.accelerator.num_processes
        precision = "" if train.precision == "no" else f" in {train.precision}"
        lines = {
            "network": f"{self.config.model.size} {self.config.model.attention}, {self.config.process.name}",
            "parameters": f"{cost.params / 1e6:.2f} M",
            "multiply-adds": f"{cost.multiply_adds / 1e9:.3f} G an image",
            "data": f"{n} images of {data.num_classes} classes, latents {data.channels} x {data.height} x {data.width}",
            "processes": f"{processes} on {self.device.type}",
            "batch": f"{train.batch_size} = {processes} processes x {local}"
            + (f", in parts of {micro}" if micro < local else ""),
            "steps": f"{train.steps}, {train.steps * train.batch_size / n:.1f} epochs "
            f"of {n / train.batch_size:.1f} steps",
            "memory": f"{state / 2**20:.1f} MiB for weights, gradients, AdamW and {len(self.emas)} EMA "
            f"({state / cost.params:.1f} bytes a parameter); "
            f"activations{precision}: about {activations / 2**20:.1f} MiB",
            "checkpoint": f"{(state - 4 * cost.params) / 2**20:.1f} MiB each",
        }
        return "\n".join(f"{name:<14} {value}" for name, value in lines.items())


def _ignore_signals(worker: int) -> None:
    """Launchers signal the whole process group; a loader worker goes on until its training has stopped."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
