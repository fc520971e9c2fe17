"""What `inspect` gives: plain values, which print as a summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import exp, isfinite, prod
from typing import Any, cast

from posthoc_uq.core.errors import printable
from posthoc_uq.core.tables import text_table
from posthoc_uq.files.records import HistoryRecord
from posthoc_uq.posteriors.block import BLOCKS
from posthoc_uq.posteriors.report import described_changes, described_output, described_promises
from posthoc_uq.posteriors.settings import BY_CLASS

_MAX_LISTED = 8  # names that a line lists


class Inspection(dict[str, Any]):
    """What a posterior's file holds: a dictionary of plain values, whose ``print`` is a readable summary."""

    def __init__(self, path: str, values: Mapping[str, Any], history: HistoryRecord) -> None:
        super().__init__(values)
        self._path, self._history = path, history

    def __str__(self) -> str:
        facts = [("file", f"{self._path}, {self['bytes']:,} bytes, format {self['format_version']}")]
        facts += [*_facts(self), *_described(self, self._history)]
        width = max(len(name) for name, _ in facts)
        lines = [printable(f"{name.ljust(width)}  {value}") for name, value in facts]
        lines += ["", text_table(*_layers(self))]
        reasons: dict[str, list[str]] = {}
        for name, reason in self["deterministic"].items():
            reasons.setdefault(reason, []).append(name)
        lines += [""] if reasons else []
        for reason, names in reasons.items():
            more = f", ... ({len(names)} in all)" if len(names) > 4 else ""
            lines.append(printable(f"without a posterior ({reason}): {', '.join(names[:4])}{more}"))
        return "\n".join(lines)


class EnsembleInspection(dict[str, Any]):
    """What the file of several networks holds, as `Inspection` of one."""

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._path = path

    def __str__(self) -> str:
        promises, networks = self["promises"], self["networks"]
        samples = "none" if promises is None else f"from {promises['samples']:,} held-out samples"
        facts = [
            ("file", f"{self._path}, {self['bytes']:,} bytes, format {self['format_version']}"),
            ("written by", f"posthoc_uq {self['library_version']}"),
            ("ensemble", f"{len(networks)} networks, likelihood {self['likelihood']['name']}"),
            ("temperature", _text(self["temperature"])),
            ("head", self["head"] or "each posterior's own"),
            ("promises", samples),
        ]
        lines = [printable(f"{name.ljust(11)}  {value}") for name, value in facts]
        for number, network in enumerate(networks):
            told = (
                str(network)
                if isinstance(network, Inspection)
                else f"without a posterior, {network['fingerprint']}"
            )
            lines += ["", f"network {number}", told]
        return "\n".join(lines)


