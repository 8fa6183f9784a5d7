"""Inception features as the ADM evaluator's, and the weight-free pixels."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import random_pictures
from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x
from torch_fidelity.utils import create_feature_extractor

from vcagen.evaluation.extractor import MissingWeights
from vcagen.evaluation.features import (
    InceptionFeatures,
    PixelFeatures,
    _downloaded_weights,
    load_extractor,
)
from vcagen.system.files import sha256
from vcagen.system.precision import full_precision


@pytest.fixture(scope="module")
def extractor(inception_weights):
    return InceptionFeatures(inception_weights)


@pytest.fixture(scope="module")
def oracle(inception_weights):
    return create_feature_extractor(
        "inception-v3-compat",
        ["2048", "logits_unbiased"],
        cuda=False,
        feature_extractor_weights_path=inception_weights,
        verbose=False,
    )


def test_inception_equals_torch_fidelity(extractor, oracle):
    images = random_pictures(8, 64)
    kept = {}
    hook = oracle.Mixed_6d.branch1x1.register_forward_hook(lambda module, args, out: kept.update(branch=out))
    pool, logits = oracle(images)
    hook.remove()
    features = extractor(images)
    assert torch.equal(features.pool, pool)
    assert pool.std() > 0.01  # the random network is alive
    assert (extractor.logits(features.pool) - logits).abs().max() < 1e-5 * logits.abs().max()

    branch = kept["branch"]
    assert branch.shape == (8, 192, 17, 17)
    assert features.spatial.shape == (8, 2023)
    for h, w, c in ((0, 0, 0), (3, 11, 6), (16, 16, 2), (9, 0, 5)):
        assert torch.equal(features.spatial[:, (h * 17 + w) * 7 + c], branch[:, c, h, w])
    assert torch.equal(features.spatial, branch[:, :7].permute(0, 2, 3, 1).reshape(8, -1))


def test_resize_is_tensorflows_without_half_pixel_centres():
    """Row r of 299 reads source row r * 256 / 299: floor, next row clamped."""

    def resize(image, size):
        def lerp(x, axis):
            n = x.shape[axis]
            source = np.arange(size, dtype=np.float32) * np.float32(n / size)  # float32, as TensorFlow
            low = np.floor(source).astype(int)
            shape = [1] * x.ndim
            shape[axis] = size
            fraction = (source - low).reshape(shape)
            low_rows, high_rows = x.take(low, axis), x.take(np.minimum(low + 1, n - 1), axis)
            return low_rows + (high_rows - low_rows) * fraction

        return lerp(lerp(image, 1), 2)

    image = random_pictures(1, 256)[0]
    ours = interpolate_bilinear_2d_like_tensorflow1x(image[None].float(), size=(299, 299), align_corners=False)[0]
    assert np.abs(ours.numpy() - resize(image.float().numpy(), 299)).max() < 1e-4
    constant = interpolate_bilinear_2d_like_tensorflow1x(torch.full((1, 3, 256, 256), 77.0), (299, 299), None, False)
    assert (constant == 77).all()


def test_weights_are_recorded_and_unknown_ones_named(extractor, inception_weights):
    record = extractor.record()
    assert record == {"name": "UNKNOWN", "path": inception_weights, "sha256": sha256(inception_weights)}
    assert extractor.record()["sha256"] in extractor.identity


def test_no_tf32_and_no_autocast_inside():
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch.autocast("cpu", torch.bfloat16), full_precision(torch.device("cpu")):
            assert not torch.backends.cuda.matmul.allow_tf32
            assert torch.backends.cudnn.enabled
            assert not torch.backends.cudnn.allow_tf32
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_bad_weights(tmp_path):
    with pytest.raises(ValueError, match=r"inception_weights: .*absent\.pth: no such file"):
        load_extractor("inception", weights=str(tmp_path / "absent.pth"))
    text = tmp_path / "text.pth"
    text.write_text("not weights")
    with pytest.raises(ValueError, match=r"text\.pth: not the Inception weights"):
        load_extractor("inception", weights=str(text))
    other = tmp_path / "other.pth"
    torch.save({"weight": torch.zeros(3)}, other)
    with pytest.raises(ValueError, match=r"other\.pth: not the Inception weights"):
        load_extractor("inception", weights=str(other))
    for content in (b"", b"root:x:0:0:root:/root:/bin/sh\n", b"PK\x03\x04", bytes(range(256))):
        text.write_bytes(content)
        with pytest.raises(ValueError, match=r"text\.pth: not the Inception weights"):
            load_extractor("inception", weights=str(text))


class Bomb:
    """Writes a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_weights_that_would_run_code_are_refused(tmp_path):
    torch.save({"fc.weight": Bomb(tmp_path / "ran")}, tmp_path / "bomb.pth")
    with pytest.raises(ValueError, match=r"bomb\.pth: not the Inception weights"):
        load_extractor("inception", weights=str(tmp_path / "bomb.pth"))
    assert not (tmp_path / "ran").exists()


def test_missing_weights_say_where_they_come_from(tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(MissingWeights, match="inception_weights") as caught:
        load_extractor("inception")
    message = str(caught.value)
    assert "weights-inception-2015-12-05-6726825d.pth" in message
    assert "--inception_weights PATH" in message


def test_processes_that_start_together_download_once(tmp_path, monkeypatch):
    downloads = []

    def download(url, path, **_):
        downloads.append(path)
        time.sleep(0.2)
        Path(path).write_bytes(b"weights")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    with ThreadPoolExecutor(3) as pool:
        paths = {future.result() for future in [pool.submit(_downloaded_weights) for _ in range(3)]}
    assert [str(path) for path in paths] == downloads


def test_grey_images_are_not_for_inception(extractor):
    with pytest.raises(ValueError, match=r"x: images of 1 channel\(s\)"):
        extractor.check_shape((1, 8, 8), "x")


def test_pixels_are_area_means_in_minus_one_to_one():
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    images[1] = 255
    images[1, 0, 0, 1] = 51
    features = PixelFeatures()(images).pool
    assert features.shape == (2, 64)
    assert (features[0] == -1).all()
    assert features[1, 1] == pytest.approx(-0.6)
    assert features[1, 2:].eq(1).all()

    large = random_pictures(3, 32)
    means = large.double().reshape(3, 3, 8, 4, 8, 4).mean((3, 5)).flatten(1) / 127.5 - 1
    assert (PixelFeatures()(large).pool - means).abs().max() < 1e-5
    assert PixelFeatures()(random_pictures(2, 4)).pool.shape == (2, 48)


def test_unknown_extractor():
    with pytest.raises(ValueError, match="extractor: vgg; choose from inception, pixels"):
        load_extractor("vgg")
