"""The networks of Table 1 that timm does not have, by name, registered with timm.

The settings are those of the public Agent Attention code (LeapLabTHU/Agent-Attention) with Visual-Contrast Attention in
the place of agent attention: with them, and with its depthwise convolution of the values, the parameters and
multiply-adds of all ten networks come out as the paper prints them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from vcagen.recognition.deit import ContrastVisionTransformer
from vcagen.recognition.pyramid import CSwinTransformer, PyramidVisionTransformer
from vcagen.recognition.swin import ContrastSwinTransformer

_PVT = {"embed_dims": (64, 128, 320, 512), "num_heads": (1, 2, 5, 8), "mlp_ratios": (8, 8, 4, 4)}
_CSWIN = {"embed_dims": (64, 128, 256, 512), "num_heads": (2, 4, 8, 16), "mlp_ratios": (4, 4, 4, 4)}
_SWIN_T = {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)}
_SWIN_S = {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)}
_SWIN_B = {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)}

MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "vca_deit_tiny_patch16_224": (ContrastVisionTransformer, {"embed_dim": 192, "num_heads": 3}),
    "vca_deit_small_patch16_224": (ContrastVisionTransformer, {"embed_dim": 384, "num_heads": 6}),
    "pvt_tiny": (PyramidVisionTransformer, {**_PVT, "depths": (2, 2, 2, 2)}),
    "pvt_small": (PyramidVisionTransformer, {**_PVT, "depths": (3, 4, 6, 3)}),
    "pvt_medium": (PyramidVisionTransformer, {**_PVT, "depths": (3, 4, 18, 3)}),
    "vca_pvt_tiny": (PyramidVisionTransformer, {**_PVT, "depths": (2, 2, 2, 2), "contrast_depths": (2, 2, 2, 2)}),
    "vca_pvt_small": (PyramidVisionTransformer, {**_PVT, "depths": (3, 4, 6, 3), "contrast_depths": (3, 4, 6, 3)}),
    "vca_pvt_medium": (PyramidVisionTransformer, {**_PVT, "depths": (3, 4, 18, 3), "contrast_depths": (3, 4, 18, 3)}),
    "vca_swin_tiny_patch4_window7_224": (ContrastSwinTransformer, {**_SWIN_T, "contrast_depths": (2, 2, 6, 0)}),
    "vca_swin_small_patch4_window7_224": (ContrastSwinTransformer, {**_SWIN_S, "contrast_depths": (2, 2, 0, 0)}),
    "vca_swin_base_patch4_window7_224": (ContrastSwinTransformer, {**_SWIN_B, "contrast_depths": (2, 2, 2, 0)}),
    "cswin_tiny": (CSwinTransformer, {**_CSWIN, "depths": (2, 4, 18, 1)}),
    "cswin_small": (CSwinTransformer, {**_CSWIN, "depths": (3, 6, 29, 2)}),
    "vca_cswin_tiny": (CSwinTransformer, {**_CSWIN, "depths": (2, 4, 18, 1), "contrast_depths": (2, 4, 0, 0)}),
    "vca_cswin_small": (CSwinTransformer, {**_CSWIN, "depths": (3, 6, 29, 2), "contrast_depths": (3, 6, 0, 0)}),
}
"""Name -> its class and the arguments that make it that network."""

_EVERYWHERE = {"input_size": (3, 224, 224), "fixed_input_size": True, "crop_pct": 0.9, "interpolation": "bicubic",
               "mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD, "num_classes": 1000}  # fmt: skip
_FAMILIES: dict[type[nn.Module], dict[str, Any]] = {
    ContrastVisionTransformer: {"first_conv": "patch_embed.proj", "classifier": "head"},
    ContrastSwinTransformer: {"first_conv": "patch_embed.proj", "classifier": "head.fc", "pool_size": (7, 7)},
    PyramidVisionTransformer: {"first_conv": "stages.0.embed", "classifier": "head", "pool_size": (7, 7)},
    CSwinTransformer: {"first_conv": "stages.0.embed", "classifier": "head", "pool_size": (7, 7)},
}
default_cfgs = generate_default_cfgs({name: {**_EVERYWHERE, **_FAMILIES[cls]} for name, (cls, _) in MODELS.items()})


def _entry_point(name: str) -> Callable[..., nn.Module]:
    cls, arguments = MODELS[name]

    def create(pretrained: bool = False, **options: Any) -> nn.Module:
        if pretrained and not (options.get("pretrained_cfg") or options.get("pretrained_cfg_overlay")):
            raise ValueError(
                f"pretrained: no weights of {name} are published; train it (docs/recognition.md), or give a file of "
                "yours by checkpoint_path"
            )
        features = {"out_indices": options.pop("out_indices", 3 if cls is ContrastVisionTransformer else (0, 1, 2, 3))}
        # As timm: features of Swin are those of its list of layers, NHWC.
        features |= {"flatten_sequential": True} if cls is ContrastSwinTransformer else {"feature_cls": "getter"}
        return build_model_with_cfg(cls, name, pretrained, feature_cfg=features, **{**arguments, **options})

    create.__name__ = name
    create.__doc__ = f"{name}, as the paper's Table 1 has it; see {cls.__name__} for further arguments."
    return create


for _name in MODELS:
    register_model(_entry_point(_name))
