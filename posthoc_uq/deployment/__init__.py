"""Predictions in production: `serve` over HTTP, `monitor` drift, `export` to `torch.export` and ONNX.

What needs the extra ``serve`` is imported from `posthoc_uq.deployment.serve`.
"""

from posthoc_uq.deployment.export import export, exportable
from posthoc_uq.deployment.monitor import (
    Drift,
    ScoreLog,
    Scores,
    drift_figure,
    drift_table,
    drifts,
    newest,
    read_scores,
)

__all__ = [
    "Drift",
    "ScoreLog",
    "Scores",
    "drift_figure",
    "drift_table",
    "drifts",
    "export",
    "exportable",
    "newest",
    "read_scores",
]
