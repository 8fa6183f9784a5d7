"""Image folders, colour modes, the centre crop, the rounding rule, the digits."""

import io
import pickle
import shutil
import struct
import zlib

import numpy as np
import pytest
import torch
from helpers import image_folder, reference
from PIL import Image

from vcagen.config.options import ImageConfig
from vcagen.data.images import (
    DATASETS,
    ImageSet,
    center_crop,
    find_images,
    from_uint8,
    is_dataset,
    open_dataset_images,
    open_images,
    read_batches,
    read_image,
    refuse_bad,
    refuse_lost_classes,
    scan_images,
    to_pixels,
    to_uint8,
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
    pixels = to_pixels(read_image(path), 8)
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
    assert to_pixels(read_image(tmp_path / "turned.png"), 8)[0, :, 0].tolist() == [0] * 8


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


def listed(folder, **options):
    """(classes, number of images, what is left out)"""
    found = scan_images(folder, **options)
    return found.class_names, len(found.paths), found.left_out


def test_images_beside_folders(tmp_path):
    image_folder(tmp_path, {"": 10, "old": 3, "notes": 0}, size=8)
    assert listed(tmp_path, flat=True) == (("image",), 10, ("old/",))
    with pytest.raises(ValueError, match=r": 10 images lie beside the class folders \(old\)"):
        scan_images(tmp_path)
    shutil.rmtree(tmp_path / "old")
    for flat in (True, False):  # a folder without images hides nothing
        assert listed(tmp_path, flat=flat) == (("image",), 10, ())


@pytest.mark.parametrize(
    ("extra", "left_out"),
    [(".hidden/x.png", ".hidden/"), ("_old/deep/x.png", "_old/"), ("a/._mac.png", "a/._mac.png"),
     ("a/x.avif", "a/x.avif"),
     ("a/x.JFIF", "a/x.JFIF"), ("a/.thumbs/x.png", "a/.thumbs/"), ("a/photo", "a/photo"), ("a/notes.txt", None),
     (".git/config", None), ("README.md", None)],
)  # fmt: skip
def test_what_a_listing_leaves_out_is_named(tmp_path, extra, left_out, capsys):
    image_folder(tmp_path, {"a": 2, "b": 1}, size=8)
    (tmp_path / extra).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / extra).write_bytes(b"")
    assert listed(tmp_path) == (("a", "b"), 3, () if left_out is None else (left_out,))
    find_images(str(tmp_path))
    note = capsys.readouterr().err
    assert note == ("" if left_out is None else f"note: {tmp_path}; left out: {left_out}\n")


def test_images_far_below_a_class_folder_are_found(tmp_path):
    image_folder(tmp_path, {"a": 2, "a/b/c/d": 1}, size=8)
    with pytest.raises(ValueError, match="a/b: images two folders down"):
        scan_images(tmp_path)


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


def read_all(images, num_workers=0):
    """All images of a set in batches of three, and those that cannot be read."""
    batches = [range(i, min(i + 3, len(images))) for i in range(0, len(images), 3)]
    good, bad = zip(*read_batches(images, batches, num_workers), strict=True)
    return torch.cat(good), {index: reason for found in bad for index, reason in found.items()}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_files_come_beside_the_others(tmp_path, num_workers):
    images = open_images(str(broken_files(tmp_path)), ImageConfig(image_size=16))
    pixels, bad = read_all(images, num_workers)
    assert torch.equal(pixels, torch.stack([images[index] for index in range(7)]))
    assert [images.names[index] for index in bad] == ["b/cut.jpg", "b/empty.png"]
    assert "truncated" in bad[7].lower()
    with pytest.raises(ValueError, match=r"HERE: 2 unreadable images: b/cut\.jpg, b/empty\.png"):
        refuse_bad(images, bad, "HERE")
    with pytest.raises(ValueError, match=r"b/cut\.jpg: unreadable"):
        images[7]


def test_all_bad_files_are_listed_before_the_error(tmp_path, capsys):
    image_folder(tmp_path, {"a": 1})
    names = [f"a/bad_{i:02d}.png" for i in range(30)]
    for name in names:
        (tmp_path / name).write_bytes(b"nothing")
    images = open_images(str(tmp_path), ImageConfig(image_size=16))
    with pytest.raises(ValueError, match=r"30 unreadable images: .* and 10 more"):
        refuse_bad(images, read_all(images)[1], tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"  {tmp_path / name}" for name in names]


