"""Image folders, colour modes, the centre crop, the rounding rule, the digits."""

import io

import numpy as np
import pytest
import torch
from helpers import image_folder, reference
from PIL import Image

from vcagen.config.options import ImageConfig
from vcagen.data.images import (
    center_crop,
    find_bad_images,
    folder_pixels,
    from_uint8,
    load_digits,
    read_image,
    read_pixels,
    scan_images,
    to_uint8,
    without_bad,
)


def test_rounding_rule():
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_uint8(from_uint8(every)), every)
    assert torch.equal(to_uint8(from_uint8(every).half()), every)
    assert torch.equal(to_uint8(from_uint8(every).bfloat16()), every)
    x = torch.tensor([-9.0, -1.0, 0.0, 1.0, 9.0, 0.4 / 127.5 - 1, 0.6 / 127.5 - 1])
    assert to_uint8(x).tolist() == [0, 0, 128, 255, 255, 0, 1]


def formula_image(width, height):
    y, x = np.mgrid[:height, :width]
    red = np.round(127 + 120 * np.sin(x / 9) * np.cos(y / 7))
    return Image.fromarray(
        np.stack([red, np.round(255 * x / (width - 1)), np.round(255 * y / (height - 1))], -1).astype(np.uint8)
    )


def test_center_crop_equals_public_code():
    cases = reference("dit")["center_crop"]["cases"]
    assert len(cases) >= 5
    for case in cases:
        size = case["size"]
        pixels = np.asarray(center_crop(formula_image(case["w"], case["h"]), size))
        assert list(pixels.shape) == case["shape"]
        assert pixels.sum((0, 1), dtype=int).tolist() == case["channel_sums"]
        assert pixels[0, 0].tolist() == case["corner"]
        assert pixels[size // 2, size // 2].tolist() == case["centre"]
        assert pixels[-1, -1].tolist() == case["last"]


def left_right(path, left, right, mode, **options):
    """Save an image of `mode` whose left half is one value and right half another."""
    image = Image.new(mode, (8, 8), left)
    image.paste(right, (4, 0, 8, 8))
    image.save(path, **options)
    return path


@pytest.mark.parametrize(
    ("name", "mode", "left", "right", "expected"),
    [
        ("rgb.png", "RGB", (10, 20, 30), (40, 50, 60), [(10, 20, 30), (40, 50, 60)]),
        ("grey.png", "L", 7, 200, [(7,) * 3, (200,) * 3]),
        ("grey_alpha.png", "LA", (7, 255), (200, 255), [(7,) * 3, (200,) * 3]),
        ("alpha.png", "RGBA", (10, 20, 30, 255), (40, 50, 60, 255), [(10, 20, 30), (40, 50, 60)]),
        ("one_bit.png", "1", 0, 1, [(0,) * 3, (255,) * 3]),
        ("sixteen.png", "I;16", 257 * 7, 257 * 200, [(7,) * 3, (200,) * 3]),
        ("sixteen.tif", "I;16", 257 * 7 + 100, 65535, [(7,) * 3, (255,) * 3]),
        ("cmyk.tif", "CMYK", (255, 0, 0, 0), (0, 255, 255, 0), [(0, 255, 255), (255, 0, 0)]),
    ],
)
def test_colour_modes(tmp_path, name, mode, left, right, expected):
    path = left_right(tmp_path / name, left, right, mode)
    pixels = read_pixels(path, 8)
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, 8, 8)
    assert [tuple(pixels[:, 4, column].tolist()) for column in (0, 7)] == expected


def test_palette_and_cmyk_jpeg(tmp_path):
    colours = Image.new("RGB", (8, 8), (10, 20, 30))
    colours.paste((40, 50, 60), (4, 0, 8, 8))
    colours.quantize(4).save(tmp_path / "palette.png", transparency=0)
    assert Image.open(tmp_path / "palette.png").mode == "P"
    assert np.array_equal(np.asarray(read_image(tmp_path / "palette.png")), np.asarray(colours))

    colours.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=100, subsampling=0)
    assert Image.open(tmp_path / "cmyk.jpg").mode == "CMYK"
    difference = np.asarray(read_image(tmp_path / "cmyk.jpg"), int) - np.asarray(colours, int)
    assert abs(difference).max() <= 3


def test_exif_orientation_is_not_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to show
    left_right(tmp_path / "turned.png", (0, 0, 0), (255, 255, 255), "RGB", exif=exif)
    assert read_pixels(tmp_path / "turned.png", 8)[0, :, 0].tolist() == [0] * 8


def test_modes_without_a_range_are_refused(tmp_path):
    Image.new("F", (4, 4), 0.5).save(tmp_path / "float.tif")
    Image.new("I", (4, 4), 200).save(tmp_path / "int.tif")  # as bytes or as 16 bits?
    for name in ("float.tif", "int.tif"):
        with pytest.raises(ValueError, match=f"{name}.*no defined range"):
            read_image(tmp_path / name)


def test_scan(tmp_path):
    image_folder(tmp_path, {"dog": 2, "cat": 1, "Eel": 1, ".ipynb_checkpoints": 1, "_old": 1}, size=8)
    (tmp_path / "README.txt").write_text("junk")
    (tmp_path / "cat" / "Thumbs.db").write_text("junk")
    (tmp_path / "cat" / "._mac.png").write_text("junk")
    (tmp_path / "cat" / "000.png").rename(tmp_path / "cat" / "z.Png")
    Image.new("RGB", (8, 8)).save(tmp_path / "cat" / "_a.JPEG")
    folder = scan_images(tmp_path)
    assert folder.class_names == ("Eel", "cat", "dog")
    assert folder.paths == ("Eel/000.png", "cat/_a.JPEG", "cat/z.Png", "dog/000.png", "dog/001.png")
    assert folder.labels == (0, 1, 1, 2, 2)


