"""What a network costs: parameters, multiply-adds, bytes of training. Nothing is computed: meta tensors are enough."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vcagen.networks.attention import VisualContrastAttention
from vcagen.networks.dit import DiT


@dataclass(frozen=True)
class Cost:
    """Cost of one image through a network."""

    params: int
    """Parameters, the fixed position table among them (as the DiT and VCA tables)."""
    multiply_adds: int
    """Multiply-adds of a forward pass as the paper's equations stand; the tables print them, in 1e9, as GFLOPs."""

    def __str__(self) -> str:
        return f"{self.params / 1e6:.2f} M parameters, {self.multiply_adds / 1e9:#.4g} GFLOPs"


def measure(model: nn.Module, inputs: tuple[Tensor, ...] | None = None) -> Cost:
    """Cost of a network, on whatever device it is (meta is quickest), with `inputs` of one image; a DiT has its own.

    Multiply-adds are counted with unfused attention, since the counter does not see inside fused attention on CPU.
    """
    if inputs is None:
        assert isinstance(model, DiT)
        parameter = next(model.parameters())
        inputs = _inputs(model, 1, parameter.device, parameter.dtype)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs)
    return Cost(
        sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2 + _spared_multiply_adds(model)
    )


def state_bytes(model: nn.Module, num_emas: int) -> int:
    """Bytes that training holds between steps: float32 weights, gradients, both moments of AdamW, and each EMA."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in model.parameters())
    return 4 * (everything + 3 * trained + num_emas * everything)


def activation_bytes(model: DiT, batch: int, precision: str = "no") -> int:
    """Bytes that a forward pass of `batch` images keeps for the backward pass, under autocast to bf16 or fp16 if so.

    The pass is made with fake tensors, which take no memory.
    """
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # storages must not be freed, or their keys would come again
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with FakeTensorMode():
        fake = {name: torch.empty(p.shape, requires_grad=p.requires_grad) for name, p in model.named_parameters()}
        own = {tensor.untyped_storage()._cdata for tensor in fake.values()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage.nbytes()
                alive.append(tensor)
            return tensor

        inputs = _inputs(model, batch, torch.device("cpu"), torch.float32)
        autocast = torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
            torch.func.functional_call(model, fake, inputs)
    return sum(kept.values())


def _inputs(model: DiT, batch: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.zeros(batch, model.in_channels, *model.input_size, device=device, dtype=dtype)
    return x, torch.zeros(batch, device=device), torch.zeros(batch, device=device, dtype=torch.int64)


def _spared_multiply_adds(model: nn.Module) -> int:
    """Those of the paper's Stage I, 4 n T D, beyond ours, 3 n T D: it applies both maps to v, we their difference."""
    return sum(
        module.num_contrast_tokens * module.num_tokens * module.num_heads * module.head_dim
        for module in model.modules()
        if isinstance(module, VisualContrastAttention) and module.stage1 == "contrast"
    )
