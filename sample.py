"""Sample images from a run or a weights file, and score them: python sample.py --run_dir runs/x --num_images 50000."""

from vcagen.__main__ import start

if __name__ == "__main__":
    start("sample")
