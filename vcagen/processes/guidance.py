"""Classifier-free guidance (arXiv 2207.12598): a closure around the network, which samplers never look into."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vcagen.processes.process import Model

Predict = Callable[[Tensor, float], Tensor]
"""predict(x_t, time): (N, C, H, W) and a time, an int for diffusion, to the output (N, out_channels, H, W)."""


def with_cfg(
    model: Model,
    y: Tensor,
    *,
    cfg_scale: float,
    null_label: int | None,
    guided_channels: int | None = None,
    interval: tuple[float, float] | None = None,
) -> Predict:
    """Classifier-free guidance: uncond + cfg_scale (cond - uncond).

    One network call a step: the plain conditional one where the scale is 1 or the time outside the interval, the
    unconditional one where it is 0, and otherwise one on the doubled batch.

    Args:
        model: model(x_t, t, y) -> (N, out_channels, H, W).
        y: labels (N,).
        cfg_scale: 1 is off, 0 unconditional.
        null_label: label of "no class", None for a network without.
        guided_channels: guide only the first ones (3 repeats published DiT numbers). Default: as many as x_t has;
            variance channels come from the conditional pass (at scale 0 from the only one).
        interval: guide only where low <= time <= high, in the process's own time. Default: everywhere.

    Returns:
        predict(x_t, time); time is an int for diffusion (t is int64) and a float for flow.

    Raises:
        ValueError: guidance without a null label; a scale that is not finite; no channels; an empty interval.
    """
    if not abs(cfg_scale) <= torch.finfo(torch.float32).max:
        raise ValueError(f"cfg_scale: {cfg_scale}; needs a finite number of float32's range")
    if cfg_scale != 1.0 and null_label is None:
        raise ValueError(f"cfg_scale: {cfg_scale}; this network has no null label, so only 1.0 is possible")
    if guided_channels is not None and guided_channels < 1:
        raise ValueError(f"guided_channels: {guided_channels}; needs at least 1")
    if interval is not None and not interval[0] <= interval[1]:
        raise ValueError(f"cfg_interval: {interval}; the first time must not be above the second")
    low, high = interval or (-torch.inf, torch.inf)
    rounding = 1e-6  # solvers keep times from 0 to 1 in float32

    def predict(x_t: Tensor, time: float) -> Tensor:
        t = torch.full((len(x_t),), time, device=x_t.device, dtype=torch.int64 if isinstance(time, int) else x_t.dtype)
        if cfg_scale == 1.0 or null_label is None or not low - rounding <= time <= high + rounding:
            return model(x_t, t, y)
        y_null = torch.full_like(y, null_label)
        c = min(x_t.shape[1], guided_channels or x_t.shape[1])
        if cfg_scale == 0.0 and c == x_t.shape[1]:
            return model(x_t, t, y_null)
        both = model(torch.cat([x_t, x_t]), torch.cat([t, t]), torch.cat([y, y_null]))  # (2N, out_channels, H, W)
        cond, uncond = both.to(x_t.dtype).chunk(2)
        return torch.cat([uncond[:, :c].lerp(cond[:, :c], cfg_scale), cond[:, c:]], dim=1)

    return predict
