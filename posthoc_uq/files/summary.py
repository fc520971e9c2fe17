"""What `inspect` gives: plain values, which print as a summary."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from typing import Any, cast

from posthoc_uq.core.errors import printable
from posthoc_uq.core.tables import text_table
from posthoc_uq.posteriors.block import BLOCKS
from posthoc_uq.posteriors.referral import rule_of
from posthoc_uq.posteriors.report import described_changes, described_output

_LISTED = 8  # names that a line lists


class Inspection(dict[str, Any]):
    """What a posterior's file holds: a dictionary of plain values, whose ``print`` is a readable summary.

    Args:
        path: of the file.
        values: see `posthoc_uq.files.loading.inspect`.
    """

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._path = path

    def __str__(self) -> str:
        return _described(self._path, self)


def _described(path: str, contents: Mapping[str, Any]) -> str:
    """The summary of a file in lines and a table of layers."""
    facts = _facts(path, contents)
    width = max(len(name) for name, _ in facts)
    text = [printable(f"{name.ljust(width)}  {value}") for name, value in facts]
    text += ["", text_table(*_layers(contents))]
    reasons: dict[str, list[str]] = {}
    for name, reason in contents["deterministic"].items():
        reasons.setdefault(reason, []).append(name)
    if reasons:
        text.append("")
    for reason, names in reasons.items():
        more = f", ... ({len(names)} in all)" if len(names) > 4 else ""
        text.append(printable(f"without a posterior ({reason}): {', '.join(names[:4])}{more}"))
    return "\n".join(text)


def _tunable(contents: Mapping[str, Any]) -> frozenset[str]:
    """The hyperparameters that can be set for the file's blocks."""
    return frozenset[str]().union(*(BLOCKS[block["kind"]].tunable for block in contents["blocks"].values()))


def _options(likelihood: Mapping[str, Any]) -> str:
    """The class of a user's likelihood, or the options of one of the package, but for the noise variance."""
    if "class" in likelihood:
        return f", {likelihood['class']}"
    own = {name: value for name, value in likelihood.items() if name not in ("name", "noise_variance")}
    return "".join(f", {name} {_text(value)}" for name, value in own.items() if value not in ([], False))


