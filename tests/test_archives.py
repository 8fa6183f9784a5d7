"""Images read where they lie: tar, zip and parquet give the shards of the unpacked folder, byte for byte."""

import dataclasses
import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import image_folder, tiny_vae, torchrun, user_error
from PIL import Image

from vcagen.config.job_options import EncodeConfig
from vcagen.config.options import DataConfig, ImageConfig, VaeConfig
from vcagen.data.encode import run
from vcagen.data.images import find_images, open_images, read_batches
from vcagen.data.latents import LatentDataset, open_dataset

torch.set_num_threads(1)
CLASSES = ("n01440764", "n02102040", "n03000684")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """PNG and JPEG, RGB, grey and CMYK."""
    root = image_folder(tmp_path_factory.mktemp("images"), dict(zip(CLASSES, (5, 4, 4), strict=True)))
    picture = Image.open(root / CLASSES[0] / "000.png")
    picture.save(root / CLASSES[1] / "a.JPEG", quality=95)
    picture.convert("L").save(root / CLASSES[1] / "b.JPEG")
    picture.convert("CMYK").save(root / CLASSES[2] / "c.jpg")
    return root


def files_of(folder):
    """(class, path) in the order of the listing."""
    return [(path.parent.name, path) for path in sorted(folder.glob("*/*"))]


