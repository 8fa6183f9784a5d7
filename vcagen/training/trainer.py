"""The training loop: a run is a function of its configuration and seed, whatever happens to the machines."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from vcagen.config.options import CheckpointConfig, LogConfig, TrainConfig
from vcagen.data.latents import LatentVAE, MomentsDataset, keep
from vcagen.networks.dit import DiT
from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import LinearInterpolant
from vcagen.system.interruption import GracefulStop
from vcagen.system.lock import FolderLock
from vcagen.system.run_folder import latest_checkpoint
from vcagen.training.checkpoint import load_checkpoint, prune_checkpoints, read_state, remove_leftovers, save_checkpoint
from vcagen.training.ema import EMA
from vcagen.training.metrics_log import Meter, read_log
from vcagen.training.randomness import Draws, StepSampler, draw

__all__ = ["StepSampler", "Trainer", "local_part"]

Network = Callable[[Tensor, Tensor, Tensor], Tensor]


def local_part(batch_size: int, rank: int, world_size: int) -> slice:
    """Positions of the global batch that a process works on.

    Raises:
        ValueError: the batch cannot be shared equally; names the process counts that can.
    """
    if batch_size % world_size:
        valid = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
        raise ValueError(
            f"train.batch_size: {batch_size} images cannot be shared by {world_size} processes; "
            f"valid process counts: {', '.join(map(str, valid))}"
        )
    size = batch_size // world_size
    return slice(rank * size, (rank + 1) * size)


class Trainer:
    """Trains a network on latents: step, EMA, log, checkpoint, resume, preview.

    Args:
        run: run folder.
        network: on the CPU, with its initial weights.
        process: the process; its `losses` are what is minimised.
        vae: samples latents from moments.
        dataset: moments and labels.
        settings, log, checkpoint: the sections of the configuration.
        seed: of all steps.
        metadata: goes into every weights file (`format`, `config`, `data`).
        horizontal_flip, num_workers: of the data section.
        preview: called on the main process with the averaged network and the step.
    """

    def __init__(
        self,
        *,
        run: Path,
        accelerator: Accelerator,
        network: DiT,
        process: GaussianDiffusion | LinearInterpolant,
        vae: LatentVAE,
        dataset: MomentsDataset,
        settings: TrainConfig,
        log: LogConfig,
        checkpoint: CheckpointConfig,
        seed: int,
        metadata: dict[str, Any],
        horizontal_flip: bool = True,
        num_workers: int = 0,
        preview: Callable[[Network, int], None] | None = None,
    ) -> None:
        self.run = run
        self._lock = FolderLock(run)
        self.accelerator = accelerator
        self.process = process
        self.vae = vae
        self.dataset = dataset
        self.settings, self.log_settings, self.checkpoint_settings = settings, log, checkpoint
        self.seed = seed
        self.metadata = metadata
        self.num_workers = 0 if dataset.needs_main_process else num_workers
        self.preview = preview
        self.device = accelerator.device
        self.part = local_part(settings.batch_size, accelerator.process_index, accelerator.num_processes)
        self.micro_batch = min(settings.micro_batch_size or settings.batch_size, self.part.stop - self.part.start)
        if self.micro_batch < 1:
            raise ValueError(f"train.micro_batch_size: {self.micro_batch} is not positive")
        self.sampler = StepSampler(len(dataset), settings.batch_size, seed, horizontal_flip=horizontal_flip)
        self.latent_shape = (dataset.spec.channels, dataset.spec.height, dataset.spec.width)

        self.network = network.train()
        self.model, self.optimizer = self._prepare(network)
        self.emas = [EMA(network.parameters(), decay, warmup=settings.ema_warmup) for decay in settings.ema_decays]
        self.step = 0
        """Steps done."""
        self.meter = Meter(accelerator, run / "metrics.jsonl")
        self.grad_norm: Tensor | None = None
        self.bad_step = torch.full((), math.inf, device=self.device)
        """First step with a loss that is not finite, on the device."""

    def _prepare(self, network: DiT) -> tuple[nn.Module, Any]:
        """The network as it is called (autocast, DDP or FSDP, compiled), and its optimizer."""
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            trained,
            lr=self.settings.learning_rate,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )
        model = torch.compile(network) if self.settings.compile else network
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
            ValueError: another training in the run folder, a checkpoint that cannot be gone on with, or a loss that is
                not finite; nothing is saved then.
        """
        self.claim()
        try:
            self._fit()
        finally:
            self._lock.release()

    def claim(self) -> None:
        """Keep other trainings out of the run folder, until the end of `fit` or of the process.

        Raises:
            ValueError: another one is there; in all processes.
        """
        taken = self.accelerator.is_main_process and not self._lock.take()
        if float(self.accelerator.gather(torch.tensor([float(taken)], device=self.device)).max()):
            raise ValueError(f"run: {self.run} is in use by another training")

    def _fit(self) -> None:
        self.resume()
        if self.step >= self.settings.steps:
            self._say(f"{self.run}: has all its {self.settings.steps} steps; more by --train.steps")
            return
        self._warm_up()
        with GracefulStop() as stop, self._progress() as bar:
            self.meter.restart()
            for moments, labels in self.loader():
                self.train_step(moments, labels)
                bar.update()
                last = self.step == self.settings.steps
                if self.step % self.log_settings.log_every == 0 or last:
                    self._log(bar)
                asked = stop.agreed()
                if last or asked or self.step % self.checkpoint_settings.save_every == 0:
                    self.save()
                    self.meter.restart()
                if self._preview_due(last) and (last or not asked):  # whoever asked does not wait for it
                    self._make_preview()
                    self.meter.restart()
                if asked and not last:
                    self._say(f"stopped after step {self.step}, saved; the same command goes on")
                    break

    def train_step(self, moments: Tensor, labels: Tensor) -> None:
        """One optimizer step on the local part of the global batch."""
        k = self.step
        draws = draw(
            self.seed, k, self.settings.batch_size, self.latent_shape, self.process,
            self.network.class_dropout_prob, self.device,
        ).part(self.part)  # fmt: skip
        moments = moments.to(self.device, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        losses = self._backward(moments, labels, draws)
        last = k + 1 == self.settings.steps
        clip = self.settings.max_grad_norm
        if clip is not None or (k + 1) % self.log_settings.log_every == 0 or last:
            norm = self.accelerator.clip_grad_norm_(self.network.parameters(), math.inf if clip is None else clip)
            self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm.detach()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for ema in self.emas:
            ema.update(self.network.parameters(), k)
        self.meter.add(losses, self.settings.batch_size)
        finite = losses["loss"].isfinite()
        self.bad_step = torch.where(finite, self.bad_step, self.bad_step.clamp(max=k + 1))
        self.step += 1

    def _backward(self, moments: Tensor, labels: Tensor, draws: Draws) -> dict[str, Tensor]:
        """Accumulate gradients of the mean loss over the micro-batches; returns sums over the local images."""
        local = len(labels)
        if (null_label := self.network.null_label) is not None:
            labels = labels.masked_fill(draws.dropped, null_label)
        sums: dict[str, Tensor] = {}
        for start in range(0, local, self.micro_batch):
            rows = slice(start, start + self.micro_batch)
            part = draws.part(rows)
            x_start = self.vae.sample(moments[rows], part.posterior)
            last = start + self.micro_batch >= local
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                losses = self.process.losses(self.model, x_start, labels[rows], t=part.t, noise=part.noise)
                self.accelerator.backward(losses["loss"].sum() / local)
            for name, value in losses.items():
                total = value.detach().sum()
                sums[name] = sums[name] + total if name in sums else total
        return sums

    def _warm_up(self) -> None:
        """With several processes: a backward pass that is thrown away.

        DDP orders its buckets by the first backward pass, and the order decides how gradients are summed. After this,
        all steps use the same order, also the first one after a resume.
        """
        if self.accelerator.num_processes == 1:
            return
        count = self.part.stop - self.part.start
        draws = draw(0, 0, count, self.latent_shape, self.process, 0.0, self.device)
        labels = torch.zeros(count, dtype=torch.int64, device=self.device)
        for _ in range(2):  # buckets are rebuilt at the start of the second pass
            rows = slice(0, self.micro_batch)
            losses = self.process.losses(
                self.model, draws.noise[rows], labels[rows], t=draws.t[rows], noise=draws.posterior[rows]
            )
            losses["loss"].sum().backward()
            self.optimizer.zero_grad(set_to_none=True)

    def loader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """The local parts of the batches of the steps to come."""
        return DataLoader(
            self.dataset,  # type: ignore[arg-type]  # has what a map-style dataset needs
            batch_sampler=self.sampler.batches(self.step, self.settings.steps, self.part),
            collate_fn=keep,
            num_workers=self.num_workers,
            worker_init_fn=_ignore_signals,
            pin_memory=self.device.type == "cuda" and not self.dataset.needs_main_process,
        )

    # --- log ---

    def _log(self, bar: tqdm[Any]) -> None:
        """Write a line of metrics.jsonl with means since the last one. Waits for the device."""
        self._check_finite()
        line = self.meter.write(
            self.step,
            grad_norm=self._finite_grad_norm(),
            learning_rate=self.settings.learning_rate,
        )
        bar.set_postfix(loss=f"{line['loss']:.4f}", images_per_s=f"{line['images_per_second']:.1f}")

    def _finite_grad_norm(self) -> float | None:
        """The last norm; None where fp16 overflowed, since JSON has no infinity."""
        norm = math.nan if self.grad_norm is None else float(self.grad_norm)
        return norm if math.isfinite(norm) else None

    def _progress(self) -> tqdm[Any]:
        return tqdm(
            total=self.settings.steps,
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

    def _check_finite(self) -> None:
        """Raise ValueError where a loss of any process was not finite. Waits for the device."""
        bad = float(self.accelerator.gather(self.bad_step.reshape(1)).min())
        if math.isfinite(bad):
            newest = latest_checkpoint(self.run)
            saved = "no checkpoint yet" if newest is None else f"the last checkpoint is {newest.name}"
            raise ValueError(f"loss: not finite at step {int(bad)}; {saved}")

    def _check_weights(self) -> None:
        norms = torch.stack(torch._foreach_norm([p.detach() for p in self.network.parameters()]))
        norms = norms.full_tensor() if isinstance(norms, DTensor) else norms
        finite = norms.isfinite().all().reshape(1).float()
        if not bool(self.accelerator.gather(finite).all()):
            raise ValueError(f"weights: not finite after step {self.step}; not saved")

    def save(self) -> None:
        """Write a checkpoint of the steps done, unless a loss was not finite."""
        self._check_finite()
        self._check_weights()
        scaler = getattr(self.accelerator, "scaler", None)
        state = {
            "num_items": len(self.dataset),
            "num_processes": self.accelerator.num_processes,
            "meter": self.meter.state(),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }
        main = self.accelerator.is_main_process
        save_checkpoint(
            self.run, self.step, self.network, self.emas, self.optimizer.optimizer,
            metadata=self.metadata, state=state, main=main,
        )  # fmt: skip
        if main:
            prune_checkpoints(
                self.run,
                keep_last=self.checkpoint_settings.keep_last,
                keep_every=self.checkpoint_settings.keep_every,
            )
        self.accelerator.wait_for_everyone()

    def resume(self) -> None:
        """Go on from the newest checkpoint, or start.

        Raises:
            ValueError: the data is not that of the checkpoint, or a damaged checkpoint or log.
        """
        if self.accelerator.is_main_process:
            remove_leftovers(self.run)
        folder = latest_checkpoint(self.run)
        state: dict[str, Any] = (
            {"step": 0, "meter": {"sums": {}, "images": 0}} if folder is None else read_state(folder)
        )
        log = read_log(self.run)  # by all, so that a damaged one ends all
        steps = self.accelerator.gather(torch.tensor([state["step"]], device=self.device)).tolist()
        if len(set(steps)) > 1:
            raise ValueError(f"run: {self.run} is not the same folder for all processes: they find steps {steps}")
        if folder is not None:
            if state["num_items"] != len(self.dataset):
                raise ValueError(f"data: {len(self.dataset)} images, {folder} was trained on {state['num_items']}")
            load_checkpoint(folder, self.network, self.emas, self.optimizer.optimizer)
            self.step = state["step"]
            if state["scaler"] is not None and (scaler := getattr(self.accelerator, "scaler", None)) is not None:
                scaler.load_state_dict(state["scaler"])
            self._say(f"{self.run}: going on from {folder.name}")
            if state["num_processes"] != self.accelerator.num_processes:
                self._say(
                    f"{self.accelerator.num_processes} processes now, {state['num_processes']} before; "
                    "batches, noise and times are the same"
                )
        self.meter.resume(state["meter"], [line for line in log if line["step"] <= self.step])
        self.accelerator.wait_for_everyone()

    # --- preview ---

    def _preview_due(self, last: bool) -> bool:
        every = self.log_settings.preview_every
        return every > 0 and (last or self.step % every == 0)

    def _make_preview(self) -> None:
        if self.accelerator.is_main_process and self.preview is not None:
            names = [name for name, _ in self.network.named_parameters()]
            averaged = dict(zip(names, self.emas[0].averages, strict=True))
            self.network.eval()
            try:
                self.preview(lambda x, t, y: torch.func.functional_call(self.network, averaged, (x, t, y)), self.step)
            except ValueError as error:  # early weights may sample badly; that must not end the training
                self._say(f"no preview of step {self.step}: {error}")
            self.network.train()
        self.accelerator.wait_for_everyone()


def _ignore_signals(worker: int) -> None:
    """Launchers signal the whole process group; a loader worker goes on until its training has stopped."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
