"""A run as a repository of the Hub."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from vcagen.config.job_options import PushConfig
from vcagen.jobs.export import export_folder

NAME = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9]([\w.-]*\w)?")


def run(config: PushConfig) -> None:
    """Export the run, or take a folder that was exported, make the repository where there is none, and upload.

    Raises:
        ValueError: as `export_folder`; a name or a login that the Hub refuses, or a Hub that cannot be reached.
    """
    from huggingface_hub import HfApi

    if not NAME.fullmatch(config.repo):
        raise ValueError(f"repo: {config.repo}; needs user/name, of letters, digits, and . _ - within them")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(config.run_dir)
        if not (folder / "model_index.json").is_file():
            folder = Path(temporary) / "export"
            notes = export_folder(
                config.run_dir, folder, name=config.repo, weights=config.weights, step=config.step, vae=config.vae
            )
            print(f"{config.repo}: {'; '.join(notes)}", file=sys.stderr)
        elif (config.weights, config.step, config.vae) != ("ema", None, None):
            raise ValueError(f"weights, step, vae: {folder} is exported already; they are options of its export")
        try:
            hub = HfApi()
            url = hub.create_repo(config.repo, private=config.private, exist_ok=True)
            hub.upload_folder(repo_id=config.repo, folder_path=folder, commit_message="Upload by vcagen push")
        except Exception as error:  # of the Hub, the network or the login
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ValueError(f"{config.repo}: not uploaded ({reason}); `hf auth login` logs in") from error
    print(url)