def add(archive, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def tar_of_tars(folder, out):
    """As ILSVRC2012_img_train.tar, its classes and files in no order."""
    with tarfile.open(out, "w") as outer:
        for name in sorted(CLASSES, reverse=True):
            data = io.BytesIO()
            with tarfile.open(fileobj=data, mode="w") as inner:
                for path in sorted((folder / name).iterdir(), reverse=True):
                    add(inner, path.name, path.read_bytes())
                add(inner, "README.txt", b"not an image")
            add(outer, f"{name}.tar", data.getvalue())
    return str(out)


def tar_of_folders(folder, out):
    with tarfile.open(out, "w") as outer:
        outer.add(folder, "imagenet")
    return str(out)


def edm2_zip(folder, out, *, compression=zipfile.ZIP_STORED, change=None):
    labels = []
    with zipfile.ZipFile(out, "w", compression) as archive:
        for index, (name, path) in enumerate(files_of(folder)):
            member = f"{index // 1000:05d}/img{index:08d}{path.suffix}"
            archive.write(path, member)
            labels.append([member, CLASSES.index(name)])
        record = {"labels": labels}
        if change:
            change(record)
        archive.writestr("dataset.json", json.dumps(record))
    return str(out)


def parquet(folder, out, *, schema=True, columns=("image", "label"), names=CLASSES, row_group_size=4):
    """Two files of a split, as the Hub's: struct<bytes, path>, and features in the metadata of the schema."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    out.mkdir()
    files = files_of(folder)
    features = {columns[0]: {"_type": "Image"}, columns[1]: {"names": list(names), "_type": "ClassLabel"}}
    for part, rows in enumerate((files[:9], files[9:])):
        images = [{"bytes": path.read_bytes(), "path": path.name} for _, path in rows]
        table = pa.table({columns[0]: images, columns[1]: [CLASSES.index(name) for name, _ in rows]})
        if schema:
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        pq.write_table(table, out / f"train-{part:05d}-of-00002.parquet", row_group_size=row_group_size)
    return str(out)


SOURCES = {
    "tar of tars": lambda folder, out: tar_of_tars(folder, out / "ILSVRC2012_img_train.tar"),
    "tar of folders": lambda folder, out: tar_of_folders(folder, out / "images.tar"),
    "zip": lambda folder, out: edm2_zip(folder, out / "images.zip"),
    "deflated zip": lambda folder, out: edm2_zip(folder, out / "images.zip", compression=zipfile.ZIP_DEFLATED),
    "parquet": lambda folder, out: parquet(folder, out / "data"),
    "parquet pattern": lambda folder, out: f"{parquet(folder, out / 'data')}/train-*.parquet",
}


@pytest.mark.parametrize("kind", SOURCES)
def test_names_labels_and_pixels_are_those_of_the_folder(folder, tmp_path, kind):
    config = ImageConfig(image_size=16)
    expected, found = open_images(str(folder), config), open_images(SOURCES[kind](folder, tmp_path), config)
    assert list(found.labels) == list(expected.labels)
    if "zip" in kind:
        assert found.class_names == ["0", "1", "2"]
    else:
        assert list(found.class_names) == list(CLASSES)
    if "tar" in kind:
        assert list(found.names) == list(expected.names)
    for workers in (0, 2):
        batches = [range(i, min(i + 3, len(expected))) for i in range(0, len(expected), 3)]
        for (ours, bad), (theirs, _) in zip(read_batches(found, batches, workers),
                                            read_batches(expected, batches, 0), strict=True):  # fmt: skip
            assert not bad
            assert torch.equal(ours, theirs)
    for index in (12, 0, 7, 0):
        assert torch.equal(pickle.loads(pickle.dumps(found))[index], expected[index])


def contents(out):
    """Every byte of moments and labels."""
    return {path.name: path.read_bytes() for path in sorted(Path(out).glob("*.npy"))}


@pytest.fixture(scope="module")
def encoded(folder, tmp_path_factory):
    """The options, and the moments and labels that the folder gives."""
    out = tmp_path_factory.mktemp("encoded")
    config = EncodeConfig(
        images=str(folder), out=str(out / "latents"), vae=tiny_vae(out / "vae"), image_size=16, batch=3, shard_size=5,
        num_workers=0,
    )  # fmt: skip
    run(config)
    return config, contents(config.out)


@pytest.mark.parametrize("kind", ["tar of tars", "zip", "parquet"])
def test_shards_are_those_of_the_folder_and_resume(folder, encoded, tmp_path, kind):
    config, expected = encoded
    config = dataclasses.replace(config, images=SOURCES[kind](folder, tmp_path), out=str(tmp_path / "latents"))
    run(config)
    assert contents(config.out) == expected
    Path(config.out, "moments_00001.npy").unlink()
    run(config)
    assert contents(config.out) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tar of tars", "parquet"])
def test_two_processes_and_a_file_that_is_cut(folder, encoded, tmp_path, kind):
    config, expected = encoded
    source = SOURCES[kind](folder, tmp_path)
    command = ["-m", "vcagen", "encode", source, "--out", tmp_path / "latents", "--vae", config.vae]
    command += ["--image_size", 16, "--batch", 3, "--shard_size", 5, "--num_workers", 2]
    torchrun(2, *command)
    assert contents(tmp_path / "latents") == expected
    if kind == "tar of tars":
        cut(source, 20_000)
        line = user_error(*command[:4], "--out", tmp_path / "other", *command[6:])
        assert source in line
        assert not (tmp_path / "other").exists()


def test_training_and_references_read_them_too(folder, tmp_path):
    from vcagen.evaluation.image_source import open_images as open_source

    archive = tar_of_tars(folder, tmp_path / "images.tar")
    config = DataConfig(path=archive, from_images=True, images=ImageConfig(image_size=16), num_workers=0)
    dataset, _ = open_dataset(config, VaeConfig(path="identity"))
    expected = open_images(str(folder), ImageConfig(image_size=16))
    assert torch.equal(dataset[6, False][0], expected[6])
    theirs, ours = (open_source(path, image_size=16, num_workers=0) for path in (str(folder), archive))
    assert theirs.shape == ours.shape == (3, 16, 16)
    assert all(map(torch.equal, theirs.read([range(4), range(4, 8)]), ours.read([range(4), range(4, 8)])))


def test_one_channel(tmp_path):
    pixels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "0.png")
    Image.fromarray(np.stack([pixels] * 3, axis=-1)).save(tmp_path / "a" / "1.png")
    Image.fromarray(pixels.astype(np.uint16) * 257).save(tmp_path / "a" / "2.png")
    Image.new("RGB", (16, 16), (200, 100, 50)).save(tmp_path / "a" / "3.png")
    grey = ImageConfig(image_size=16, grayscale=True)
    images = open_images(str(tmp_path), grey)
    for index in range(3):
        assert images[index].equal(torch.from_numpy(pixels)[None])
    assert images[3].unique().tolist() == [round(0.299 * 200 + 0.587 * 100 + 0.114 * 50)]
    one = tiny_vae(tmp_path / "vae", image_channels=1)
    config = {"vae": one, "image_size": 16, "num_workers": 0, "grayscale": True}
    run(EncodeConfig(images=str(tmp_path / "a"), out=str(tmp_path / "latents"), **config))
    dataset, vae = open_dataset(DataConfig(path=str(tmp_path / "latents")), VaeConfig())
    assert vae.decode(torch.zeros(2, 4, 2, 2)).shape == (2, 1, 16, 16)
    assert LatentDataset(tmp_path / "latents").spec == dataset.spec
    run(EncodeConfig(images=str(tmp_path / "a"), out=str(tmp_path / "pixels"), **{**config, "vae": "identity"}))
    assert LatentDataset(tmp_path / "pixels")[1, False][0].shape == (1, 16, 16)
    for given, path, words in (
        (ImageConfig(image_size=16), one, "takes images of 1 channels, not 3"),
        (grey, tiny_vae(tmp_path / "rgb"), "takes images of 3 channels, not 1"),
    ):
        data = DataConfig(path=str(tmp_path / "a"), from_images=True, images=given, num_workers=0)
        with pytest.raises(ValueError, match=words):
            open_dataset(data, VaeConfig(path=path))


# bad input


def cut(path, size):
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: size if size > 0 else len(data) + size])
    return path


@pytest.mark.parametrize("kind", ["tar of tars", "tar of folders", "zip", "parquet"])
def test_a_file_that_is_cut_anywhere_is_named(folder, tmp_path, kind):
    path = Path(SOURCES[kind](folder, tmp_path))
    file = max(path.glob("*")) if path.is_dir() else path
    data = file.read_bytes()
    end = len(data.rstrip(b"\0")) if "tar" in kind else len(data)  # tars are padded
    places = {*range(512, end, end // 40), *range(1024, end, 10240), 1, 4, 300, end - 1, end // 512 * 512}
    for size in sorted(places):
        file.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"damaged|cut short|no images|unexpected end|not a folder"):
            find_images(str(path))
    file.write_bytes(data)
    assert len(find_images(str(path)).names) == 16


def test_an_inner_tar_that_is_cut_is_named(folder, tmp_path):
    inner = tmp_path / "n01440764.tar"
    with tarfile.open(inner, "w") as archive:
        for path in sorted((folder / CLASSES[0]).iterdir()):
            add(archive, path.name, path.read_bytes())
    whole = inner.read_bytes()
    header = 512 + -(-len((folder / CLASSES[0] / "000.png").read_bytes()) // 512) * 512  # of the second member
    damaged = whole[:header] + b"\xff" * 512 + whole[header + 512 :]
    for data, words in ((whole[:3000], "cut short|unexpected end"), (whole[:header], "no end of archive"),
                        (damaged, "no end of archive")):  # fmt: skip
        with tarfile.open(tmp_path / "all.tar", "w") as outer:
            add(outer, inner.name, data)
        with pytest.raises(ValueError, match=rf"all\.tar.*({words})"):
            find_images(str(tmp_path / "all.tar"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record.pop("labels"), r"damaged \(KeyError"),
        (lambda record: record["labels"].pop(3), "no label 0, 1, ... for 00000/img00000003.png"),
        (lambda record: record["labels"].append(["00000/img00000099.png", 0]), "but no image: 00000/img00000099.png"),
        (lambda record: record["labels"].append(["00000/img-mean-std-latents-00000099.npy", 0]), "holds latents"),
        (lambda record: record["labels"][3].__setitem__(1, "cat"), "no label 0, 1, ... for 00000/img00000003.png"),
        (lambda record: record["labels"][3].__setitem__(1, -1), "no label 0, 1, ... for 00000/img00000003.png"),
        (lambda record: record["labels"][3].__setitem__(1, 4), "3: class without images"),
    ],
)
def test_a_zip_whose_labels_do_not_fit(folder, tmp_path, change, words):
    path = edm2_zip(folder, tmp_path / "images.zip", change=change)
    with pytest.raises(ValueError, match=rf"images\.zip: .*{words}"):
        find_images(path)


def test_a_zip_without_classes_or_labels(folder, tmp_path):
    path = edm2_zip(folder, tmp_path / "none.zip", change=lambda record: record.update(labels=None))
    assert set(find_images(path).labels) == {0}
    with zipfile.ZipFile(tmp_path / "plain.zip", "w") as archive:
        archive.writestr("a/0.png", b"")
    with pytest.raises(ValueError, match=r"plain\.zip: no dataset\.json in it"):
        find_images(str(tmp_path / "plain.zip"))


def test_a_byte_that_is_wrong_is_a_bad_image(folder, tmp_path):
    path = Path(edm2_zip(folder, tmp_path / "images.zip"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    images = open_images(str(path), ImageConfig(image_size=16))
    ((_, bad),) = read_batches(images, [range(16)], 0)
    assert len(bad) == 1
    assert "damaged at byte" in next(iter(bad.values()))


def test_parquet_as_people_have_it(folder, tmp_path):
    named = find_images(parquet(folder, tmp_path / "named", columns=("img", "fine_label")))
    plain = find_images(parquet(folder, tmp_path / "plain", schema=False))
    assert named.class_names == list(CLASSES)
    assert plain.class_names == ["0", "1", "2"]
    assert named.labels == plain.labels
    part = find_images(str(tmp_path / "plain" / "train-00001-of-00002.parquet"), allow_empty_classes=True)
    assert part.names == [f"train-00001-of-00002.parquet/{row}" for row in range(7)]


def test_parquet_that_is_refused(folder, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    def refused(path, words):
        with pytest.raises(ValueError, match=words) as error:
            find_images(str(path))
        assert "\n" not in str(error.value)

    refused(parquet(folder, tmp_path / "unlabelled", schema=False, columns=("image", "caption")),
            r"train-00000-of-00002\.parquet: no column label among image, caption")  # fmt: skip
    refused(parquet(folder, tmp_path / "two", names=CLASSES[:2]), r"row \d+: label 2; needs 0, 1, ...")
    data = Path(parquet(folder, tmp_path / "data"))
    first = data / "train-00000-of-00002.parquet"
    pq.write_table(pa.table({"image": [b""], "other": [0]}), data / "train-00001-of-00002.parquet")
    refused(data, r"train-00001-of-00002\.parquet: no column label; it has image, other")
    (data / "train-00001-of-00002.parquet").rename(data / "test-00000-of-00001.parquet")
    refused(data, r"several sets \(test, train\); give one")
    (data / "test-00000-of-00001.parquet").unlink()
    refused(data, "1 of 2 parquet files; .* takes those there are")
    assert len(find_images(f"{data}/*.parquet", allow_empty_classes=True).names) == 9
    pq.write_table(pa.table({"image": [{"bytes": None, "path": "x.jpg"}], "label": [0]}), first)
    images = open_images(str(first), ImageConfig(image_size=16))
    ((_, bad),) = read_batches(images, [range(1)], 0)
    assert "no bytes of an image" in bad[0]


def test_images_of_tars_lie_side_by_side(tmp_path, capsys):
    with tarfile.open(tmp_path / "deep.tar", "w") as archive:
        add(archive, "train/a/0.png", b"x")
        add(archive, "val/a/0.png", b"x")
    with pytest.raises(ValueError, match="train/a, val/a; class folders or tars must lie side by side"):
        find_images(str(tmp_path / "deep.tar"))
    with tarfile.open(tmp_path / "flat.tar", "w") as archive:
        add(archive, "./1.png", b"x")
        add(archive, "0.png", b"x")
        add(archive, ".hidden.png", b"x")
        add(archive, "2.heic", b"x")
        add(archive, "notes.txt", b"x")
    flat = find_images(str(tmp_path / "flat.tar"))
    assert flat.left_out == [".hidden.png", "2.heic"]
    assert "left out: .hidden.png, 2.heic" in capsys.readouterr().err
    assert (flat.names, flat.class_names) == (["0.png", "1.png"], ["image"])
    with tarfile.open(tmp_path / "none.tar", "w") as archive:
        add(archive, "notes.txt", b"x")
    with pytest.raises(ValueError, match=r"none\.tar: no images"):
        find_images(str(tmp_path / "none.tar"))
    (tmp_path / "text.parquet2").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="no images; a folder, an uncompressed tar, a zip or parquet"):
        find_images(str(tmp_path / "text.parquet2"))
