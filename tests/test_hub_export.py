"""A run among diffusers' pipelines and on the Hub, without a network."""

import base64
import http.server
import json
import re
import shutil
import socket
import sys
import threading
import time
import urllib.parse
from typing import ClassVar
from unittest import mock

import diffusers
import huggingface_hub
import pytest
import tiny
import torch
from diffusers.utils import dynamic_modules_utils
from helpers import ROOT, draw, image_folder, python, readme_block, tiny_vae

import vcagen
from vcagen.__main__ import do
from vcagen.config.options import ProcessConfig
from vcagen.jobs.hub_pipeline import scheduler_of

LABELS, NOISE = ["3", 7], draw()(torch.zeros(2, 1, 8, 8))


@pytest.fixture(autouse=True)
def modules_cache(tmp_path, monkeypatch):
    """diffusers copies the code of a folder into its cache and puts that on Python's path."""
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """runs/PROCESS, and hub/PROCESS exported from it."""
    root = tmp_path_factory.mktemp("hub")
    for process in ("flow", "diffusion"):
        tiny.train(root / "runs" / process, process__name=process, sampling__cfg_scale=1.5, sampling__num_steps=5)
        export(root / "runs" / process, root / "hub" / process)
    return root


def export(run, out, *options):
    do("export", [str(run), "--format", "hub", "--out", str(out), *map(str, options)], prog="vcagen export")


def pipeline(folder):
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def ours(run, noise, sampler, **options):
    """Latents of our sampler for LABELS."""
    predict = vcagen.with_cfg(run.network, torch.tensor([3, 7]), cfg_scale=1.5, null_label=10)
    return vcagen.SAMPLERS[sampler].function(run.process, predict, noise, **options)