def test_every_cut_of_every_format_is_found(tmp_path):
    for name in ("a.jpg", "b.png", "c.webp", "d.bmp", "e.gif", "f.tif"):
        formula_image(64, 64).save(tmp_path / name)
    images = open_images(str(tmp_path), ImageConfig(image_size=16))
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert not read_all(images)[1]
    for share in (0.2, 0.5, 0.8):
        for name, data in whole.items():
            (tmp_path / name).write_bytes(data[: int(len(data) * share)])
        pixels, bad = read_all(images)
        assert pixels.shape == (0, 3, 16, 16)
        assert list(bad) == list(range(6))


def test_a_class_of_bad_files_only(tmp_path):
    images = open_images(str(image_folder(tmp_path, {"a": 2, "b": 1}, size=8)), ImageConfig(image_size=8))
    refuse_lost_classes(images, [0, 2], "HERE")
    with pytest.raises(ValueError, match="HERE: no readable image in b"):
        refuse_lost_classes(images, [0, 1], "HERE")


def test_images_of_a_folder(tmp_path):
    images = open_images(str(image_folder(tmp_path, {"a": 2, "b": 1}, size=48)), ImageConfig(image_size=32))
    assert len(images) == 3
    assert (images.crop, images.in_memory) == ("adm-center", False)
    expected = np.asarray(center_crop(Image.open(tmp_path / "b" / "000.png"), 32))
    assert np.array_equal(images[2].permute(1, 2, 0).numpy(), expected)
    assert torch.equal(pickle.loads(pickle.dumps(images))[2], images[2])  # as a spawned worker gets it


def test_digits():
    images = open_dataset_images("digits")
    pixels = torch.stack([images[index] for index in range(len(images))])
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (1797, 1, 8, 8)
    assert (images.channels, images.image_size, images.crop) == (1, 8, "none")
    assert np.bincount(images.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert sorted(pixels.unique().tolist()) == [int(v * 255 / 16 + 0.5) for v in range(17)]
    with pytest.raises(ValueError, match="image_size: 256; digits has 8"):
        open_images("digits", ImageConfig(image_size=256))
    with pytest.raises(ValueError, match="digits:8; "):
        open_dataset_images("digits:8")


def test_digits_without_sklearn(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match="quickstart"):
        open_dataset_images("digits")


def test_a_set_of_ones_own(monkeypatch):
    def grey(argument):
        levels = [int(level) for level in argument.split("-")]
        return ImageSet(levels, [0] * len(levels), ["grey"], 3, 4, lambda i: torch.full((3, 4, 4), levels[i]).byte())

    monkeypatch.setitem(DATASETS, "grey", grey)
    assert is_dataset("grey:7-8")
    assert not is_dataset("greyish")
    assert not is_dataset("folder/grey")
    pixels, bad = read_all(open_images("grey:7-8-9-200", ImageConfig()))
    assert pixels[:, 0, 0, 0].tolist() == [7, 8, 9, 200]
    assert not bad


def png_of_16_bits(values, colour):
    """A PNG of values (H, W, channels); its colour type is 0 grey, 2 RGB, 4 grey and alpha, or 6 RGBA."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, colour, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_16_bits_are_rounded_in_every_mode(tmp_path, colour, channels):
    values = np.random.default_rng(0).integers(0, 65536, (9, 7, channels))
    values[0, 0], values[0, 1] = 65535, 127  # white, and what truncation would hide
    (tmp_path / "x.png").write_bytes(png_of_16_bits(values, colour))
    expected = np.floor(values[..., : 3 if channels > 2 else 1] * 255 / 65535 + 0.5)
    for file in (None, io.BytesIO((tmp_path / "x.png").read_bytes())):
        found = np.asarray(read_image(tmp_path / "x.png", file))
        assert (found == np.broadcast_to(expected, (9, 7, 3))).all()


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("order", "<>")
def test_16_bits_of_tiff_are_rounded_too(tmp_path, compression, order):
    tifffile = pytest.importorskip("tifffile")
    values = np.random.default_rng(0).integers(0, 65536, (9, 7, 3)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "x.tif", values, compression=compression, byteorder=order, photometric="rgb")
    assert (np.asarray(read_image(tmp_path / "x.tif")) == np.floor(values / 257 + 0.5)).all()
