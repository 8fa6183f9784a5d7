"""A GPU that is not there: CPU tensors are real, CUDA tensors are fake (shape, type and device). No kernel runs.

It finds what a CPU cannot: operands on two devices, results left on the wrong one, NumPy arrays of CUDA tensors, types
under CUDA autocast, and where the host waits for the device. Values read back are made up: ones. Loops that steer by
values (adaptive ODE methods) cannot be run, and a loop that would wait each time round may end after the first.

Private parts of torch are used here and nowhere else. Backward passes need a process that has `shim` preloaded, since
autograd counts devices in C++; the rest needs a torch built for CUDA, and no GPU.
"""

import ctypes
import os
import subprocess
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import torch.cuda.amp.common
import torch.nn.functional as F
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
PRELOADED = os.environ.get("PRETENDED_GPU_SHIM")
SHIM = """
/* What autograd asks about devices: torch's count of them, and of the driver what context each has. */
signed char pretended_devices = 0;
signed char _ZN3c104cuda12device_countEv(void) { return pretended_devices; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
"""


def shim(folder):
    """Build the library for backward passes; returns the environment of a process that has it preloaded.

    It has the driver's name, so that torch finds it where it opens the driver.

    Raises:
        OSError: there is no gcc, or it cannot build the library.
    """
    path = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(path)]
    done = subprocess.run(command, input=SHIM, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"gcc: {done.stderr.strip()}")
    return {"LD_PRELOAD": str(path), "PRETENDED_GPU_SHIM": str(path)}


WHY_NOT = None
if not torch.backends.cuda.is_built():
    WHY_NOT = "torch is not built for CUDA"
elif not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
    WHY_NOT = f"torch {torch.__version__} has no stand-in for CUDA's device guard, as newer ones have"
elif torch.cuda.is_available():
    WHY_NOT = "there is a GPU; CUDA_VISIBLE_DEVICES= hides it"
"""Why no GPU can be pretended here."""


class PretendedGPU(TorchDispatchMode):
    """Sends what touches CUDA to torch's FakeTensorMode, and gives the rest to the CPU.

    Attributes:
        waits: names of the operations in which the host waited for the device, in order.
    """

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        to = None if device is None else torch.device(device).type
        fake = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        if fake and (waited := self._wait(function, args, kwargs, to)) is not None:
            self.waits.append(function.__name__)
            return waited
        if function is aten._to_copy.default and to == "cuda" and not fake:  # values of the CPU are forgotten
            dtype = kwargs.get("dtype") or args[0].dtype
            with self.fake:
                return torch.empty_strided(args[0].shape, args[0].stride(), dtype=dtype, device=device)
        if fake or to == "cuda":
            if "generator" in kwargs:
                kwargs["generator"] = None
            with self.fake:
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    def _wait(self, function, args, kwargs, to):
        """What an operation that waits for the device gives the host; None for one that does not wait."""
        if function is aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item()
        if function is aten.equal.default:
            return True
        if function is aten.nonzero.default:
            with self.fake:
                return torch.empty(0, args[0].ndim, dtype=torch.int64, device=args[0].device)
        if function is aten._to_copy.default and to == "cpu":
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if function is aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0].fill_(1)
        return None


class Generator(torch.Generator):
    """A generator that says it is on a device; torch's own of a CUDA device asks the driver."""

    def __new__(cls, device="cpu"):
        generator = super().__new__(cls)
        generator.where = torch.device(device)
        return generator

    def __init__(self, device="cpu"):
        super().__init__()

    @property
    def device(self):
        return self.where


def _attention(q, k, v, *args, **kwargs):
    """The kernel that torch picks on a GPU, without asking which GPU it is."""
    if q.dtype == torch.float32:
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, False)[0]
    return aten._scaled_dot_product_flash_attention(q, k, v)[0]


def _devices(count):
    if PRELOADED:
        ctypes.c_byte.in_dll(ctypes.CDLL(PRELOADED), "pretended_devices").value = count


@contextmanager
def pretended_gpu():
    """Inside, torch has one CUDA device, whose tensors are fake; gives the PretendedGPU."""
    torch._C._ensureCUDADeviceGuardSet()
    sdpa, flags = F.scaled_dot_product_attention, torch.backends.cudnn.flags
    empty, tensor = torch.empty, torch.tensor
    torch.utils._device._device_constructors()  # remembers torch's functions, which must not be those of here

    def made(*args, device=None, **kwargs):  # torch.tensor is made where no dispatch mode sees it
        return tensor(*args, **kwargs) if device is None else tensor(*args, **kwargs).to(device)

    with ExitStack() as stack:

        def patch(owner, **values):
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, value))

        patch(torch.cuda.amp.common, amp_definitely_not_available=lambda: False)
        patch(fake_tensor, init_gpu_context=lambda device: None)
        patch(
            torch.cuda,
            _lazy_init=lambda: None,
            is_available=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            set_device=lambda device: None,
            get_device_name=lambda device=None: "pretended",
            is_bf16_supported=lambda *args, **kwargs: True,
            synchronize=lambda device=None: None,
            empty_cache=lambda: None,
            max_memory_allocated=lambda device=None: 0,
        )
        patch(
            torch,
            Generator=Generator,
            empty=lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs),  # threads have no dispatch mode
            tensor=made,
        )
        patch(torch.Tensor, pin_memory=lambda self, *args: self)
        patch(torch.Tensor, new_tensor=lambda self, data, dtype=None, device=None: (
            tensor(data, dtype=dtype or self.dtype).to(device or self.device)))  # fmt: skip
        patch(FakeTensor, tolist=lambda self: self.cpu().tolist())  # one wait, not one a number
        patch(F, scaled_dot_product_attention=lambda q, *args, **kwargs: (
            _attention if isinstance(q, FakeTensor) else sdpa)(q, *args, **kwargs))  # fmt: skip
        patch(torch.backends.cudnn, flags=lambda enabled=False, **kwargs: flags(enabled=False, **kwargs))  # no driver
        stack.enter_context(flags(enabled=False))
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)  # so that `to` keeps the optimizer's parameters
        patch(torch.utils, weakref=SimpleNamespace(getweakrefs=lambda x: []))  # swapping refuses those of fake tensors
        stack.callback(_devices, 0)
        _devices(127)  # as many as the guard that stands for CUDA's claims
        yield stack.enter_context(PretendedGPU())