def _facts(path: str, contents: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is said of the posterior as a whole, each with its name."""
    prior: Any = contents["prior_precision"]
    likelihood: Mapping[str, Any] = contents["likelihood"]
    numbers = sum(_numbers(block) for block in contents["blocks"].values())
    weight = [("residual weight", f"{contents['residual_weight']:.6g}")]
    lines = [
        ("file", f"{path}, {contents['bytes']:,} bytes, format {contents['format_version']}"),
        ("written by", f"posthoc_uq {contents['library_version']}"),
        ("method", contents["method"]),
        ("likelihood", likelihood["name"] + _options(likelihood)),
        ("parameters", f"{contents['parameters']:,} with a posterior, {numbers:,} numbers stored"),
        ("prior precision", "per layer" if isinstance(prior, Mapping) else f"{prior:.6g}"),
        ("scale", f"{contents['scale']:.6g}"),
        *(weight if "residual_weight" in _tunable(contents) else []),
        ("temperature", f"{contents['temperature']:.6g}"),
    ]
    if "noise_variance" in likelihood:
        values = [f"{value * contents['noise_scale']:.4g}" for value in likelihood["noise_variance"]]
        lines.append(("noise variance", ", ".join(values[:8]) + (" ..." if len(values) > 8 else "")))
    elif contents["noise_scale"] != 1:
        lines.append(("noise scale", f"{contents['noise_scale']:.6g}"))
    evidence: dict[str, Any] = dict(contents["evidence"])
    if not evidence["targets"]:  # the other facts are of regressions
        evidence = {name: evidence[name] for name in ("samples", "log_likelihood") if name in evidence}
    for part, values in (("evidence", evidence), ("fit", contents["fit"])):
        lines += [(f"{part}, {name.replace('_', ' ')}", _text(value)) for name, value in values.items()]
    lines += [(f"tuned, {name}", _text(value)) for name, value in contents["tuning"].items()]
    lines += _predicted(contents)
    calibration: Mapping[str, Any] = contents["calibration"]
    if calibration:
        lines.append(
            (
                "moments head",
                f"standard deviations times {exp(calibration['alpha']):.3g}, error left {calibration['residual']:.0%}",
            )
        )
    referral: Mapping[str, Any] = contents["referral"]
    if referral:
        head_options: dict[str, Any] = dict(referral["head"])
        head = f"head {head_options.pop('head')}"
        if head_options:
            head += f" ({', '.join(f'{name} {_text(value)}' for name, value in head_options.items())})"
        lines.append(
            (
                "referral",
                f"{rule_of(referral)} (a share {referral['rate']:g} of "
                f"{referral['inputs']:,} inputs), {head}",
            )
        )
    if contents["output"]:
        lines.append(("outputs", described_output(contents["output"])))
    if contents["changes"]:
        lines.append(("data since the fit", described_changes(contents["changes"])))
    lines.append(("fingerprint", contents["fingerprint"]))
    if contents["buffers_fingerprint"] is not None:
        lines.append(("fingerprint, buffers", contents["buffers_fingerprint"]))
    return lines


def _predicted(contents: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Through which head the file predicts, how its hyperparameters were found, and how far it is from the network."""
    lines: list[tuple[str, str]] = []
    head: Mapping[str, Any] = contents["head"]
    if head:
        options = ", ".join(f"{name} {_text(value)}" for name, value in head["options"].items())
        shown = f"{head['name']} ({options})" if options else str(head["name"])
        lines += [("head", shown), ("criterion", str(head["criterion"]))]
    faithful: Mapping[str, Any] = contents["faithful"]
    if faithful:
        value: Any = faithful["value"]
        trained = "prior_precision" not in _tunable(contents)
        setting = "per layer" if isinstance(value, Mapping) else f"{value:.6g}"
        reached = f"{faithful['divergence']:.3g}" if "divergence" in faithful else "infinitely many"
        lines.append(
            (
                "faithful",
                f"{'scale' if trained else 'prior precision'} {setting}, temperature {faithful['temperature']:.6g}, "
                f"head {faithful['head']}: {reached} of at most {faithful['budget']:g} nats from the model's own",
            )
        )
    return lines


def _layers(contents: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """A row for each layer: its weight, and what is stored of it."""
    prior: Any = contents["prior_precision"]
    block_of = {member: name for name, block in contents["blocks"].items() for member in block["members"]}
    header = ["layer", "kind", "weight", "bias", *(["prior"] if isinstance(prior, Mapping) else [])]
    header += ["stored as", "kept", "numbers", "format", "bytes"]
    rows: list[list[Any]] = []
    for name, layer in contents["layers"].items():
        block_name = block_of.get(name)
        block: Mapping[str, Any] = contents["blocks"][block_name] if block_name is not None else {}
        row = [
            name,
            layer["kind"],
            "x".join(map(str, layer["weight_shape"])),
            "yes" if layer["bias"] else "no",
        ]
        if isinstance(prior, Mapping):
            row.append(float(prior[name]))
        if block_name is not None and block["members"][0] != name:
            rows.append([*row, f"with {block['members'][0]}", "", None, "", None])
            continue
        formats = sorted({tensor["dtype"] for tensor in block.get("tensors", {}).values()})
        stored = f"{block.get('kind', '')}"
        rows.append([*row, stored, _rank(block), _numbers(block), "/".join(formats), block.get("bytes")])
    return header, rows


def _rank(block: Mapping[str, Any]) -> str:
    """How much of a layer is kept: an INF block's directions, the size of a dense Fisher, or all."""
    attributes: Mapping[str, Any] = block.get("attributes", {})
    if "input_directions" in attributes:
        return f"{attributes['output_directions']} x {attributes['input_directions']} directions"
    shapes: Mapping[str, Any] = block.get("tensors", {})
    if "fisher" in shapes:
        return "x".join(map(str, shapes["fisher"]["shape"]))
    return "all" if shapes else ""


def _numbers(block: Mapping[str, Any]) -> int:
    total = 0
    for tensor in block.get("tensors", {}).values():
        count = 1
        for size in tensor["shape"]:
            count *= size
        total += count
    return total


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        items = [_text(item) for item in cast(list[Any], value)]
        if len(items) > _LISTED and all(isinstance(item, str) for item in cast(list[Any], value)):
            return f"{', '.join(items[:_LISTED])}, ... ({len(items)} in all)"
        return " ".join(items) or "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