@pytest.mark.parametrize(
    ("process", "sampler", "options"), [("flow", "ode", {"method": "euler"}), ("diffusion", "ddim", {})]
)
def test_the_pipeline_makes_the_images_of_our_first_order_sampler(root, process, sampler, options):
    run, pipe = vcagen.load(root / "runs" / process), pipeline(root / "hub" / process)
    call = {"class_labels": LABELS, "guidance_scale": 1.5, "num_inference_steps": 5, "latents": NOISE}
    expected = ours(run, NOISE, sampler, num_steps=5, **options)
    torch.testing.assert_close(pipe(**call, output_type="latent").images, expected, rtol=1e-4, atol=1e-5)
    images = pipe(**call).images
    assert [(image.size, image.mode) for image in images] == [((8, 8), "L")] * 2
    pixels = torch.stack([torch.tensor(list(image.getdata())) for image in images]).reshape(2, 1, 8, 8)
    assert (pixels - run.vae.decode(expected).int()).abs().max() <= 1
    assert pipe(**call, output_type="np", return_dict=False)[0].shape == (2, 8, 8, 1)
    seeded = [
        pipe(label, generator=torch.Generator().manual_seed(0), num_inference_steps=2).images[0].tobytes()
        for label in ("3", 3, [3], torch.tensor([3]))
    ]
    assert len(set(seeded)) == 1


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SCHEDULERS = [
    ("flow", diffusers.FlowMatchHeunDiscreteScheduler, {}),
    ("flow", diffusers.DPMSolverMultistepScheduler, FLOW),
    ("flow", diffusers.UniPCMultistepScheduler, FLOW),
    ("diffusion", diffusers.DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
    ("diffusion", diffusers.UniPCMultistepScheduler, {}),
    ("diffusion", diffusers.EulerDiscreteScheduler, {}),
]


@pytest.mark.parametrize(("process", "scheduler", "options"), SCHEDULERS)
def test_any_scheduler_of_diffusers_goes_to_the_same_images(root, process, scheduler, options):
    """Against time, or with the other sign, the noise would stay or grow: an error as large as the images."""
    run, pipe = vcagen.load(root / "runs" / process), pipeline(root / "hub" / process)
    sampler, fine = ("ode", {"method": "rk4"}) if process == "flow" else ("dpmpp", {})
    exact = ours(run, NOISE, sampler, num_steps=20, **fine)
    pipe.scheduler = scheduler.from_config({**scheduler_of(ProcessConfig(process)).config, **options})
    latents = pipe(LABELS, guidance_scale=1.5, num_inference_steps=20, latents=NOISE, output_type="latent").images
    assert (latents - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("process", ["flow", "diffusion"])
def test_bfloat16_and_saved_again_with_its_code(root, tmp_path, process):
    pipe = pipeline(root / "hub" / process)
    call = {"class_labels": LABELS, "guidance_scale": 1.5, "num_inference_steps": 5, "latents": NOISE}
    exact = pipe(**call, output_type="latent").images
    pipe.to(torch.bfloat16)
    assert pipe.transformer.dtype == torch.bfloat16
    rounded = pipe(**call, output_type="latent").images
    assert 0 < (rounded - exact).abs().max() < 0.1
    pipe.save_pretrained(tmp_path / "again")
    again = diffusers.DiffusionPipeline.from_pretrained(
        tmp_path / "again", trust_remote_code=True, torch_dtype=torch.bfloat16
    )
    assert again(**call, output_type="latent").images.equal(rounded)
    loaded = vcagen.load(tmp_path / "again")
    state = loaded.network.state_dict()
    assert all(value.float().equal(state[name]) for name, value in pipe.transformer.state_dict().items())


def test_the_folder_is_loaded_as_the_run(root, tmp_path):
    folder, run = root / "hub" / "flow", root / "runs" / "flow"
    expected = vcagen.load(run).sample(labels=LABELS, seed=3, batch=2, output="tensor")
    for source in (folder, folder / "transformer" / "diffusion_pytorch_model.safetensors"):
        loaded = vcagen.load(source)
        assert loaded.sample(labels=LABELS, seed=3, batch=2, output="tensor").equal(expected)
        assert (loaded.step, loaded.ema_decay) == (6, 0.9)
    export(run, tmp_path / "raw", "--weights", "raw")
    assert vcagen.load(tmp_path / "raw").ema_decay is None


def test_the_vae_comes_along_with_its_scale(tmp_path, monkeypatch):
    vae = tiny_vae(tmp_path / "first" / "vae")
    images = image_folder(tmp_path / "images", {"cat": 4, "dog": 4}, size=64)
    tiny.train(
        tmp_path / "run", data__path=str(images), data__from_images=True, data__images__image_size=64, vae__path=vae,
        vae__scaling_factor=0.5, data__num_workers=0, train__batch_size=4, train__steps=2,
    )  # fmt: skip
    export(tmp_path / "run", tmp_path / "hub")
    options = {"batch": 1, "num_steps": 3, "sampler": "ode", "method": "euler"}
    (expected,) = vcagen.load(tmp_path / "run").sample(["dog"], **options)
    shutil.rmtree(tmp_path / "first")
    tiny_vae(tmp_path / "elsewhere" / "vae", seed=1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    loaded = vcagen.load(tmp_path / "hub")
    (image,) = loaded.sample(["dog"], **options)
    assert image.tobytes() == expected.tobytes()
    pipe = pipeline(tmp_path / "hub")
    assert pipe.vae.config.scaling_factor == 0.5
    noise = draw()(torch.zeros(2, 4, 8, 8))
    latents = pipe(["cat", 1], num_inference_steps=2, latents=noise, output_type="latent").images
    images = pipe(["cat", 1], num_inference_steps=2, latents=noise, output_type="pt").images
    assert ((images * 255).round() - loaded.vae.decode(latents)).abs().max() <= 1
    text = "".join(file.read_text(errors="replace") for file in (tmp_path / "hub").rglob("*") if file.is_file())
    assert str(tmp_path) not in text
    pipe.vae = None
    with pytest.raises(ValueError, match="vae: missing"):
        pipe([0], num_inference_steps=1)


# The card


def test_the_card_says_recipe_scores_with_their_manifest_and_paper(tmp_path):
    tiny.train(tmp_path / "run", sampling__cfg_scale=2.0)
    options = "--sampler ode --method euler --num_steps 2 --num_images 20 --reference digits --extractor pixels"
    do("sample", ["--run_dir", str(tmp_path / "run"), *options.split()], prog="sample.py")
    export(tmp_path / "run", tmp_path / "tiny-sit")
    card = (tmp_path / "tiny-sit" / "README.md").read_text()
    header, text = huggingface_hub.ModelCard(card).data.to_dict(), huggingface_hub.ModelCard(card).text
    assert header["library_name"] == "diffusers"
    assert {"sit", "vca"} <= set(header["tags"])
    (manifest,) = re.findall(r"```json\n(.*?)```", text, re.S)
    manifest = json.loads(manifest)
    assert manifest["num_images"] == 20
    assert (manifest["sampler"], manifest["num_steps"], manifest["seed"]) == ("ode", 2, 0)
    (results,) = (tmp_path / "run").glob("samples/*/results.json")
    value = json.loads(results.read_text())["metrics"]["fd_pixels_20"]
    assert f"| fd_pixels_20 | {value:.6g} |" in text
    assert "| learning rate | 0.01 |" in text
    assert str(tmp_path) not in card
    (citation,) = re.findall(r"```bibtex\n(.*?)```", text, re.S)
    assert citation in (ROOT / "README.md").read_text()
    export(tmp_path / "run", tmp_path / "raw", "--weights", "raw")
    assert "None was measured" in (tmp_path / "raw" / "README.md").read_text()


def test_the_python_of_the_card_runs(root, monkeypatch):
    monkeypatch.chdir(root / "hub")
    blocks = re.findall(r"```python\n(.*?)```", (root / "hub" / "flow" / "README.md").read_text(), re.S)
    assert len(blocks) == 2
    for block in blocks:
        found = {}
        exec(block.replace("guidance_scale", "num_inference_steps=2, guidance_scale"), found)
        assert [image.size for image in found["images"]] == [(8, 8)] * 2


# The Hub


@pytest.fixture
def uploads(monkeypatch):
    """What HfApi was asked to do, instead of doing it: (method, arguments, files)."""
    asked = []

    def create_repo(self, repo_id, **options):
        asked.append(("create_repo", {"repo_id": repo_id, **options}, None))
        return f"https://hub/{repo_id}"

    def upload_folder(self, *, folder_path, **options):
        files = {str(file.relative_to(folder_path)) for file in folder_path.rglob("*") if file.is_file()}
        asked.append(("upload_folder", options, files))

    for function in (create_repo, upload_folder):
        real = getattr(huggingface_hub.HfApi, function.__name__)
        checked = mock.create_autospec(real, side_effect=function)  # arguments that the real one does not take fail
        monkeypatch.setattr(huggingface_hub.HfApi, function.__name__, checked)
    return asked


def push(*arguments):
    do("push", [str(argument) for argument in arguments], prog="vcagen push")


def test_push_makes_the_repository_and_uploads_the_folder(root, uploads, capsys):
    push(root / "runs" / "flow", "user/tiny-sit", "--private")
    (created, made, _), (uploaded, commit, files) = uploads
    assert (created, uploaded) == ("create_repo", "upload_folder")
    assert made == {"repo_id": "user/tiny-sit", "private": True, "exist_ok": True}
    assert commit["repo_id"] == "user/tiny-sit"
    expected = {str(f.relative_to(root / "hub" / "flow")) for f in (root / "hub" / "flow").rglob("*") if f.is_file()}
    assert files == expected
    assert {"pipeline.py", "transformer/modeling.py", "README.md"} < files
    assert capsys.readouterr().out == "https://hub/user/tiny-sit\n"


def test_push_takes_an_exported_folder_as_it_is(root, uploads, tmp_path):
    folder = shutil.copytree(root / "hub" / "flow", tmp_path / "edited")
    (folder / "grid.png").touch()
    push(folder, "user/tiny-sit")
    assert "grid.png" in uploads[1][2]
    with pytest.raises(ValueError, match="edited is exported already"):
        push(folder, "user/tiny-sit", "--weights", "raw")


def test_the_commands_and_the_snippet_of_the_page(root, uploads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(root / "runs" / "flow", "runs/quickstart")
    for line in readme_block("hub", "docs/library.md"):
        _, job, *arguments = line.split()
        do(job, arguments, prog=job)
    assert [asked[0] for asked in uploads] == ["create_repo", "upload_folder"]
    found = {}
    exec("\n".join(readme_block("pipeline", "docs/library.md")), found)
    assert [image.size for image in found["images"]] == [(8, 8)] * 2


@pytest.mark.parametrize("repo", ["tiny-sit", "a/b/c", "user/", "/x", "user/a b", "user/x."])
def test_push_refuses_names_that_the_hub_has_not(root, uploads, repo):
    with pytest.raises(ValueError, match=f"repo: {re.escape(repo)}; needs user/name"):
        push(root / "runs" / "flow", repo)
    assert not uploads


def test_push_without_network_is_one_line_without_retries(root, monkeypatch):
    def refuse(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits {seconds} s for the Hub"))
    with pytest.raises(ValueError, match=r"^user/tiny-sit: not uploaded \(.*\); `hf auth login` logs in$"):
        push(root / "hub" / "flow", "user/tiny-sit")


# Bad input


def test_impossible_exports_are_refused(root, tmp_path):
    run, there = root / "runs" / "flow", root / "hub" / "flow"
    with pytest.raises(ValueError, match=r"out: .*flow exists; choose another folder"):
        export(run, there)
    with pytest.raises(ValueError, match=r"weights: .* has no ema_0.5"):
        export(run, tmp_path / "new", "--weights", "ema_0.5")
    with pytest.raises(ValueError, match="vae: one weights file holds no VAE"):
        do("export", [str(run), "--out", str(tmp_path / "x.safetensors"), "--vae", "x"], prog="vcagen export")
    tiny.train(tmp_path / "short", process__name="diffusion", process__num_timesteps=10, sampling__num_steps=5)
    with pytest.raises(ValueError, match=r"process.num_timesteps: 10; diffusers' schedulers need 21 or more"):
        export(tmp_path / "short", tmp_path / "new")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["short"]


@pytest.mark.parametrize("num_timesteps", [21, 100, 1000])
def test_the_schedule_is_the_one_that_was_trained(num_timesteps):
    scheduler = scheduler_of(ProcessConfig("diffusion", num_timesteps))
    expected = vcagen.GaussianDiffusion(num_timesteps).alphas_cumprod
    torch.testing.assert_close(scheduler.alphas_cumprod.double(), expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"class_labels": ["ten"]}, "labels: 'ten' is not a class; valid are labels 0..9 or class names 0, 1"),
        ({"class_labels": [10]}, "labels: '10' is not a class"),
        ({"class_labels": [0], "guidance_scale": float("nan")}, "cfg_scale: nan"),
        ({"class_labels": [0], "output_type": "jpeg"}, "output_type: jpeg; choose from pil, np, pt, latent"),
    ],
)
def test_impossible_calls_are_refused(root, call, message):
    with pytest.raises(ValueError, match=message):
        pipeline(root / "hub" / "flow")(**call)


def test_schedulers_of_the_other_process_are_refused(root):
    flow, diffusion = pipeline(root / "hub" / "flow"), pipeline(root / "hub" / "diffusion")
    flow.scheduler, diffusion.scheduler = diffusion.scheduler, flow.scheduler
    with pytest.raises(ValueError, match=r"scheduler: DDIMScheduler is not for a flow; .*flow_prediction"):
        flow([0])
    with pytest.raises(ValueError, match=r"scheduler: FlowMatchEulerDiscreteScheduler is for a flow; .*'epsilon'"):
        diffusion([0])


def test_guidance_needs_a_null_label(tmp_path):
    tiny.train(tmp_path / "run", model__class_dropout_prob=0.0)
    export(tmp_path / "run", tmp_path / "hub")
    pipe = pipeline(tmp_path / "hub")
    assert len(pipe([0, 1], num_inference_steps=2).images) == 2
    with pytest.raises(ValueError, match=r"cfg_scale: 2.0; this network has no null label"):
        pipe([0], guidance_scale=2.0)


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the Hub's interface that uploads and downloads need; `files` are those of its repositories."""

    files: ClassVar[dict[str, bytes]] = {}
    commit = 40 * "1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        repo = re.match(r"/api/models/(\w+/[\w-]+)/", self.path)
        if self.path == "/api/repos/create":
            made = json.loads(body)
            self.answer({"url": f"http://{self.headers['Host']}/{made['organization']}/{made['name']}"})
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[f"{repo[1]}/{line['value']['path']}"] = base64.b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"http://{self.headers['Host']}/{repo[1]}/commit/1", "commitOid": self.commit})
        else:
            self.answer({})

    def do_GET(self):
        path = urllib.parse.unquote(self.path.partition("?")[0])
        if found := re.fullmatch(r"/api/models/(\w+/[\w-]+)(/revision/\w+|/tree/\w+)?", path):
            names = [name.removeprefix(f"{found[1]}/") for name in self.files if name.startswith(f"{found[1]}/")]
            if (found[2] or "").startswith("/tree"):
                self.answer([{"type": "file", "path": name, "size": len(self.files[f"{found[1]}/{name}"]), "oid": "1"}
                             for name in names])  # fmt: skip
            else:
                self.answer({"id": found[1], "sha": self.commit, "siblings": [{"rfilename": name} for name in names]})
            return
        content = self.files.get(re.sub(r"^/(\w+/[\w-]+)/resolve/\w+/", r"\1/", path))
        if content is None:
            self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        else:
            self.answer(content, headers={"ETag": f'"{hash(content)}"', "X-Repo-Commit": self.commit})

    do_HEAD = do_GET

    def answer(self, content, code=200, headers=None):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


