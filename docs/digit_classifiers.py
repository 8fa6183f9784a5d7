"""DeiT with plain attention and with VCA on scikit-learn's 1,797 digits: python docs/digit_classifiers.py

Networks of 0.2 M parameters on 4 x 4 tokens learn 1,297 digits; the same 500 others are held out for every seed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import timm
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from torch import nn
from tqdm import tqdm

import vcagen.recognition  # noqa: F401  # registers its networks with timm
from vcagen.data.images import open_dataset_images

SHAPE = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10, "embed_dim": 64, "depth": 4, "num_heads": 4}
NETWORKS = {
    "DeiT": ("deit_tiny_patch16_224", {}),
    "DeiT + VCA": ("vca_deit_tiny_patch16_224", {"contrast_grid": 2}),
}
HELD_OUT, BATCH, RATE, WARM_UP = 500, 64, 2e-3, 50


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int, seed: int, name: str) -> None:
    """AdamW with weight decay 0.05, warm-up and a cosine, on batches that depend on the seed alone."""
    optimizer = create_optimizer_v2(model, "adamw", lr=RATE, weight_decay=0.05)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in tqdm(range(steps), desc=f"{name}, seed {seed}"):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        batch = torch.randint(len(images), (BATCH,), generator=generator)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of the images whose label is the first guess, in percent."""
    model.eval()
    return 100 * (model(images).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    """Train both networks with each seed and print their accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    digits = open_dataset_images("digits")
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0)).tolist()
    images = torch.stack([digits[i] for i in order]) / 127.5 - 1
    labels = torch.tensor([digits.labels[i] for i in order])
    print(
        "| network | parameters | held-out accuracy of each seed (%) | mean | +- | s a run |\n|---|--:|---|--:|--:|--:|"
    )
    for name, (model_name, more) in NETWORKS.items():
        found, start = [], time.perf_counter()
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            model = timm.create_model(model_name, **SHAPE, **more)
            train(model, images[HELD_OUT:], labels[HELD_OUT:], options.steps, seed, name)
            found.append(accuracy(model, images[:HELD_OUT], labels[:HELD_OUT]))
        spread = f"{statistics.stdev(found):.2f}" if len(found) > 1 else ""
        seconds = (time.perf_counter() - start) / options.seeds
        count = sum(parameter.numel() for parameter in model.parameters())
        each = ", ".join(f"{value:.1f}" for value in found)
        print(f"| {name} | {count:,} | {each} | {statistics.fmean(found):.2f} | {spread} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
