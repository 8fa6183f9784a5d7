"""The Hub, without a network: what has been downloaded is taken, and the rest is refused at once."""

import shutil
import socket
import time

import huggingface_hub
import pytest
from helpers import tiny_vae

from vcagen.data.vae import LatentVAE
from vcagen.system import hub


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    """A folder whose folders user/name are the repositories of the Hub; the files asked for are kept in `.asked`."""
    root = tmp_path / "hub"

    def snapshot_download(name, *, allow_patterns):
        if not (root / name).is_dir():
            raise OSError(f"401 Client Error. (Request ID: 1)\n\nRepository Not Found for url: https://hub/{name}.")
        for file in (root / name).rglob("*"):
            if file.is_file() and any(file.match(pattern) for pattern in allow_patterns):
                there = tmp_path / "cache" / file.relative_to(root)
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, there)
        return str(tmp_path / "cache" / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return root


def test_a_vae_of_the_hub_is_the_folder_of_its_files(fake_hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tiny_vae(fake_hub / "user" / "vae")
    vae = LatentVAE("user/vae")
    assert [file.name for file in (tmp_path / "cache" / "user" / "vae").iterdir()] == ["config.json"]
    assert vae.description() == {**LatentVAE(folder).description(), "path": "user/vae"}
    with pytest.raises(
        ValueError, match=r"^user/no: this VAE cannot be loaded \(user/no: .*Repository Not Found for url"
    ):
        LatentVAE("user/no")


def test_what_is_not_on_the_hub_is_not_looked_for_there(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "download", lambda *_: pytest.fail("asked the Hub"))
    monkeypatch.setattr("vcagen.data.vae.download", lambda *_: pytest.fail("asked the Hub"))
    for path in ("./no/where", str(tmp_path / "no"), "a/b/c", "../x"):
        with pytest.raises(ValueError, match=r"this VAE cannot be loaded \(no such folder\)"):
            LatentVAE(path)


def test_no_network_is_one_line_without_retries(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits {seconds} s for the Hub"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="user/vae: not on this machine; the Hub says: ") as error:
        hub.download("user/vae", "*.json")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="user/vae: this VAE cannot be loaded"):
        LatentVAE("user/vae")
