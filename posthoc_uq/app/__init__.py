"""What a shell or a server runs: the command line, `serve`, `monitor`, `export`, an evaluation's page.

`OFFERED` says by file what programs take that read data and models as the command line does, serve, or watch drift.
"""

from posthoc_uq.core.registry import names_of

OFFERED = {
    "cli.main": "main",
    # a model as `--model` and its kin give it, and pictures as `--data` reads them
    "cli.options": "ModelSource WrongUsage",
    "cli.models": "TrainedModel read_state trained_model",
    "cli.transforms": "ImageTransform Preprocessing transform_of",
    "cli.images": "FolderImages ImageLoader image_files",
    "cli.labels": "folder_labels",
    "cli.commands": "process_group",
    "serve": "Service application",
    "requests": "Limits Refused",
    "scores": "ScoreLog Scores read_scores",
    "monitor": "Alarm Monitor Watched drift_figure monitor_for",
    "export": "exportable",
}
"""By file, the names that other programs take."""

__getattr__ = names_of(__name__, OFFERED)
