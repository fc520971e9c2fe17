"""Autograd's own gradients of a few samples, without any capture: the truth for the dry run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from posthoc_uq.curvature.capture import Owner, owners
from posthoc_uq.curvature.selection import Selection, asked_by_name, wanted_names
from posthoc_uq.curvature.uncovered import home_of, why_not_caught
from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.layers import WEIGHTED_MODULES
from posthoc_uq.loaders import Batch
from posthoc_uq.outputs import chosen_in
from posthoc_uq.replica import parameter_names, replicate

# Types of modules that are weighted layers, those whose uses cannot be followed included.
HOLD_WEIGHTS = (
    *WEIGHTED_MODULES,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.Bilinear,
    nn.MultiheadAttention,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class Reference:
    """Outputs and gradients of a probe batch by autograd alone, without any capture."""

    def __init__(self, model: nn.Module, probe: Batch, samples: int) -> None:
        self.samples = samples
        twin = replicate(model).requires_grad_(True)
        self._unused = (
            "not used in the forward pass" if chosen_in(twin) is None else "not used for the chosen outputs"
        )
        self.names = parameter_names(twin)
        self.order = {name: index for index, name in enumerate(self.names.values())}
        self.parameters = dict(twin.named_parameters())
        self._owners = owners(twin)
        self._modules = dict(twin.named_modules())
        try:
            self._differentiate(twin, probe)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            # The model changes the input of a frozen layer in place: fine for its user, who never asks for that
            # layer's gradient.
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
                self._differentiate(twin, probe)

    def _differentiate(self, twin: nn.Module, probe: Batch) -> None:
        samples, parameters = self.samples, list(twin.parameters())
        with torch.enable_grad():
            outputs = probe.call(twin)
            if outputs.ndim == 0 or outputs.shape[0] != samples:
                raise PosthocUQError(
                    f"The model gives outputs of shape {tuple(outputs.shape)} for {samples} samples; the "
                    f"first dimension must "
                    f"count the samples."
                )
            if not bool(torch.isfinite(outputs).all()):
                raise NonFiniteError("Batch 0: the model's outputs are not finite.")
            self.pull = self.cotangent(outputs)
            last = torch.zeros_like(self.pull)
            last[-1] = self.pull[-1]
            self.total = self._gradients(outputs, parameters, self.pull, retain=True)
            self.last = self._gradients(outputs, parameters, last, retain=False)

    @staticmethod
    def cotangent(outputs: Tensor) -> Tensor:
        """Fixed irregular numbers in the shape of the outputs; the same for every sample."""
        size = outputs[0].numel()
        row = torch.cos(1.0 + torch.arange(size, dtype=torch.float64, device="cpu") ** 2).to(outputs.dtype)
        return row.to(outputs.device).expand(outputs.shape[0], size).reshape(outputs.shape).clone()

    def _gradients(
        self, outputs: Tensor, parameters: Sequence[Tensor], pull: Tensor, retain: bool
    ) -> dict[str, Tensor | None]:
        gradients = torch.autograd.grad(outputs, parameters, pull, retain_graph=retain, allow_unused=True)
        return {self.names[id(p)]: g for p, g in zip(parameters, gradients, strict=True)}

    def _owner(self, parameter: str) -> Owner:
        return self._owners[id(self.parameters[parameter])][0]

    def _home(self, parameter: str) -> tuple[str, nn.Module]:
        return home_of(self._owner(parameter), self._modules)

    def _names_of(self, parameter: str) -> list[str]:
        """The modules that hold a parameter."""
        return [name for name, _, _ in self._owners[id(self.parameters[parameter])]]

    def why_not_caught(self, parameter: str) -> str:
        """See `uncovered.why_not_caught`."""
        return why_not_caught(parameter, self._owner(parameter), self._modules)

    def _used(self, name: str) -> bool:
        gradient = self.total[name]
        return gradient is not None and bool((gradient != 0).any())

    def _missed(self, reached: set[str]) -> list[tuple[str, str]]:
        missed: list[tuple[str, str]] = []
        for name, gradient in self.total.items():
            module_name, module = self._home(name)
            if (
                gradient is None
                or gradient.ndim < 2
                or name in reached
                or not isinstance(module, HOLD_WEIGHTS)
            ):
                continue
            if self._used(name):
                missed.append((module_name or name, name))
        return missed

    def missed_weights(self, reached: set[str], selection: Selection) -> list[tuple[str, str]]:
        """The weights asked for that have a gradient but were not seen in use, each after its module's name."""
        missed = self._missed(reached)
        if selection == "all":
            return missed
        if selection == "last":  # a missed layer after all caught ones would be the last
            last_reached = max((self.order[name] for name in reached), default=-1)
            return [
                (module, name)
                for module, name in missed
                if self.order[name] > last_reached and isinstance(self._home(name)[1], WEIGHTED_MODULES)
            ]
        if callable(selection):
            return [(module, name) for module, name in missed if selection(module, self._home(name)[1])]
        names = wanted_names(selection) or []
        return [(module, name) for module, name in missed if asked_by_name(names, [module])]

    def holds_missed(self, want: str) -> bool:
        """Whether a module of that name, prefix or pattern holds weights that were not seen in use."""
        return any(asked_by_name([want], [module]) for module, _ in self._missed(set()))

    def asked_for(self, selection: Selection) -> dict[str, str]:
        """The used parameters that the selection covers (for ``"all"`` and names), with the types of their modules."""
        wanted = wanted_names(selection)
        kinds: dict[str, str] = {}
        for name, gradient in self.total.items():
            module_name, module = self._home(name)
            selected = selection == "all" if wanted is None else asked_by_name(wanted, [module_name, name])
            if selected and gradient is not None:
                kinds[name] = type(module).__name__
        return kinds

    def deterministic(self, covered: set[str], failures: dict[str, str]) -> dict[str, str]:
        """Every parameter without a posterior, with the reason."""
        reasons: dict[str, str] = {}
        for name, gradient in self.total.items():
            if name in covered:
                continue
            module_name, module = self._home(name)
            if gradient is None:
                reasons[name] = self._unused
            elif failing := next(
                (n for n in (module_name, name, *self._names_of(name)) if n in failures), None
            ):
                reasons[name] = f"skipped: {failures[failing]}"
            elif isinstance(module, WEIGHTED_MODULES):
                reasons[name] = "not among the chosen layers"
            else:
                reasons[name] = f"{type(module).__name__} is kept deterministic"
        return reasons