def _facts(contents: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Facts about the posterior as a whole, each with its name."""
    prior, likelihood = contents["prior_precision"], contents["likelihood"]
    numbers = sum(_numbers(block) for block in contents["blocks"].values())
    options = {
        n: v for n, v in likelihood.items() if n not in ("name", "class", "attributes", "noise_variance")
    }
    details = [likelihood["class"]] if "class" in likelihood else []
    details += [f"{name} {_text(value)}" for name, value in options.items() if value not in ([], False)]
    yield "written by", f"posthoc_uq {contents['library_version']}"
    yield "method", contents["method"]
    yield "likelihood", ", ".join([likelihood["name"], *details])
    yield "parameters", f"{contents['parameters']:,} with a posterior, {numbers:,} numbers stored"
    yield "prior precision", "per layer" if isinstance(prior, Mapping) else _text(prior)
    yield "scale", _text(contents["scale"])
    if "residual_weight" in _tunable(contents):
        yield "residual weight", _text(contents["residual_weight"])
    if not contents["evidence"]["targets"]:  # those of a regression, whose outputs are no logits
        yield "temperature", _text(contents["temperature"])
    for name in BY_CLASS:
        if contents.get(name):
            yield name.replace("_", " "), _text(contents[name])
    if "noise_variance" in likelihood:
        values = [f"{value * contents['noise_scale']:.4g}" for value in likelihood["noise_variance"]]
        yield "noise variance", ", ".join(values[:8]) + (" ..." if len(values) > 8 else "")
    elif contents["noise_scale"] != 1:
        yield "noise scale", _text(contents["noise_scale"])


def _described(contents: Mapping[str, Any], history: HistoryRecord) -> Iterator[tuple[str, str]]:
    """How it was fitted, tuned and calibrated."""
    regression = bool(contents["evidence"]["targets"])
    for name, value in contents["evidence"].items():
        if regression or name in ("samples", "log_likelihood"):
            yield f"evidence, {name.replace('_', ' ')}", _text(value)
    for part in ("fit", "tuning"):
        for name, value in contents[part].items():
            label = f"fit, {name.replace('_', ' ')}" if part == "fit" else f"tuned, {name}"
            yield label, _text(value)
    head, faithful, calibration = history.head, history.faithful, history.calibration
    if head is not None:
        options = ", ".join(f"{option} {_text(value)}" for option, value in head.options.items())
        yield "head", f"{head.name} ({options})" if options else head.name
        yield "criterion", head.criterion
    if faithful is not None:
        setting = "prior precision" if "prior_precision" in _tunable(contents) else "scale"
        value = "per layer" if isinstance(faithful.value, Mapping) else _text(faithful.value)
        reached = f"{faithful.divergence:.3g}" if isfinite(faithful.divergence) else "infinitely many"
        yield (
            "faithful",
            f"{setting} {value}, temperature {_text(faithful.temperature)}, head {faithful.head}: {reached} of at most "
            f"{faithful.budget:g} nats from the model's own",
        )
    if calibration is not None:
        factor = f"{exp(calibration.alpha):.3g}"
        yield "moments head", f"standard deviations times {factor}, error left {calibration.residual:.0%}"
    if history.promises is not None:
        yield "promises", described_promises(history.promises, contents)
    if history.output is not None:
        yield "outputs", described_output(history.output)
    if history.inputs:
        yield "inputs", ", ".join(f"{name} {about.type}" for name, about in history.inputs.items())
    if history.changes is not None:
        yield "data since the fit", described_changes(history.changes)
    yield "fingerprint", contents["fingerprint"]
    if contents["buffers_fingerprint"] is not None:
        yield "fingerprint, buffers", contents["buffers_fingerprint"]
    if contents["others_fingerprint"] is not None:
        yield "fingerprint, other parameters", contents["others_fingerprint"]


def _tunable(contents: Mapping[str, Any]) -> frozenset[str]:
    """The hyperparameters that can be set for the file's blocks."""
    return frozenset[str]().union(*(BLOCKS[block["kind"]].tunable for block in contents["blocks"].values()))


def _layers(contents: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """A row for each layer: its weight, and what is stored of it."""
    prior: Any = contents["prior_precision"]
    block_of = {member: block for block in contents["blocks"].values() for member in block["members"]}
    header = ["layer", "kind", "weight", "bias", *(["prior"] if isinstance(prior, Mapping) else [])]
    header += ["stored as", "kept", "numbers", "format", "bytes"]
    rows: list[list[Any]] = []
    for name, layer in contents["layers"].items():
        block = block_of[name]
        sides, bias = "x".join(map(str, layer["weight_shape"])), "yes" if layer["bias"] else "no"
        row = [
            name,
            layer["kind"],
            sides,
            bias,
            *([float(prior[name])] if isinstance(prior, Mapping) else []),
        ]
        if block["members"][0] == name:
            formats = sorted({tensor["dtype"] for tensor in block["tensors"].values()})
            row += [block["kind"], _rank(block), _numbers(block), "/".join(formats), block["bytes"]]
        else:
            row += [f"with {block['members'][0]}", "", None, "", None]
        rows.append(row)
    return header, rows


def _rank(block: Mapping[str, Any]) -> str:
    """How much of a layer is kept: an INF block's directions, the size of a dense Fisher, or all."""
    attributes: Mapping[str, Any] = block["attributes"]
    if "input_directions" in attributes:
        return f"{attributes['output_directions']} x {attributes['input_directions']} directions"
    fisher: Mapping[str, Any] | None = block["tensors"].get("fisher")
    return "all" if fisher is None else "x".join(map(str, fisher["shape"]))


def _numbers(block: Mapping[str, Any]) -> int:
    return sum(prod(tensor["shape"]) for tensor in block["tensors"].values())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if len(items) > _MAX_LISTED and all(isinstance(item, str) for item in items):
            return f"{', '.join(items[:_MAX_LISTED])}, ... ({len(items)} in all)"
        return " ".join(map(_text, items)) or "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