def test_scan_does_not_depend_on_the_listing(tmp_path, monkeypatch):
    image_folder(tmp_path, {"b": 3, "a": 2}, size=8)
    expected = scan_images(tmp_path)
    scandir = __import__("os").scandir

    class Backwards:
        def __init__(self, path):
            with scandir(path) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("os.scandir", Backwards)
    assert scan_images(tmp_path) == expected


def test_one_folder_without_classes(tmp_path):
    image_folder(tmp_path, {"all": 3}, size=8)
    folder = scan_images(tmp_path / "all")
    assert folder.paths == ("000.png", "001.png", "002.png")
    assert folder.labels == (0, 0, 0)
    assert len(folder.class_names) == 1


def test_empty_class(tmp_path):
    image_folder(tmp_path, {"a": 2, "b": 0, "c": 2}, size=8)
    with pytest.raises(ValueError, match=": b: class folder without images"):
        scan_images(tmp_path)
    folder = scan_images(tmp_path, allow_empty_classes=True)
    assert folder.class_names == ("a", "b", "c")
    assert folder.labels == (0, 0, 2, 2)


def test_nothing_to_scan(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ValueError, match="not a folder"):
            scan_images(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no images"):
        scan_images(tmp_path / "empty")
    image_folder(tmp_path / "imagenet" / "train", {"n01": 1}, size=8)
    with pytest.raises(ValueError, match=r"n01: images two folders down"):
        scan_images(tmp_path / "imagenet")


def broken_files(root):
    """Four good files in a, three good ones, a JPEG cut to half and an empty PNG in b (INPUTS: broken files)."""
    image_folder(root, {"a": 4, "b": 3})
    buffer = io.BytesIO()
    formula_image(64, 64).save(buffer, "JPEG")
    (root / "b" / "cut.jpg").write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    (root / "b" / "empty.png").write_bytes(b"")
    return root


def test_bad_files_are_found(tmp_path):
    folder = scan_images(broken_files(tmp_path))
    bad = find_bad_images(folder.root, folder.paths, 3)
    assert [path for path, _ in bad] == ["b/cut.jpg", "b/empty.png"]
    assert "truncated" in bad[0][1].lower()
    with pytest.raises(ValueError, match=r"2 unreadable images: b/cut\.jpg, b/empty\.png"):
        without_bad(folder, bad, ImageConfig())
    kept = without_bad(folder, bad, ImageConfig(on_bad_image="skip"))
    assert len(kept.paths) == 7
    assert kept.labels == (0, 0, 0, 0, 1, 1, 1)


def test_all_bad_files_are_listed_before_the_error(tmp_path, capsys):
    image_folder(tmp_path, {"a": 1})
    names = [f"a/bad_{i:02d}.png" for i in range(30)]
    for name in names:
        (tmp_path / name).write_bytes(b"nothing")
    folder = scan_images(tmp_path)
    with pytest.raises(ValueError, match=r"30 unreadable images: .* and 10 more"):
        without_bad(folder, find_bad_images(folder.root, folder.paths, 1), ImageConfig())
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"  {tmp_path / name}" for name in names]


def test_every_cut_of_every_format_is_found(tmp_path):
    for name in ("a.jpg", "b.png", "c.webp", "d.bmp", "e.gif", "f.tif"):
        formula_image(64, 64).save(tmp_path / name)
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert find_bad_images(tmp_path, sorted(whole), 2) == []
    for share in (0.2, 0.5, 0.8):
        for name, data in whole.items():
            (tmp_path / name).write_bytes(data[: int(len(data) * share)])
        assert [path for path, _ in find_bad_images(tmp_path, sorted(whole), 2)] == sorted(whole)


def test_a_class_of_bad_files_only(tmp_path):
    image_folder(tmp_path, {"a": 2, "b": 1}, size=8)
    (tmp_path / "b" / "000.png").write_bytes(b"nothing")
    folder = scan_images(tmp_path)
    bad = find_bad_images(folder.root, folder.paths, 1)
    with pytest.raises(ValueError, match="no readable image in b"):
        without_bad(folder, bad, ImageConfig(on_bad_image="skip"))
    kept = without_bad(folder, bad, ImageConfig(on_bad_image="skip", allow_empty_classes=True))
    assert kept.class_names == ("a", "b")
    assert kept.labels == (0, 0)


def test_folder_pixels(tmp_path):
    folder = scan_images(image_folder(tmp_path, {"a": 2, "b": 1}, size=48))
    pixels = folder_pixels(folder, 32)
    assert len(pixels) == 3
    expected = np.asarray(center_crop(Image.open(tmp_path / "b" / "000.png"), 32))
    assert np.array_equal(pixels.read(2).permute(1, 2, 0).numpy(), expected)


def test_digits():
    images, labels = load_digits()
    assert images.dtype == torch.uint8
    assert images.shape == (1797, 1, 8, 8)
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert sorted(images.unique().tolist()) == [int(v * 255 / 16 + 0.5) for v in range(17)]


def test_digits_without_sklearn(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    with pytest.raises(ValueError, match="quickstart"):
        load_digits()
