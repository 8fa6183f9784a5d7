"""LatentCodec, and the sets that training reads: shards, digits, image folders."""

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
from vcagen.config.options import CodecConfig, DataConfig, ImageConfig
from vcagen.data.encode import encode
from vcagen.data.images import folder_pixels, from_uint8, scan_images, to_uint8
from vcagen.data.latents import DataSpec, ImageDataset, LatentDataset, keep, latent_std, open_dataset
from vcagen.data.vae import LatentCodec, NonFiniteError

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return tiny_vae(tmp_path_factory.mktemp("vae"), shift_factor=0.25)


@pytest.fixture(scope="module")
def other_vae(tmp_path_factory):
    return tiny_vae(tmp_path_factory.mktemp("other_vae"), seed=1, shift_factor=0.25)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), {"cat": 5, "dog": 4, "eel": 4})


@pytest.fixture(scope="module")
def shards(tmp_path_factory, vae, images):
    out = tmp_path_factory.mktemp("shards") / "latents"
    encode(encode_config(images, out, vae))
    return out


def encode_config(images, out, vae, **options):
    return EncodeConfig(
        images=str(images), out=str(out), vae=vae, image_size=32,
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


# the codec


def test_codec_equals_diffusers(vae):
    from diffusers import AutoencoderKL

    model = AutoencoderKL.from_pretrained(vae)
    codec = LatentCodec(vae)
    assert (codec.channels, codec.downsample, codec.moment_channels) == (4, 8, 8)
    assert codec.scaling_factor == model.config.scaling_factor
    assert codec.shift_factor == 0.25
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, 3, 32, 24, generator=generator) * 2 - 1
    noise = torch.randn(2, 4, 4, 3, generator=generator)
    with torch.no_grad():
        posterior = model.encode(x).latent_dist
        latents = (posterior.mean + posterior.std * noise - 0.25) * model.config.scaling_factor
        decoded = model.decode(latents / model.config.scaling_factor + 0.25).sample
    moments = codec.moments(x)
    assert moments.shape == (2, 8, 4, 3)
    assert torch.equal(moments, posterior.parameters)
    assert torch.allclose(codec.sample(moments, noise), latents, atol=1e-6)
    assert torch.equal(codec.decode(latents), to_uint8(decoded))
    one_by_one = codec.decode(latents, batch=1).int() - to_uint8(decoded).int()
    assert one_by_one.abs().max() <= 1
    assert not moments.requires_grad


def test_codec_reads_only_the_config_until_it_is_used(vae, tmp_path):
    shutil.copy(f"{vae}/config.json", tmp_path)
    codec = LatentCodec(str(tmp_path))
    assert codec.channels == 4
    with pytest.raises(ValueError, match="cannot be loaded"):
        codec.moments(torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize("name", ["scaling_factor", "latent_channels", "block_out_channels"])
def test_a_config_that_is_no_vae_is_refused(vae, tmp_path, name):
    values = json.loads(Path(vae, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, name: None}))
    with pytest.raises(ValueError, match=r"config\.json is not that of an AutoencoderKL"):
        LatentCodec(str(tmp_path))


def test_codec_options(vae):
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    exact = LatentCodec(vae).moments(x)
    sliced = LatentCodec(vae, slicing=True, tiling=True).moments(x)
    assert torch.allclose(sliced, exact, atol=1e-5)
    half = LatentCodec(vae, precision="bfloat16")
    coarse = half.moments(x)
    assert coarse.dtype == torch.float32
    assert 0 < (coarse - exact).abs().max() < 0.1
    assert half.description() == LatentCodec(vae).description()


def test_the_vae_keeps_its_precision_whatever_is_set_around_it(vae):
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    codec = LatentCodec(vae)
    exact = codec.moments(x)
    images = codec.decode(exact[:, :4])
    seen = []

    def look(*_):
        cudnn = torch.backends.cudnn
        seen.append((cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, torch.get_float32_matmul_precision()))

    for module in (codec._model.encoder, codec._model.decoder):
        module.register_forward_hook(look)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True):
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(codec.moments(x), exact)
                assert torch.equal(codec.decode(exact[:, :4]), images)
            assert torch.backends.cudnn.allow_tf32
            assert torch.backends.cudnn.benchmark
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert seen == [(False, True, False, "highest")] * 2


def test_identity_codec():
    for channels in (1, 3):
        codec = LatentCodec("identity", channels=channels)
        pixels = torch.arange(256).reshape(1, 1, 16, 16).expand(2, channels, 16, 16).to(torch.uint8)
        moments = codec.moments(from_uint8(pixels))
        assert moments.shape[1] == codec.moment_channels == codec.channels == channels
        latents = codec.sample(moments, torch.randn(moments.shape))
        assert torch.equal(codec.decode(latents), pixels)
        assert LatentCodec.from_description(codec.description()).description() == codec.description()


