"""Features of Fashion-MNIST: those of a small convolutional classifier, trained here once from a fixed seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from vcagen.data.fashion import CLASSES, PADDED, fashion
from vcagen.data.image_set import ImageSet
from vcagen.evaluation.extractor import Extractor, Features, Shape, pick_device
from vcagen.system.files import atomic_file, reading, sha256
from vcagen.system.precision import full_precision

FEATURES = 64
EPOCHS = 3
BATCH = 100
LEARNING_RATE = 4e-3
"""The highest of one cycle (arXiv 1708.07120)."""
EXPECTED_ACCURACY = 0.91


class FashionFeatures(Extractor):
    """The 64 features before the last layer of a classifier of three convolutions; its logits give an inception score.

    It is trained on the training images when first needed, one or two minutes on two CPU cores, and kept in torch's
    cache folder with the first digits of its SHA-256 in its name. The training has a seed of its own and repeats its
    bits on one machine with the same torch and number of threads.

    Args:
        weights: file of a classifier that was kept so. Default: the one in the cache.

    Raises:
        ValueError: a file with other contents, or no images to train on.
    """

    name = protocol = "fashion"
    score_name = "fd_fashion"
    precision_recall: ClassVar[Mapping[str, bool]] = {"fashion": False}

    def __init__(self, weights: str | Path | None = None, device: torch.device | str | None = None) -> None:
        self.device = pick_device(device)
        self.path = Path(weights or _kept())
        self.network = classifier()
        with reading(self.path):
            state = load_file(self.path)
            self.accuracy = float(state.pop("accuracy"))
            self.network.load_state_dict(state)
        self.network.to(self.device)
        self.sha256 = sha256(self.path)
        self.identity = json.dumps({"extractor": self.name, "weights_sha256": self.sha256})

    def check_shape(self, shape: Shape, path: str) -> None:
        if shape != (1, PADDED, PADDED):
            raise ValueError(f"{path}: images {shape}; the fashion extractor takes (1, {PADDED}, {PADDED})")

    def __call__(self, images: Tensor) -> Features:
        with full_precision(self.device):
            return Features(self.network[:-1](_input(images.to(self.device))))

    def logits(self, pool: Tensor) -> Tensor:
        with full_precision(self.device):
            return self.network[-1](pool.to(self.device)).double()

    def record(self) -> dict[str, Any]:
        return {"name": "fashion", "path": str(self.path), "sha256": self.sha256, "test_accuracy": self.accuracy}

    def warnings(self, count: int, *, adm_reference: bool) -> list[str]:
        if self.accuracy >= EXPECTED_ACCURACY:
            return []
        return [f"the classifier knows {self.accuracy:.1%} of the test images, {EXPECTED_ACCURACY:.0%} are expected"]


def classifier() -> nn.Sequential:
    """The network from (N, 1, 32, 32) to 10 logits, without weights that matter."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, stride=2, padding=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 64, FEATURES), nn.ReLU(), nn.Linear(FEATURES, len(CLASSES)),
    ).requires_grad_(False).eval()  # fmt: skip


def train_classifier(images: ImageSet, *, epochs: int = EPOCHS) -> nn.Sequential:
    """A classifier of the images, always the same; torch's own random numbers stay as they are."""
    pixels, labels = _stacked(images)
    steps_an_epoch = -(-len(pixels) // BATCH)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        network = classifier().requires_grad_(True).train()
        optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=epochs * steps_an_epoch)
        with tqdm(total=epochs * steps_an_epoch, desc="fashion classifier", unit="step", dynamic_ncols=True) as bar:
            for _ in range(epochs):
                for batch in torch.randperm(len(pixels)).split(BATCH):
                    loss = F.cross_entropy(network(_input(pixels[batch])), labels[batch])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    schedule.step()
                    bar.update()
    return network.requires_grad_(False).eval()


@torch.no_grad()
def accuracy(network: nn.Module, images: ImageSet) -> float:
    """The share of images that a classifier takes for their class."""
    pixels, labels = _stacked(images)
    parts = [network(_input(part)).argmax(1) for part in pixels.split(500)]
    return float((torch.cat(parts) == labels).double().mean())


def _stacked(images: ImageSet) -> tuple[Tensor, Tensor]:
    return torch.stack([images[i] for i in range(len(images))]), torch.tensor(images.labels)


def _input(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1


def _kept() -> Path:
    """The weights file in torch's cache folder, made if absent, by one process."""
    folder = Path(torch.hub.get_dir()) / "vcagen"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "fashion.lock"):
        if not (kept := sorted(folder.glob("fashion-*.safetensors"))):
            train, test = fashion(), fashion(split="t10k")
            network = train_classifier(train)
            share = torch.tensor(accuracy(network, test), dtype=torch.float64)
            with atomic_file(folder / "fashion.safetensors") as temporary:
                save_file({**network.state_dict(), "accuracy": share}, temporary)
            made = folder / "fashion.safetensors"
            kept = [made.rename(folder / f"fashion-{sha256(made)[:8]}.safetensors")]
    if not sha256(kept[0]).startswith(kept[0].stem.removeprefix("fashion-")):
        raise ValueError(f"{kept[0]}: damaged; remove it, and it is made again")
    return kept[0]
