"""Train a DiT or SiT: python train.py --config configs/quickstart.yaml, or accelerate launch train.py ..."""

from vcagen.__main__ import start

if __name__ == "__main__":
    start("train")
