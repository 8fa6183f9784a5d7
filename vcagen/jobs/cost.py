"""Parameters and multiply-adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vcagen.networks.cost import Cost
from vcagen.paper.table import Row, markdown


def cost_table(title: str, costs: Sequence[tuple[Row, Cost]]) -> tuple[str, list[dict[str, Any]]]:
    """Costs beside the published columns, as Markdown and as values for JSON."""
    values = [
        {
            "name": row.name,
            "params": cost.params,
            "multiply_adds": cost.multiply_adds,
            "published": row.published,
            "note": row.note,
        }
        for row, cost in costs
    ]
    header = ["network", "params (M)", "published", "GFLOPs", "published", "FID-50K published"]
    cells = [
        [
            row.name,
            f"{cost.params / 1e6:.2f}",
            str(row.published.get("params", "")),
            f"{cost.multiply_adds / 1e9:.3f}",
            str(row.published.get("gflops", "")),
            str(row.published.get("fid", "")),
        ]
        for row, cost in costs
    ]
    if not any(row.published for row, _ in costs):
        keep = (0, 1, 3)
        header, cells = [header[i] for i in keep], [[line[i] for i in keep] for line in cells]
    notes = [f"{row.name}: {row.note}" for row, _ in costs if row.note]
    parts = [title, markdown(header, cells), "GFLOPs are 1e9 multiply-adds, as in the paper.", *notes]
    return "\n\n".join(part for part in parts if part), values
