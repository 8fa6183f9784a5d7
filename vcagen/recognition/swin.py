"""Swin (arXiv 2103.14030) with Visual-Contrast Attention over whole stages in its first blocks; others keep windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock
from torch import Tensor

from vcagen.recognition.block import GridBlock, contrast_block, contrast_plan, refuse, undecayed

NOT_OURS = ("attn_drop_rate", "proj_drop_rate", "head_dim", "weight_init")


class ContrastSwinTransformer(SwinTransformer):  # type: ignore[misc]  # timm has no types
    """Swin whose first blocks of each stage attend to the whole stage: no window, shift, mask or position table.

    Args:
        contrast_depths: how many blocks of each stage have Visual-Contrast Attention.
        contrast_grids: rows and columns of their contrast tokens, by stage, or one number for both.
        attention_options: further options of `VisualContrastAttention`.
        options: those of timm's SwinTransformer.

    Raises:
        ValueError: contrast grids that are not possible, an option of timm's plain attention, or, also in `forward`, a
            size that the windows do not divide.
    """

    def __init__(
        self,
        *,
        contrast_depths: Sequence[int],
        contrast_grids: Sequence[int | Sequence[int]] = (3, 4, 7, 7),
        attention_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        refuse(options, NOT_OURS)
        super().__init__(**options)
        depths = [len(stage.blocks) for stage in self.layers]
        for (stage, position), grid in contrast_plan(depths, contrast_depths, contrast_grids).items():
            blocks = self.layers[stage].blocks
            blocks[position] = contrast_block(
                GridBlock, blocks[position], grid_size=blocks[position].input_resolution, contrast_grid=grid,
                block_index=sum(depths[:stage]) + position, attention_options=attention_options,
            )  # fmt: skip
        for block in self._windowed():
            _check_windows(block.input_resolution, block.window_size)
            block.register_forward_pre_hook(_check_input)

    def _windowed(self) -> list[Any]:
        return [block for block in self.modules() if isinstance(block, SwinTransformerBlock)]

    def set_input_size(self, *sizes: Any, **more: Any) -> None:
        """As timm's, and refuses windows that do not divide the new size."""
        super().set_input_size(*sizes, **more)
        for block in self._windowed():
            _check_windows(block.input_resolution, block.window_size)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are not decayed."""
        return super().no_weight_decay() | undecayed(self)


def _check_input(block: Any, inputs: tuple[Tensor, ...]) -> None:
    _check_windows(inputs[0].shape[1:3], block.window_size)


def _check_windows(grid_size: Sequence[int], window_size: Sequence[int]) -> None:
    if any(side % window for side, window in zip(grid_size, window_size, strict=True)):
        (height, width), (rows, columns) = grid_size, window_size
        raise ValueError(
            f"img_size: windows of {rows} x {columns} do not divide the {height} x {width} tokens of a stage; "
            f"choose sides that are multiples of {32 * rows}, or another window_size"
        )