ROUND = """
import sys, torch, vcagen
from diffusers import DiffusionPipeline
from vcagen.__main__ import do

do("push", [sys.argv[1], "user/tiny-sit"], prog="vcagen push")
call = {"class_labels": ["3", 7], "num_inference_steps": 2, "latents": torch.ones(2, 1, 8, 8), "output_type": "latent"}
pipe = DiffusionPipeline.from_pretrained("user/tiny-sit", trust_remote_code=True)
here = DiffusionPipeline.from_pretrained(sys.argv[2], trust_remote_code=True)
assert pipe(**call).images.equal(here(**call).images)
state, expected = (vcagen.load(source).network.state_dict() for source in ("user/tiny-sit", sys.argv[1]))
assert all(value.equal(state[name]) for name, value in expected.items())
"""


@pytest.mark.slow
def test_pushed_to_a_server_and_loaded_from_there(root, tmp_path):
    """Through huggingface_hub's own code, to a server on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0",
               "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}  # fmt: skip
        out, _ = python("-c", ROUND, root / "runs" / "flow", root / "hub" / "flow", env=env)
        server.shutdown()
    assert out.startswith(f"{env['HF_ENDPOINT']}/user/tiny-sit\n")
    assert b"# user/tiny-sit\n" in Hub.files["user/tiny-sit/README.md"]
