"""The page of `vcagen demo`, asked through gradio's own client."""

import sys

import numpy as np
import pytest
import tiny
from PIL import Image

import vcagen
from vcagen import __main__


@pytest.fixture
def ask(tmp_path):
    """A function that trains a tiny run, serves its page, and returns a client and the run."""
    gradio_client = pytest.importorskip("gradio_client")
    from vcagen.jobs.demo import Demo, build_page

    pages = []

    def serve(**options):
        tiny.train(tmp_path / "run", train__steps=2, **options)
        run = vcagen.load(tmp_path / "run")
        pages.append(build_page(Demo(run, 4)))
        _, url, _ = pages[-1].launch(prevent_thread_lock=True, share=False, quiet=True, show_error=True)
        return gradio_client.Client(url, verbose=False, download_files=str(tmp_path / "files")), run

    yield serve
    for page in pages:
        page.close()


@pytest.mark.slow
def test_images_and_maps_through_the_client(ask):
    client, run = ask()
    answer = client.predict(3, 2.0, "ode midpoint", 6, 5, api_name="/sample")
    images = [Image.open(one["image"]) for one in answer]
    expected = run.sample([3] * 4, batch=4, seed=5, sampler="ode", method="midpoint", num_steps=3, cfg_scale=2.0)
    for image, wanted in zip(images, expected, strict=True):
        assert image.size == (128, 128)
        assert np.array_equal(
            np.asarray(image.convert("L").resize((8, 8), Image.Resampling.NEAREST)), np.asarray(wanted)
        )
    asked = (3, 2.0, "ode midpoint", 6, 5)
    stage1, stage2 = client.predict(*asked, 2, "block 0", 0, 3, api_name="/maps")
    another, _ = client.predict(*asked, 1, "block 0", 0, 3, api_name="/maps")
    assert Image.open(stage2).width == 1200
    assert Image.open(stage1).tobytes() != Image.open(another).tobytes()
    with pytest.raises(Exception, match="less than minimum value 0"):
        client.predict(3, 2.0, "ode midpoint", 6, -1, api_name="/sample")


@pytest.mark.slow
def test_a_run_without_vca_has_no_maps(ask):
    client, run = ask(model__attention="mhsa", model__attention_options={}, process__name="diffusion")
    assert client.view_api(return_format="dict")["named_endpoints"].keys() == {"/sample"}
    answer = client.predict(1, 1.0, "ddim", 2, 0, api_name="/sample")
    (wanted, *_) = run.sample([1] * 4, batch=4, sampler="ddim", num_steps=2, cfg_scale=1.0)
    small = Image.open(answer[0]["image"]).convert("L").resize((8, 8), Image.Resampling.NEAREST)
    assert np.array_equal(np.asarray(small), np.asarray(wanted))


def test_without_gradio_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "vcagen.jobs.demo", raising=False)
    with pytest.raises(ValueError, match=r'gradio is missing; pip install "vcagen\[demo\]"'):
        __main__.main(["demo", "runs/any"])
