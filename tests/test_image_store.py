"""The store of sampled images: each once, by index, whatever happens in between."""

import io
import resource
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from vcagen.sampling.image_store import ImageStore

SHAPE = (3, 8, 8)


def a_store(folder, num_images=10, batch=4, settings=None, image_shape=SHAPE, **options):
    settings = {"seed": 0, "cfg_scale": 1.0} if settings is None else settings
    return ImageStore(folder, num_images, batch, image_shape=image_shape, settings=settings, **options)


def pixels(indices, shape=SHAPE):
    """Random images, each from its index."""
    images = [np.random.default_rng(i).integers(0, 256, shape, dtype=np.uint8) for i in indices]
    return torch.from_numpy(np.stack(images))


def fill(store, chunks=None):
    """Write the missing chunks, or some; returns how many."""
    store.prepare()
    chunks = store.missing() if chunks is None else chunks
    for chunk in chunks:
        store.write(store.indices(chunk), pixels(store.indices(chunk), store.image_shape))
    store.flush()
    return len(chunks)


def files(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "images").iterdir())}


@pytest.mark.parametrize(("num_images", "batch"), [(50_000, 64), (10, 4), (2, 7), (10, 7), (8, 4)])
def test_chunks_hold_every_index_once_and_are_always_whole(tmp_path, num_images, batch):
    store = a_store(tmp_path, num_images, batch)
    store.prepare()
    chunks = [store.indices(chunk) for chunk in store.missing()]
    assert {len(chunk) for chunk in chunks} == {batch}
    covered = [i for chunk in chunks for i in chunk]
    assert covered == list(range(len(covered)))
    assert num_images <= len(covered) < num_images + batch


@pytest.mark.parametrize("batch", [1, 4, 7, 64])
def test_files_do_not_depend_on_the_batch(tmp_path, batch):
    fill(a_store(tmp_path / "a", batch=10))
    fill(a_store(tmp_path / "b", batch=batch))
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert list(files(tmp_path / "b")) == [f"{i:06d}.png" for i in range(10)]
    assert torch.equal(torch.stack([a_store(tmp_path / "b").read(i) for i in range(10)]), pixels(range(10)))


def test_resume_makes_only_what_is_missing(tmp_path):
    fill(a_store(tmp_path / "a"))
    fill(a_store(tmp_path / "b"), [0, 1])
    (tmp_path / "b" / "images" / "000002.png").unlink()
    cut = tmp_path / "b" / "images" / "000005.png"
    cut.write_bytes(cut.read_bytes()[:50])
    (tmp_path / "b" / "images" / ".000009.png.123.tmp").write_bytes(b"half")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "b" / "images").iterdir() if path != cut}
    again = a_store(tmp_path / "b")
    again.prepare()
    assert again.missing() == [0, 1, 2]
    assert fill(again) == 3
    assert files(tmp_path / "a") == files(tmp_path / "b")
    changed = [path.name for path, time in kept.items() if path.exists() and path.stat().st_mtime_ns != time]
    assert changed == []
    assert a_store(tmp_path / "b").missing() == []


def test_a_run_killed_while_it_is_prepared_is_known_again(tmp_path):
    (tmp_path / ".manifest.json.7.tmp").write_text("{")
    store = a_store(tmp_path)
    store.prepare()
    assert store.missing() == [0, 1, 2]


@pytest.mark.parametrize("content", [b"", b"\x89PNG", b"garbage of some length beyond the end marker"])
def test_damaged_pngs_are_missing(tmp_path, content):
    store = a_store(tmp_path)
    fill(store)
    (tmp_path / "images" / "000006.png").write_bytes(content)
    assert store.missing() == [1]


def test_other_settings_are_refused_by_field(tmp_path):
    fill(a_store(tmp_path))
    for field, options in {
        "num_images": {"num_images": 11}, "batch": {"batch": 5},
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{field}: .* was made with"):
            a_store(tmp_path, **options).prepare()
    other = a_store(tmp_path, settings={"seed": 0, "cfg_scale": 1.5})
    with pytest.raises(ValueError, match=r"^cfg_scale: .* was made with 1\.0, now 1\.5"):
        other.prepare()
    less = a_store(tmp_path, settings={"seed": 0})
    with pytest.raises(ValueError, match=r"^cfg_scale: .* was made with 1\.0, now None"):
        less.prepare()


def test_foreign_files_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not empty and has no manifest\.json"):
        a_store(tmp_path).prepare()
    fill(a_store(tmp_path / "a"))
    for name in "000010.png", "1.png", "cat.jpg":
        (tmp_path / "a" / "images" / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"3 files that are not of this run: 000010\.png, 1\.png, cat\.jpg"):
        a_store(tmp_path / "a").prepare()


def test_facts_do_not_tell_runs_apart(tmp_path):
    fill(a_store(tmp_path, facts={"sampler": {"world_size": 2}}), [0])
    store = a_store(tmp_path, facts={"sampler": {"world_size": 1}})
    store.prepare()
    assert store.missing() == [1, 2]


def test_a_folder_of_an_earlier_version_is_refused(tmp_path):
    fill(a_store(tmp_path))
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 1'))
    with pytest.raises(ValueError, match=r"manifest\.json: format 1, which commit a5c3076"):
        a_store(tmp_path).prepare()


def test_npz_is_what_adm_reads(tmp_path):
    store = a_store(tmp_path, npz=True)
    fill(store)
    store.finish()
    with np.load(tmp_path / "samples.npz", allow_pickle=False) as archive:
        assert archive.files == ["arr_0"]
        rows = archive["arr_0"]
    expected = [np.asarray(Image.open(io.BytesIO(data))) for data in files(tmp_path).values()]
    assert rows.dtype == np.uint8
    assert (rows == np.stack(expected)).all()
    with zipfile.ZipFile(tmp_path / "samples.npz") as archive, archive.open("arr_0.npy") as member:
        assert archive.testzip() is None
        assert np.lib.format.read_magic(member) == (1, 0)
        assert np.lib.format.read_array_header_1_0(member) == ((10, 8, 8, 3), False, np.uint8)


def test_npz_can_be_asked_for_later(tmp_path):
    first = a_store(tmp_path)
    fill(first)
    first.finish()
    assert not (tmp_path / "samples.npz").exists()
    later = a_store(tmp_path, npz=True)
    assert fill(later) == 0
    later.finish()
    assert np.load(tmp_path / "samples.npz")["arr_0"].shape == (10, 8, 8, 3)


def test_preview_and_grey_images(tmp_path):
    store = a_store(tmp_path, image_shape=(1, 8, 8))
    fill(store)
    store.finish()
    assert Image.open(tmp_path / "images" / "000000.png").mode == "L"
    preview = np.asarray(Image.open(tmp_path / "preview.png"))
    assert preview.shape == (102, 102)  # 3 x 3 images of 8 x 8, enlarged 4 times, in frames
    assert (preview[35:67:4, 69:101:4] == store.read(5)[0].numpy()).all()


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path):
    store = a_store(tmp_path)
    fill(store, [0])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            fill(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(files(tmp_path)) == ["000000.png", "000001.png", "000002.png", "000003.png"]
    fill(a_store(tmp_path))
    fill(a_store(tmp_path / "b"))
    assert files(tmp_path) == files(tmp_path / "b")
