"""The mathematics between noise and data; torch only."""

from vcagen.processes.diffusion import GaussianDiffusion
from vcagen.processes.flow import LinearInterpolant
from vcagen.processes.process import Process

PROCESSES: dict[str, type[Process]] = {"diffusion": GaussianDiffusion, "flow": LinearInterpolant}
"""By the name in the options; a constructor that has `num_timesteps` gets it."""
