"""LatentVAE, and the sets that training reads: shards, digits, image folders."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import image_folder, tiny_vae
from torch.utils.data import DataLoader

from vcagen.config.job_options import EncodeConfig
from vcagen.config.options import DataConfig, ImageConfig, VaeConfig
from vcagen.data.encode import run
from vcagen.data.image_set import ImageSet
from vcagen.data.images import from_uint8, open_images, scan_images, to_uint8
from vcagen.data.latents import DataSpec, ImageDataset, LatentDataset, collate_whole, latent_std, open_dataset
from vcagen.data.vae import LatentVAE
from vcagen.processes.process import NonFiniteError

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def vae_path(tmp_path_factory):
    return tiny_vae(tmp_path_factory.mktemp("vae"), shift_factor=0.25)


@pytest.fixture(scope="module")
def other_vae(tmp_path_factory):
    return tiny_vae(tmp_path_factory.mktemp("other_vae"), seed=1, shift_factor=0.25)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), {"cat": 5, "dog": 4, "eel": 4})


@pytest.fixture(scope="module")
def shards(tmp_path_factory, vae_path, images):
    out = tmp_path_factory.mktemp("shards") / "latents"
    run(EncodeConfig(images=str(images), out=str(out), vae=vae_path, image_size=32, batch=3, shard_size=5))
    return out


def rewrite(shards, out, change=None, **arrays):
    """Copy shards to `out`, with shards.json changed by `change(record)` and arrays by functions of their names."""
    shutil.copytree(shards, out)
    record = json.loads((out / "shards.json").read_text())
    if change:
        change(record)
    (out / "shards.json").write_text(json.dumps(record))
    for name, function in arrays.items():
        values = np.load(out / f"{name}.npy")
        function(values)
        np.save(out / f"{name}.npy", values)
    return out


# the vae


def test_vae_equals_diffusers(vae_path):
    from diffusers import AutoencoderKL

    model = AutoencoderKL.from_pretrained(vae_path)
    vae = LatentVAE(vae_path)
    assert (vae.channels, vae.downsample, vae.moment_channels) == (4, 8, 8)
    assert vae.scale.factor == model.config.scaling_factor
    assert vae.scale.shift == 0.25
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, 3, 32, 24, generator=generator) * 2 - 1
    noise = torch.randn(2, 4, 4, 3, generator=generator)
    with torch.no_grad():
        posterior = model.encode(x).latent_dist
        latents = (posterior.mean + posterior.std * noise - 0.25) * model.config.scaling_factor
        decoded = model.decode(latents / model.config.scaling_factor + 0.25).sample
    moments = vae.moments(x)
    assert moments.shape == (2, 8, 4, 3)
    assert torch.equal(moments, posterior.parameters)
    assert torch.allclose(vae.sample(moments, noise), latents, atol=1e-6)
    assert torch.equal(vae.decode(latents), to_uint8(decoded))
    one_by_one = vae.decode(latents, batch=1).int() - to_uint8(decoded).int()
    assert one_by_one.abs().max() <= 1
    assert not moments.requires_grad


def test_vae_reads_only_the_config_until_it_is_used(vae_path, tmp_path):
    shutil.copy(f"{vae_path}/config.json", tmp_path)
    vae = LatentVAE(str(tmp_path))
    assert vae.channels == 4
    with pytest.raises(ValueError, match="cannot be loaded"):
        vae.moments(torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize("name", ["scaling_factor", "latent_channels", "block_out_channels"])
def test_a_config_that_is_no_vae_is_refused(vae_path, tmp_path, name):
    values = json.loads(Path(vae_path, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, name: None}))
    with pytest.raises(ValueError, match="this VAE cannot be loaded"):
        LatentVAE(str(tmp_path))


def test_vae_options(vae_path):
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    exact = LatentVAE(vae_path).moments(x)
    tiled = LatentVAE(vae_path, tiling=True).moments(x)
    assert torch.allclose(tiled, exact, atol=1e-5)
    half = LatentVAE(vae_path, precision="bfloat16")
    coarse = half.moments(x)
    assert coarse.dtype == torch.float32
    assert 0 < (coarse - exact).abs().max() < 0.1
    assert half.description() == LatentVAE(vae_path).description()


def test_the_vae_keeps_its_precision_whatever_is_set_around_it(vae_path):
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    vae = LatentVAE(vae_path)
    exact = vae.moments(x)
    images = vae.decode(exact[:, :4])
    seen = []

    def look(*_):
        cudnn = torch.backends.cudnn
        seen.append((cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, torch.get_float32_matmul_precision()))

    for module in (vae._model.encoder, vae._model.decoder):
        module.register_forward_hook(look)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True):
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(vae.moments(x), exact)
                assert torch.equal(vae.decode(exact[:, :4]), images)
            assert torch.backends.cudnn.allow_tf32
            assert torch.backends.cudnn.benchmark
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert seen == [(False, True, False, "highest")] * 2


def test_identity_vae():
    for channels in (1, 3):
        vae = LatentVAE("identity", channels=channels)
        pixels = torch.arange(256).reshape(1, 1, 16, 16).expand(2, channels, 16, 16).to(torch.uint8)
        moments = vae.moments(from_uint8(pixels))
        assert moments.shape[1] == vae.moment_channels == vae.channels == channels
        latents = vae.sample(moments, torch.randn(moments.shape))
        assert torch.equal(vae.decode(latents), pixels)
        assert LatentVAE.from_description(vae.description()).description() == vae.description()


def test_identity_takes_no_factor():
    with pytest.raises(ValueError, match="identity does not scale"):
        LatentVAE("identity", scaling_factor=0.5)


def test_description_rebuilds_without_the_vae(vae_path, other_vae, tmp_path):
    moved = shutil.copytree(vae_path, tmp_path / "moved")
    description = json.loads(json.dumps(LatentVAE(str(moved)).description()))
    shutil.rmtree(moved)
    vae = LatentVAE.from_description(description)
    assert (vae.channels, vae.downsample, vae.scale.shift) == (4, 8, 0.25)
    assert vae.description() == description
    latents = torch.zeros(1, 4, 2, 2)
    assert vae.sample(torch.zeros(1, 8, 2, 2), latents).shape == (1, 4, 2, 2)
    with pytest.raises(ValueError, match=r"moved: this VAE cannot be loaded .*--vae"):
        vae.decode(latents)
    expected = LatentVAE(vae_path).decode(latents)
    assert torch.equal(LatentVAE.from_description(description, path=vae_path).decode(latents), expected)
    with pytest.raises(ValueError, match="another VAE"):
        LatentVAE.from_description(description, path=other_vae).decode(latents)


def test_hash_does_not_depend_on_the_file_format(vae_path, tmp_path):
    from diffusers import AutoencoderKL

    AutoencoderKL.from_pretrained(vae_path).save_pretrained(tmp_path, safe_serialization=False)
    assert not list(tmp_path.glob("*.safetensors"))
    assert LatentVAE(str(tmp_path)).description()["sha256"] == LatentVAE(vae_path).description()["sha256"]


@pytest.mark.parametrize("name", ["no/such/folder", "someone/no-such-vae", ""])
def test_vae_that_cannot_be_had(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"^{name}: this VAE cannot be loaded .*vae.path") as error:
        LatentVAE(name)
    assert "\n" not in str(error.value)


def test_not_an_autoencoder(tmp_path):
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderDC"}')
    with pytest.raises(ValueError, match="an AutoencoderDC; an AutoencoderKL is needed"):
        LatentVAE(str(tmp_path))


def test_decode_refuses_non_finite_latents(vae_path):
    latents = torch.zeros(4, 4, 2, 2)
    latents[1, 0, 0, 0] = float("nan")
    latents[3, 2, 1, 1] = float("inf")
    for vae in (LatentVAE(vae_path), LatentVAE("identity", channels=4)):
        with pytest.raises(NonFiniteError, match="row 1, 3: not finite") as error:
            vae.decode(latents, batch=2)
        assert error.value.rows == [1, 3]


def test_decode_refuses_non_finite_images(vae_path):
    vae = LatentVAE(vae_path)
    vae.verify()
    torch.nn.init.constant_(vae._model.decoder.conv_out.bias, float("nan"))
    with pytest.raises(NonFiniteError, match="decoded image of batch row 0, 1"):
        vae.decode(torch.zeros(2, 4, 2, 2), batch=1)


# shards


def direct_moments(images, vae_path, mirror):
    """Moments of all images, one batch of the encoding job at a time."""
    pixels = open_images(str(images), ImageConfig(image_size=32))
    vae = LatentVAE(vae_path)
    x = from_uint8(torch.stack([pixels[i] for i in range(len(pixels))]))
    if mirror:
        x = x.flip(-1)
    return torch.cat([vae.moments(x[i : i + 1]) for i in range(len(x))])


def test_shards_equal_direct_encoding(shards, images, vae_path):
    dataset = LatentDataset(shards)
    assert len(dataset) == 13
    assert dataset.dtype == torch.float16
    assert dataset.labels.tolist() == [0] * 5 + [1] * 4 + [2] * 4
    assert dataset.names() == list(scan_images(images).paths)
    assert dataset.spec == DataSpec(4, 4, 4, 3, ("cat", "dog", "eel"), 32, LatentVAE(vae_path).description())
    for mirror in (False, True):
        stored, labels = dataset.__getitems__([(i, mirror) for i in range(13)])
        assert torch.equal(labels, dataset.labels)
        exact = direct_moments(images, vae_path, mirror)
        assert torch.allclose(stored.float(), exact, rtol=2**-10, atol=1e-5)
    plain, mirrored = dataset[6, False][0], dataset[6, True][0]
    assert not torch.allclose(plain.flip(-1).float(), mirrored.float(), atol=1e-3)


def test_items_and_batches_agree(shards):
    dataset = LatentDataset(shards)
    items = [(12, True), (0, False), (5, True), (4, False), (5, False)]
    batch, labels = dataset.__getitems__(items)
    for row, item in enumerate(items):
        moments, label = dataset[item]
        assert torch.equal(moments, batch[row])
        assert label == labels[row]
    with pytest.raises(IndexError):
        dataset[13, False]


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_workers(shards, workers):
    dataset = LatentDataset(shards)
    items = [(i * 5 % 13, i % 2 == 0) for i in range(26)]
    batches = [items[i : i + 4] for i in range(0, 26, 4)]
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=workers, collate_fn=collate_whole)
    for batch, (moments, labels) in zip(batches, loader, strict=True):
        expected = dataset.__getitems__(batch)
        assert torch.equal(moments, expected[0])
        assert torch.equal(labels, expected[1])


def test_spawned_worker_gets_paths_not_data(shards):
    dataset = LatentDataset(shards)
    packed = pickle.dumps(dataset)
    assert len(packed) < 10_000
    copy = pickle.loads(packed)
    assert torch.equal(copy[7, True][0], dataset[7, True][0])


def test_nothing_is_opened_per_item(shards, monkeypatch):
    dataset = LatentDataset(shards)

    def no(*args, **kwargs):
        raise AssertionError("opened a file")

    monkeypatch.setattr("builtins.open", no)
    monkeypatch.setattr("numpy.load", no)
    monkeypatch.setattr("pathlib.Path.open", no)
    monkeypatch.setattr("os.open", no)
    assert dataset[9, True][0].shape == (8, 4, 4)


def test_std_is_that_of_sampled_latents(shards, vae_path):
    dataset = LatentDataset(shards)
    vae = LatentVAE(vae_path)
    moments, _ = dataset.__getitems__([(i % 13, False) for i in range(13 * 40)])
    noise = torch.randn(len(moments), 4, 4, 4, generator=torch.Generator().manual_seed(0))
    assert vae.sample(moments, noise).std().item() == pytest.approx(dataset.latent_std, rel=0.02)
    assert latent_std(moments, vae.description()) == pytest.approx(dataset.latent_std)


def test_wrong_scale_is_refused(shards, tmp_path):
    def scale(factor):
        return lambda record: record["vae"].update(scaling_factor=record["vae"]["scaling_factor"] * factor)

    LatentDataset(rewrite(shards, tmp_path / "fine", scale(1.5)))
    for factor in (0.18215, 1 / 0.18215):
        with pytest.raises(ValueError, match=r"latents have std .* expected 0\.3 to 3\.0"):
            LatentDataset(rewrite(shards, tmp_path / str(factor), scale(factor)))


def test_scale_and_shift_can_be_given(shards, tmp_path, vae_path):
    before = LatentDataset(shards).spec.vae["scaling_factor"]
    wrong = rewrite(shards, tmp_path / "wrong", lambda record: record["vae"].update(scaling_factor=before / 9))
    config = VaeConfig(scaling_factor=before * 1.5, shift_factor=-0.5)
    dataset, vae = open_dataset(DataConfig(path=str(wrong)), config)
    assert (vae.scale.factor, vae.scale.shift) == (before * 1.5, -0.5)
    assert dataset.spec.vae == vae.description()
    made = LatentVAE(vae_path, scaling_factor=before * 1.5, shift_factor=-0.5)
    assert made.description() == {**vae.description(), "path": vae_path}
    latents = torch.randn(1, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    unscaled = LatentVAE(vae_path, scaling_factor=1.0, shift_factor=0.0)
    assert torch.equal(made.decode(latents), unscaled.decode(latents / (before * 1.5) - 0.5))


@pytest.mark.parametrize(("half", "words"), [(0, "the image"), (1, "the mirror image")])
def test_latents_that_are_not_finite_name_their_shard_and_item(shards, tmp_path, half, words):
    def spoil(moments):
        moments[2, half, 3, 1, 1] = np.nan

    broken = rewrite(shards, tmp_path / "nan", moments_00001=spoil)
    with pytest.raises(ValueError, match=rf"moments_00001\.npy: item 2: NaN or infinity in the latent of {words}"):
        LatentDataset(broken)


def test_incomplete_and_damaged_sets_are_refused(shards, tmp_path):
    copy = shutil.copytree(shards, tmp_path / "copy")
    second = copy / "moments_00001.npy"
    data = second.read_bytes()
    for size in (len(data) - 1, 100, 4, 0):
        second.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"moments_00001\.npy"):
            LatentDataset(copy)
    second.unlink()
    with pytest.raises(ValueError, match=r"moments_00001\.npy: No such file"):
        LatentDataset(copy)
    shutil.copy(copy / "moments_00002.npy", second)
    with pytest.raises(ValueError, match=r"shards\.json says"):
        LatentDataset(copy)
    for text in ("", "[]", '{"format": 2}', '{"format": 2, "vae": {"path": "x"}}'):
        (copy / "shards.json").write_text(text)
        with pytest.raises(ValueError, match=r"shards\.json: damaged"):
            LatentDataset(copy)
    (copy / "shards.json").unlink()
    with pytest.raises(ValueError, match="3 latent shards, but not all; the same encode command completes them"):
        LatentDataset(copy)
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match=r"vcagen encode"):
            LatentDataset(path)
    (tmp_path / "shard_00000.safetensors").touch()
    with pytest.raises(ValueError, match="latents of format 1, which commit a5c3076 of vcagen reads"):
        LatentDataset(tmp_path)


def test_shards_of_different_counts(shards, tmp_path):
    """Where bad images were skipped."""

    def fewer(record):
        record["shards"][1]["count"] = 2

    out = rewrite(shards, tmp_path / "fewer", fewer)
    whole, labels = LatentDataset(shards), np.load(out / "labels.npy")
    np.save(out / "moments_00001.npy", np.load(out / "moments_00001.npy")[:2])
    np.save(out / "labels.npy", np.concatenate([labels[:7], labels[10:]]))
    dataset = LatentDataset(out)
    assert len(dataset) == 10
    kept = [0, 4, 5, 6, 10, 12]
    for index, original in zip([0, 4, 5, 6, 7, 9], kept, strict=True):
        assert torch.equal(dataset[index, True][0], whole[original, True][0])
        assert dataset[index, False][1] == whole[original, False][1]


# what training opens


def test_open_shards_needs_no_vae(shards, monkeypatch):
    monkeypatch.setattr("vcagen.data.vae._load_vae", lambda vae: pytest.fail("the VAE was loaded"))
    dataset, vae = open_dataset(DataConfig(path=str(shards)), VaeConfig())
    moments, _ = dataset.__getitems__([(0, False), (12, True)])
    assert vae.sample(moments, torch.zeros(2, 4, 4, 4)).dtype == torch.float32
    assert not dataset.in_memory


def test_open_shards_with_another_vae_or_size(shards, vae_path, other_vae, tmp_path):
    config = DataConfig(path=str(shards))
    moved = shutil.copytree(vae_path, tmp_path / "moved")
    _, vae = open_dataset(config, VaeConfig(path=str(moved)))
    assert vae.path == str(moved)
    with pytest.raises(ValueError, match="another VAE"):
        open_dataset(config, VaeConfig(path=other_vae))
    with pytest.raises(ValueError, match=r"vae\.path: identity"):
        open_dataset(config, VaeConfig(path="identity"))
    with pytest.raises(ValueError, match=r"image_size: 64; .* was made with 32"):
        open_dataset(DataConfig(path=str(shards), images=ImageConfig(image_size=64)), VaeConfig())


def test_train_from_images(images, vae_path, shards):
    config = DataConfig(path=str(images), from_images=True, images=ImageConfig(image_size=32), num_workers=2)
    dataset, vae = open_dataset(config, VaeConfig(path=vae_path))
    assert isinstance(dataset, ImageDataset)
    assert not dataset.in_memory
    stored = LatentDataset(shards)
    assert dataset.spec == stored.spec
    assert torch.equal(dataset.labels, stored.labels)
    items = [(3, True), (12, False), (0, False)]
    ((pixels, labels),) = DataLoader(dataset, batch_sampler=[items], num_workers=1, collate_fn=collate_whole)
    assert pixels.dtype == torch.uint8
    expected, expected_labels = stored.__getitems__(items)
    assert torch.equal(labels, expected_labels)
    noise = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(vae.sample(pixels, noise), vae.sample(expected, noise), rtol=2**-9, atol=1e-3)
    with pytest.raises(ValueError, match="image_size: 30"):
        open_dataset(
            DataConfig(path=str(images), from_images=True, images=ImageConfig(image_size=30)), VaeConfig(path=vae_path)
        )


def test_a_built_in_set_of_ones_own(monkeypatch):
    def grey(argument):
        return ImageSet(["0", "1"], [0, 1], ["a", "b"], 3, 4, lambda i: torch.full((3, 4, 4), i).byte())

    monkeypatch.setitem(__import__("vcagen").DATASETS, "grey", grey)
    dataset, vae = open_dataset(DataConfig(path="grey:x"), VaeConfig())
    assert dataset.spec == DataSpec(3, 4, 4, 2, ("a", "b"), 4, LatentVAE("identity").description())
    assert vae.is_identity


def test_train_from_broken_images(tmp_path, vae_path):
    image_folder(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "b" / "bad.png").write_bytes(b"nothing")
    config = DataConfig(path=str(tmp_path), from_images=True, images=ImageConfig(image_size=32))
    with pytest.raises(ValueError, match=r"1 unreadable images: b/bad\.png"):
        open_dataset(config, VaeConfig(path=vae_path))
    skip = ImageConfig(image_size=32, on_bad_image="skip")
    dataset, _ = open_dataset(DataConfig(path=str(tmp_path), from_images=True, images=skip), VaeConfig(path=vae_path))
    assert dataset.labels.tolist() == [0, 0, 1, 1]
    expected = open_images(str(tmp_path), skip)
    assert torch.equal(dataset[3, False][0], expected[3])  # bad.png comes last
    (tmp_path / "a" / "000.png").write_bytes(b"nothing")
    (tmp_path / "a" / "001.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no readable image in a"):
        open_dataset(DataConfig(path=str(tmp_path), from_images=True, images=skip), VaeConfig(path=vae_path))
    kept = ImageConfig(image_size=32, on_bad_image="skip", allow_empty_classes=True)
    dataset, _ = open_dataset(DataConfig(path=str(tmp_path), from_images=True, images=kept), VaeConfig(path=vae_path))
    assert dataset.labels.tolist() == [1, 1]
    assert torch.equal(dataset[0, False][0], expected[2])


def test_digits():
    dataset, vae = open_dataset(DataConfig(path="digits"), VaeConfig())
    assert len(dataset) == 1797
    assert (dataset.spec.channels, dataset.spec.height, dataset.spec.num_classes) == (1, 8, 10)
    plain, label = dataset[5, False]
    assert plain.shape == (1, 8, 8)
    assert label == 5
    assert torch.equal(dataset[5, True][0], plain.flip(-1))
    assert dataset.in_memory
    assert torch.equal(vae.decode(vae.sample(plain[None], torch.zeros(1))), plain[None])
    with pytest.raises(ValueError, match=r"vae\.path"):
        open_dataset(DataConfig(path="digits"), VaeConfig(path="someone/vae"))
    with pytest.raises(ValueError, match="image_size: 256; digits has 8"):
        open_dataset(DataConfig(path="digits", images=ImageConfig(image_size=256)), VaeConfig())


def test_spec_round_trip_and_differences(shards):
    spec = LatentDataset(shards).spec
    copy = DataSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert copy == spec
    assert copy.differences(spec) == []
    moved = DataSpec.from_dict({**spec.to_dict(), "vae": {**spec.vae, "path": "elsewhere"}})
    assert moved.differences(spec) == []
    other = DataSpec.from_dict({**spec.to_dict(), "class_names": ["cat", "eel", "dog"], "image_size": 64})
    assert [line.split(":")[0] for line in other.differences(spec)] == ["class_names", "image_size"]


# cost


def anonymous_bytes():
    status = Path("/proc/self/status")
    if not status.exists() or "RssAnon" not in status.read_text():
        pytest.skip("the system does not tell anonymous memory")
    return 1024 * int(status.read_text().split("RssAnon:")[1].split()[0])


def test_memory_does_not_grow_with_the_set(tmp_path):
    moments = np.random.default_rng(0).standard_normal((1000, 2, 8, 32, 32)).astype(np.float16)
    for index in range(3):  # 94 MiB
        np.save(tmp_path / f"moments_0000{index}.npy", moments)
    np.save(tmp_path / "labels.npy", np.zeros(3000, dtype=np.int64))
    vae = {"path": "x", "sha256": "", "scaling_factor": 0.8, "shift_factor": 0.0, "channels": 4, "downsample": 8}
    record = {"format": 2, "vae": vae, "image_size": 256, "class_names": ["a"], "dtype": "float16"}
    (tmp_path / "shards.json").write_text(json.dumps({**record, "shards": [{"count": 1000}] * 3}))
    dataset = LatentDataset(tmp_path)
    dataset.__getitems__([(i, False) for i in range(100)])  # what a batch takes is not given back
    before = anonymous_bytes()
    for start in range(0, 3000, 100):
        for mirror in (False, True):
            dataset.__getitems__([(i, mirror) for i in range(start, start + 100)])
    assert anonymous_bytes() - before < 20 * 2**20
