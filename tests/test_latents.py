"""LatentVAE, and the sets that training reads: shards, digits, image folders."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from helpers import image_folder, tiny_vae
from torch.utils.data import DataLoader

from vcagen.bench.data import _write_latents, main
from vcagen.config.job_options import EncodeConfig
from vcagen.config.options import DataConfig, ImageConfig, VaeConfig
from vcagen.data.encode import encode
from vcagen.data.images import folder_pixels, from_uint8, scan_images, to_uint8
from vcagen.data.latents import DataSpec, ImageDataset, LatentDataset, keep, latent_std, open_dataset
from vcagen.data.vae import LatentVAE, NonFiniteError

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
    encode(encode_config(images, out, vae_path))
    return out


def encode_config(images, out, vae_path, **options):
    return EncodeConfig(
        images=str(images), out=str(out), vae=vae_path, image_size=32,
        **{"batch": 3, "shard_size": 5, **options},
    )  # fmt: skip


def rewrite(shards, out, change, tensors=None):
    """Copy shards to `out` with metadata changed by `change(metadata)` and tensors by `tensors(tensors)`."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    out.mkdir()
    for file in shards.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            metadata = json.loads(opened.metadata()["vcagen"])
        change(metadata)
        values = load_file(file)
        if tensors:
            tensors(values)
        save_file(values, out / file.name, metadata={"vcagen": json.dumps(metadata, sort_keys=True)})
    return out


# the vae


def test_vae_equals_diffusers(vae_path):
    from diffusers import AutoencoderKL

    model = AutoencoderKL.from_pretrained(vae_path)
    vae = LatentVAE(vae_path)
    assert (vae.channels, vae.downsample, vae.moment_channels) == (4, 8, 8)
    assert vae.scaling_factor == model.config.scaling_factor
    assert vae.shift_factor == 0.25
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
    with pytest.raises(ValueError, match=r"config\.json is not that of an AutoencoderKL"):
        LatentVAE(str(tmp_path))


def test_vae_options(vae_path):
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    exact = LatentVAE(vae_path).moments(x)
    sliced = LatentVAE(vae_path, slicing=True, tiling=True).moments(x)
    assert torch.allclose(sliced, exact, atol=1e-5)
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


def test_description_rebuilds_without_the_vae(vae_path, other_vae, tmp_path):
    moved = shutil.copytree(vae_path, tmp_path / "moved")
    description = json.loads(json.dumps(LatentVAE(str(moved)).description()))
    shutil.rmtree(moved)
    vae = LatentVAE.from_description(description)
    assert (vae.channels, vae.downsample, vae.shift_factor) == (4, 8, 0.25)
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
    with pytest.raises(ValueError, match="a AutoencoderDC of 3 channels"):
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
    pixels = folder_pixels(scan_images(images), 32)
    vae = LatentVAE(vae_path)
    x = from_uint8(torch.stack([pixels.read(i) for i in range(len(pixels))]))
    if mirror:
        x = x.flip(-1)
    return torch.cat([vae.moments(x[i : i + 1]) for i in range(len(x))])


def test_shards_equal_direct_encoding(shards, images, vae_path):
    dataset = LatentDataset(shards)
    assert len(dataset) == 13
    assert dataset.dtype == torch.float16
    assert dataset.labels.tolist() == [0] * 5 + [1] * 4 + [2] * 4
    assert dataset.names() == list(scan_images(images).paths)
    assert dataset.spec == DataSpec(
        4, 4, 4, 3, ("cat", "dog", "eel"), 32, LatentVAE(vae_path).description()
    )  # fmt: skip
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
    assert torch.equal(dataset[3][0], dataset[3, False][0])
    for index in (13, -1):
        with pytest.raises(IndexError):
            dataset[index]


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_workers(shards, workers):
    dataset = LatentDataset(shards)
    items = [(i * 5 % 13, i % 2 == 0) for i in range(26)]
    batches = [items[i : i + 4] for i in range(0, 26, 4)]
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=workers, collate_fn=keep)
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
        return lambda metadata: metadata["vae"].update(scaling_factor=metadata["vae"]["scaling_factor"] * factor)

    LatentDataset(rewrite(shards, tmp_path / "fine", scale(1.5)))
    for factor in (0.18215, 1 / 0.18215):
        with pytest.raises(ValueError, match=r"latents have std .* expected 0\.3 to 3\.0"):
            LatentDataset(rewrite(shards, tmp_path / str(factor), scale(factor)))


def test_values_and_labels_are_validated(shards, tmp_path):
    with pytest.raises(ValueError, match="NaN or infinity"):
        LatentDataset(rewrite(shards, tmp_path / "nan", lambda m: None, lambda t: t["moments"].fill_(float("nan"))))
    with pytest.raises(ValueError, match=r"labels outside 0\.\.2"):
        LatentDataset(rewrite(shards, tmp_path / "labels", lambda m: None, lambda t: t["labels"].add_(1)))