def test_description_rebuilds_without_the_vae(vae, other_vae, tmp_path):
    moved = shutil.copytree(vae, tmp_path / "moved")
    description = json.loads(json.dumps(LatentCodec(str(moved)).description()))
    shutil.rmtree(moved)
    codec = LatentCodec.from_description(description)
    assert (codec.channels, codec.downsample, codec.shift_factor) == (4, 8, 0.25)
    assert codec.description() == description
    latents = torch.zeros(1, 4, 2, 2)
    assert codec.sample(torch.zeros(1, 8, 2, 2), latents).shape == (1, 4, 2, 2)
    with pytest.raises(ValueError, match=r"moved: this VAE cannot be loaded .*--vae"):
        codec.decode(latents)
    expected = LatentCodec(vae).decode(latents)
    assert torch.equal(LatentCodec.from_description(description, vae=vae).decode(latents), expected)
    with pytest.raises(ValueError, match="another VAE"):
        LatentCodec.from_description(description, vae=other_vae).decode(latents)


def test_hash_does_not_depend_on_the_file_format(vae, tmp_path):
    from diffusers import AutoencoderKL

    AutoencoderKL.from_pretrained(vae).save_pretrained(tmp_path, safe_serialization=False)
    assert not list(tmp_path.glob("*.safetensors"))
    assert LatentCodec(str(tmp_path)).description()["sha256"] == LatentCodec(vae).description()["sha256"]


@pytest.mark.parametrize("name", ["no/such/folder", "someone/no-such-vae", ""])
def test_vae_that_cannot_be_had(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"^{name}: this VAE cannot be loaded .*codec.vae") as error:
        LatentCodec(name)
    assert "\n" not in str(error.value)


def test_not_an_autoencoder(tmp_path):
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderDC"}')
    with pytest.raises(ValueError, match="a AutoencoderDC of 3 channels"):
        LatentCodec(str(tmp_path))


def test_decode_refuses_non_finite_latents(vae):
    latents = torch.zeros(4, 4, 2, 2)
    latents[1, 0, 0, 0] = float("nan")
    latents[3, 2, 1, 1] = float("inf")
    for codec in (LatentCodec(vae), LatentCodec("identity", channels=4)):
        with pytest.raises(NonFiniteError, match="row 1, 3: not finite") as error:
            codec.decode(latents, batch=2)
        assert error.value.rows == [1, 3]


def test_decode_refuses_non_finite_images(vae):
    codec = LatentCodec(vae)
    codec.verify()
    torch.nn.init.constant_(codec._model.decoder.conv_out.bias, float("nan"))
    with pytest.raises(NonFiniteError, match="decoded image of batch row 0, 1"):
        codec.decode(torch.zeros(2, 4, 2, 2), batch=1)


# shards


def direct_moments(images, vae, mirror):
    """Moments of all images, one batch of the encoding job at a time."""
    pixels = folder_pixels(scan_images(images), 32)
    codec = LatentCodec(vae)
    x = from_uint8(torch.stack([pixels.read(i) for i in range(len(pixels))]))
    if mirror:
        x = x.flip(-1)
    return torch.cat([codec.moments(x[i : i + 1]) for i in range(len(x))])


def test_shards_equal_direct_encoding(shards, images, vae):
    dataset = LatentDataset(shards)
    assert len(dataset) == 13
    assert dataset.dtype == torch.float16
    assert dataset.labels.tolist() == [0] * 5 + [1] * 4 + [2] * 4
    assert dataset.names() == list(scan_images(images).paths)
    assert dataset.spec == DataSpec(
        4, 4, 4, 3, ("cat", "dog", "eel"), 32, LatentCodec(vae).description()
    )  # fmt: skip
    for mirror in (False, True):
        stored, labels = dataset.__getitems__([(i, mirror) for i in range(13)])
        assert torch.equal(labels, dataset.labels)
        exact = direct_moments(images, vae, mirror)
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


def test_std_is_that_of_sampled_latents(shards, vae):
    dataset = LatentDataset(shards)
    codec = LatentCodec(vae)
    moments, _ = dataset.__getitems__([(i % 13, False) for i in range(13 * 40)])
    noise = torch.randn(len(moments), 4, 4, 4, generator=torch.Generator().manual_seed(0))
    assert codec.sample(moments, noise).std().item() == pytest.approx(dataset.latent_std, rel=0.02)
    assert latent_std(moments, codec.description()) == pytest.approx(dataset.latent_std)


def test_wrong_scale_is_refused(shards, tmp_path):
    def scale(factor):
        return lambda metadata: metadata["codec"].update(scaling_factor=metadata["codec"]["scaling_factor"] * factor)

    LatentDataset(rewrite(shards, tmp_path / "fine", scale(1.5)))
    for factor in (0.18215, 1 / 0.18215):
        with pytest.raises(ValueError, match=r"latents have std .* expected 0\.3 to 3\.0"):
            LatentDataset(rewrite(shards, tmp_path / str(factor), scale(factor)))


def test_values_and_labels_are_validated(shards, tmp_path):
    with pytest.raises(ValueError, match="NaN or infinity"):
        LatentDataset(rewrite(shards, tmp_path / "nan", lambda m: None, lambda t: t["moments"].fill_(float("nan"))))
    with pytest.raises(ValueError, match=r"labels outside 0\.\.2"):
        LatentDataset(rewrite(shards, tmp_path / "labels", lambda m: None, lambda t: t["labels"].add_(1)))


def test_incomplete_and_foreign_sets_are_refused(shards, images, vae, tmp_path):
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
        encode(encode_config(images, empty, vae))
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match=r"python -m vcagen encode"):
            LatentDataset(path)


# what training opens


def test_open_shards_needs_no_vae(shards, monkeypatch):
    monkeypatch.setattr("vcagen.data.vae._load_vae", lambda vae: pytest.fail("the VAE was loaded"))
    dataset, codec = open_dataset(DataConfig(path=str(shards)), CodecConfig())
    moments, _ = dataset.__getitems__([(0, False), (12, True)])
    assert codec.sample(moments, torch.zeros(2, 4, 4, 4)).dtype == torch.float32
    assert not dataset.needs_main_process


def test_open_shards_with_another_vae_or_size(shards, vae, other_vae, tmp_path):
    config = DataConfig(path=str(shards))
    moved = shutil.copytree(vae, tmp_path / "moved")
    _, codec = open_dataset(config, CodecConfig(vae=str(moved)))
    assert codec.vae == str(moved)
    with pytest.raises(ValueError, match="another VAE"):
        open_dataset(config, CodecConfig(vae=other_vae))
    with pytest.raises(ValueError, match=r"codec\.vae: identity"):
        open_dataset(config, CodecConfig(vae="identity"))
    with pytest.raises(ValueError, match=r"image_size: 64; .* was made with 32"):
        open_dataset(DataConfig(path=str(shards), images=ImageConfig(image_size=64)), CodecConfig())


def test_train_from_images(images, vae, shards):
    config = DataConfig(path=str(images), from_images=True, images=ImageConfig(image_size=32), num_workers=2)
    dataset, codec = open_dataset(config, CodecConfig(vae=vae))
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
    assert codec.sample(moments, torch.zeros(3, 4, 4, 4)).shape == (3, 4, 4, 4)
    with pytest.raises(ValueError, match="image_size: 30"):
        open_dataset(
            DataConfig(path=str(images), from_images=True, images=ImageConfig(image_size=30)), CodecConfig(vae=vae)
        )


def test_an_image_size_of_nothing_is_refused(images, vae, shards):
    for path, from_images in ((images, True), (shards, False), ("digits", False)):
        config = DataConfig(path=str(path), from_images=from_images, images=ImageConfig(image_size=0))
        with pytest.raises(ValueError, match=r"^data\.images\.image_size: 0; expected 1 or more"):
            open_dataset(config, CodecConfig())


def test_train_from_broken_images(tmp_path, vae):
    image_folder(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "b" / "bad.png").write_bytes(b"nothing")
    config = DataConfig(path=str(tmp_path), from_images=True, images=ImageConfig(image_size=32))
    with pytest.raises(ValueError, match=r"1 unreadable images: b/bad\.png"):
        open_dataset(config, CodecConfig(vae=vae))
    skip = ImageConfig(image_size=32, on_bad_image="skip")
    dataset, _ = open_dataset(DataConfig(path=str(tmp_path), from_images=True, images=skip), CodecConfig(vae=vae))
    assert dataset.labels.tolist() == [0, 0, 1, 1]


def test_digits():
    dataset, codec = open_dataset(DataConfig(path="digits"), CodecConfig())
    assert len(dataset) == 1797
    assert (dataset.spec.channels, dataset.spec.height, dataset.spec.num_classes) == (1, 8, 10)
    plain, label = dataset[5, False]
    assert plain.shape == (1, 8, 8)
    assert label == 5
    assert torch.equal(dataset[5, True][0], plain.flip(-1))
    assert codec.decode(plain[None]).shape == (1, 1, 8, 8)
    with pytest.raises(ValueError, match=r"codec\.vae"):
        open_dataset(DataConfig(path="digits"), CodecConfig(vae="someone/vae"))
    with pytest.raises(ValueError, match="image_size: 256; the digits have 8"):
        open_dataset(DataConfig(path="digits", images=ImageConfig(image_size=256)), CodecConfig())


def test_spec_round_trip_and_differences(shards):
    spec = LatentDataset(shards).spec
    copy = DataSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert copy == spec
    assert copy.differences(spec) == []
    moved = DataSpec.from_dict({**spec.to_dict(), "codec": {**spec.codec, "vae": "elsewhere"}})
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