def test_incomplete_and_foreign_sets_are_refused(shards, images, vae_path, tmp_path):
    copy = shutil.copytree(shards, tmp_path / "copy")
    second = copy / "shard_00001.safetensors"
    data = second.read_bytes()
    for size in (len(data) - 1, 100, 4, 0):
        second.write_bytes(data[:size])
        with pytest.raises(ValueError, match="shard_00001"):
            LatentDataset(copy)
    second.unlink()
    with pytest.raises(ValueError, match="2 of 3 shards"):
        LatentDataset(copy)
    other = rewrite(shards, tmp_path / "other", lambda metadata: metadata.update(image_size=64))
    shutil.copy(other / second.name, copy)
    with pytest.raises(ValueError, match=r"of another set .*image_size"):
        LatentDataset(copy)
    newer = rewrite(shards, tmp_path / "newer", lambda metadata: metadata.update(format=2))
    with pytest.raises(ValueError, match=r"shard_00000\.safetensors: latents of format 2; this version reads format 1"):
        LatentDataset(newer)
    empty = rewrite(shards, tmp_path / "empty", lambda metadata: metadata.clear())
    with pytest.raises(ValueError, match=r"shard_00000\.safetensors: latents of format None"):
        encode(encode_config(images, empty, vae_path))
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match=r"python -m vcagen encode"):
            LatentDataset(path)


# what training opens


def test_open_shards_needs_no_vae(shards, monkeypatch):
    monkeypatch.setattr("vcagen.data.vae._load_vae", lambda vae: pytest.fail("the VAE was loaded"))
    dataset, vae = open_dataset(DataConfig(path=str(shards)), VaeConfig())
    moments, _ = dataset.__getitems__([(0, False), (12, True)])
    assert vae.sample(moments, torch.zeros(2, 4, 4, 4)).dtype == torch.float32
    assert not dataset.needs_main_process


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
    assert dataset.needs_main_process
    stored = LatentDataset(shards)
    assert dataset.spec == stored.spec
    assert torch.equal(dataset.labels, stored.labels)
    items = [(3, True), (12, False), (0, False)]
    moments, labels = dataset.__getitems__(items)
    expected, expected_labels = stored.__getitems__(items)
    assert torch.allclose(moments, expected.float(), rtol=2**-10, atol=1e-5)
    assert torch.equal(labels, expected_labels)
    assert vae.sample(moments, torch.zeros(3, 4, 4, 4)).shape == (3, 4, 4, 4)
    with pytest.raises(ValueError, match="image_size: 30"):
        open_dataset(
            DataConfig(path=str(images), from_images=True, images=ImageConfig(image_size=30)), VaeConfig(path=vae_path)
        )


def test_an_image_size_of_nothing_is_refused(images, vae_path, shards):
    for path, from_images in ((images, True), (shards, False), ("digits", False)):
        config = DataConfig(path=str(path), from_images=from_images, images=ImageConfig(image_size=0))
        with pytest.raises(ValueError, match=r"^data\.images\.image_size: 0; expected 1 or more"):
            open_dataset(config, VaeConfig())


def test_train_from_broken_images(tmp_path, vae_path):
    image_folder(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "b" / "bad.png").write_bytes(b"nothing")
    config = DataConfig(path=str(tmp_path), from_images=True, images=ImageConfig(image_size=32))
    with pytest.raises(ValueError, match=r"1 unreadable images: b/bad\.png"):
        open_dataset(config, VaeConfig(path=vae_path))
    skip = ImageConfig(image_size=32, on_bad_image="skip")
    dataset, _ = open_dataset(DataConfig(path=str(tmp_path), from_images=True, images=skip), VaeConfig(path=vae_path))
    assert dataset.labels.tolist() == [0, 0, 1, 1]


def test_digits():
    dataset, vae = open_dataset(DataConfig(path="digits"), VaeConfig())
    assert len(dataset) == 1797
    assert (dataset.spec.channels, dataset.spec.height, dataset.spec.num_classes) == (1, 8, 10)
    plain, label = dataset[5, False]
    assert plain.shape == (1, 8, 8)
    assert label == 5
    assert torch.equal(dataset[5, True][0], plain.flip(-1))
    assert vae.decode(plain[None]).shape == (1, 1, 8, 8)
    with pytest.raises(ValueError, match=r"vae\.path"):
        open_dataset(DataConfig(path="digits"), VaeConfig(path="someone/vae"))
    with pytest.raises(ValueError, match="image_size: 256; the digits have 8"):
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
    files = _write_latents(tmp_path, 3000)  # 94 MiB
    assert len(files) == 3000
    dataset = LatentDataset(tmp_path)
    dataset.__getitems__([(i, False) for i in range(100)])  # what a batch takes is not given back
    before = anonymous_bytes()
    for start in range(0, 3000, 100):
        for mirror in (False, True):
            dataset.__getitems__([(i, mirror) for i in range(start, start + 100)])
    assert anonymous_bytes() - before < 20 * 2**20


def test_benchmark_runs(tmp_path, capsys):
    options = ["--items", "300", "--batch", "64", "--num_workers", "0", "--seconds", "0.1", "--jpegs", "2"]
    main([*options, "--encodings", "0", "--folder", str(tmp_path), "--json", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["latents_per_second"] > result["latents_per_second_npy"] > 0
    assert result["images_per_second_per_core"] > 0
    assert "latents_over_npy" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_benchmark_has_batches_for_as_long_as_it_lasts(tmp_path, capsys):
    """Four batches are read in far less than a second; the loader goes on from the first."""
    options = ["--items", "64", "--batch", "16", "--num_workers", "1", "--seconds", "1", "--jpegs", "1"]
    main([*options, "--encodings", "0", "--folder", str(tmp_path)])
    assert "latents_per_second_loader" in capsys.readouterr().out
