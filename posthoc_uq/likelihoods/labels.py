"""Labels of classes in the forms that loaders give (indices, floats 0 and 1 of one logit, soft labels), and `Layout`:
where outputs and labels have their positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError

NOT_SOFT = "Soft labels must be probabilities: not negative, and of sum 1 in every row; some are not."
NOT_SHARES = "Labels for likelihood={!r} must be 0 or 1, or probabilities between them (soft labels)."
MAX_SUM_ERROR = 1e-4  # how far a sum of probabilities may be from 1; more in half precision


def are_soft(targets: Tensor, outputs: Tensor) -> bool:
    """Whether targets are probabilities of the classes (soft labels): floats in the shape of the outputs, or of the
    predicted probabilities.
    """
    return targets.is_floating_point() and targets.shape == outputs.shape


def are_probabilities(rows: Tensor) -> Tensor:
    """A flag on the device, true where all rows ``(batch, classes)`` are probabilities of sum 1, up to rounding."""
    tolerance = max(MAX_SUM_ERROR, 4 * torch.finfo(rows.dtype).eps)
    sums = rows.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32))
    return ((rows >= 0).all(1) & ((sums - 1).abs() <= tolerance)).all()


def checked_soft(targets: Tensor) -> Tensor:
    """The soft labels.

    Raises:
        PosthocUQError: they are no probabilities.
    """
    if not bool(are_probabilities(targets)):
        raise PosthocUQError(NOT_SOFT)
    return targets


def are_whole(targets: Tensor) -> bool:
    """Whether labels are whole numbers, in whatever type; waits for the device where they are floats."""
    return not targets.is_floating_point() or bool((targets == targets.round()).all())


def refuse_soft(targets: Tensor) -> None:
    """Refuse labels, or shares of labels, between 0 and 1; whole ones are one label, in whatever form they come.

    Raises:
        PosthocUQError: there are some.
    """
    if not are_whole(targets):
        raise PosthocUQError(
            "A promise is about labels, and some of these targets are probabilities (soft labels), of which none is "
            "the right one. Give labels, or promise for the most probable one: batch_to_targets=lambda batch: "
            "batch[1].argmax(1), of labels of one logit each batch[1].round()."
        )


def binary_labels(targets: Tensor) -> Tensor:
    """Labels of one logit, without a second dimension of 1, as integers where they are whole numbers; else, of soft
    ones, the probabilities of both classes, ``(batch, 2)``.
    """
    flat = targets.squeeze(1) if targets.ndim == 2 and targets.shape[1] == 1 else targets
    if not flat.is_floating_point() or flat.ndim != 1:
        return flat
    return flat.long() if are_whole(flat) else torch.stack([1 - flat, flat], 1)


def soft_log_prob(targets: Tensor, log_probs: Tensor) -> Tensor:
    """``sum_c t_c log p_c``, ``(batch,)``; a class of share zero adds nothing."""
    shares = targets.to(log_probs)
    return torch.where(shares > 0, shares * log_probs, torch.zeros_like(log_probs)).sum(-1)


def in_whole_numbers(targets: Tensor) -> str:
    """Advice on labels that are refused, but are whole numbers of another type or shape, or one-hot; else nothing."""
    if not targets.is_floating_point() and targets.ndim == 2 and targets.shape[1] > 1:
        one_hot = bool(((targets == 0) | (targets == 1)).all()) and bool((targets.sum(1) == 1).all())
        return " They are one-hot: pass y.argmax(1)." if one_hot else ""
    floats, column = targets.is_floating_point(), targets.ndim > 1 and targets.shape[1] == 1
    if (not floats and not column) or (floats and not bool((targets == targets.round()).all())):
        return ""
    change = f"{'.long()' if floats else ''}{'.squeeze(1)' if column else ''}"
    return f" They are whole numbers: pass y{change}, or batch_to_targets=lambda batch: batch[1]{change}."


def from_one(targets: Tensor, classes: int) -> str:
    """Advice on labels that run from 1 to the number of classes; else nothing."""
    counted = bool(targets.min() == 1) and bool(targets.max() == classes)
    return " If they count from 1, pass y - 1." if counted else ""


def outside(targets: Tensor, classes: int) -> Tensor:
    """Which labels are none of the classes. As int64: torch compares bytes with a number modulo 256."""
    labels = targets.long()
    return (labels < 0) | (labels >= classes)


@dataclass(frozen=True)
class Layout:
    """Where outputs of more than two dimensions have what is predicted at each position: classes, labels or values.

    Positions (pixels, tokens, times) are what is left of the shape; as rows they are in the order of memory, the last
    dimension fastest.

    Attributes:
        class_dim: 1 for outputs ``(samples, classes, *positions)``, -1 for ``(samples, *positions, classes)``.
    """

    class_dim: int = 1

    def classes(self, outputs: Tensor) -> int:
        """The number of classes, labels or values at a position."""
        return outputs.shape[self.class_dim]

    def positions(self, outputs: Tensor) -> tuple[int, ...]:
        """The sizes of the dimensions that count positions."""
        shape = tuple(outputs.shape[1:])
        return shape[1:] if self.class_dim == 1 else shape[:-1]

    def rows(self, outputs: Tensor) -> Tensor:
        """Outputs ``(samples, ...)`` as ``(samples * positions, classes)``."""
        last = outputs.movedim(1, -1) if self.class_dim == 1 else outputs
        return last.reshape(-1, self.classes(outputs))

    def whole(self, rows: Tensor, positions: tuple[int, ...]) -> Tensor:
        """Rows ``(samples * positions, classes)`` in the shape of the outputs; the reverse of `rows`."""
        spread = rows.reshape(-1, *positions, rows.shape[-1])
        return spread.movedim(-1, 1) if self.class_dim == 1 else spread

    def check(self, outputs: Tensor) -> None:
        """Refuse outputs of a shape that has no positions in this layout.

        Raises:
            PosthocUQError: it has none.
        """
        if 0 in outputs.shape:
            raise PosthocUQError(f"Outputs of shape {tuple(outputs.shape)} have no numbers.")

    def fits(self, outputs: Tensor, targets: Tensor) -> bool:
        """Whether targets are of these positions."""
        return targets.ndim == outputs.ndim and self.positions(targets) == self.positions(outputs)

    def counts(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Which positions count, ``(samples, positions)`` of booleans: all that have a target, or without targets could
        have one.
        """
        if targets is not None:
            return self.counted(targets).to(outputs.device).flatten(1)
        sizes = outputs.shape[0], prod(self.positions(outputs))
        return torch.ones(sizes, dtype=torch.bool, device=outputs.device)

    def counted(self, targets: Tensor) -> Tensor:
        """Which targets count, ``(samples, *positions)`` of booleans in the order of the loader: those of a position
        where any number is one.
        """
        return ~targets.isnan().all(self.class_dim)

    def ignoring(self, targets: Tensor, ignored: Tensor) -> Tensor:
        """Targets of which some, ``(samples, *positions)`` of booleans in the order of the loader, do not count."""
        targets = targets if targets.is_floating_point() else targets.float()
        return targets.masked_fill(ignored.to(targets.device).unsqueeze(self.class_dim), torch.nan)

    def without(self, targets: Tensor, ignored: Tensor) -> Tensor:
        """Targets of which some, ``(samples, *positions)``, have the weight 0 and may be anything, as ones that any
        likelihood takes.
        """
        return targets.masked_fill(ignored.to(targets.device).unsqueeze(self.class_dim), 1)

    def shifted(self, values: Tensor) -> Tensor:
        """Values of targets in the order of the loader, ``(samples, positions)``, at the positions that predict these
        targets.
        """
        return values

    def attended(self, mask: Tensor) -> Tensor:
        """Which tokens count by an attention mask, ``(samples, tokens)`` of booleans in the order of labels."""
        return mask != 0


@dataclass(frozen=True)
class LabelLayout(Layout):
    """The layout of classes, and which labels belong to which position.

    Attributes:
        class_dim: see `Layout`.
        ignore_index: the label of a position that does not count, a class or not.
        next_token: the outputs at position t predict the label at t + 1; those at the last position predict nothing
            that is known.
    """

    ignore_index: int = -100
    next_token: bool = False

    def check(self, outputs: Tensor) -> None:
        """Refuse outputs of a shape that has no positions in this layout.

        Raises:
            PosthocUQError: there are fewer than two classes, no position, or not one dimension of tokens.
        """
        shape, where = tuple(outputs.shape), f"class_dim={self.class_dim}"
        if self.class_dim == 1 and shape[1] == 1 and 0 not in shape:
            raise PosthocUQError(
                f"Outputs of shape {shape} have one class. One logit of each position is likelihood='binary'; where "
                f"the classes are in the last dimension, pass likelihood=uq.Categorical(class_dim=-1)."
            )
        if self.classes(outputs) < 2 or 0 in shape:
            raise PosthocUQError(
                f"Outputs of shape {shape} have {self.classes(outputs)} classes with {where}; there must be at least "
                f"2, and a position. Say where the classes are: likelihood=uq.Categorical(class_dim=1) for (samples, "
                f"classes, *positions), class_dim=-1 for (samples, *positions, classes)."
            )
        if self.next_token and outputs.ndim != 3:
            raise PosthocUQError(
                f"next_token=True needs outputs with one dimension of tokens, such as (samples, tokens, classes), and "
                f"the model gives {shape}."
            )

    def shape_of_labels(self, outputs: Tensor) -> tuple[int, ...]:
        """``(samples, *positions)``."""
        return (outputs.shape[0], *self.positions(outputs))

    def check_labels(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse labels of a shape or type that do not fit.

        Raises:
            PosthocUQError: they are neither integers, ``(samples, *positions)``, nor probabilities in the shape of the
                outputs.
        """
        if are_soft(targets, outputs):
            if self.next_token:
                raise PosthocUQError(
                    "next_token=True shifts labels to the position before, and probabilities of a token (soft labels) "
                    "belong to the outputs at their own position; leave next_token out."
                )
            return
        wanted = self.shape_of_labels(outputs)
        if tuple(targets.shape) == wanted and not targets.is_floating_point():
            return
        other = LabelLayout(-self.class_dim)
        advice = (
            f" They would fit class_dim={other.class_dim}: likelihood=uq.Categorical(class_dim={other.class_dim})."
            if tuple(targets.shape) == other.shape_of_labels(outputs)
            else in_whole_numbers(targets)
            if tuple(targets.shape) in (wanted, (wanted[0], 1, *wanted[1:]))
            else ""
        )
        raise PosthocUQError(
            f"Outputs of shape {tuple(outputs.shape)} with class_dim={self.class_dim} need integer labels of shape "
            f"{wanted}, not {targets.dtype} of shape {tuple(targets.shape)}.{advice}"
        )

    def fault(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A flag on the device: whether a label is neither a class nor ignored; of soft labels whether those of a
        position are neither probabilities nor all zero.
        """
        if are_soft(targets, outputs):
            rows = self.rows(targets)
            filled = rows.masked_fill((rows == 0).all(1, keepdim=True), 1 / rows.shape[1])
            return ~are_probabilities(filled)
        return self._outside(targets, self.classes(outputs)).any()

    def _outside(self, targets: Tensor, classes: int) -> Tensor:
        return outside(targets, classes) & (targets.long() != self.ignore_index)

    def wrong_labels(self, targets: Tensor, classes: int) -> str:
        """What an error says of labels with a `fault`."""
        if targets.is_floating_point():
            return f"{NOT_SOFT} A position that does not count has zeros alone."
        wrong = int(targets[self._outside(targets, classes)].long().max())
        counted = targets[targets.long() != self.ignore_index]
        return (
            f"Labels run from {int(targets.min())} to {int(targets.max())}, but the model has {classes} outputs; "
            f"labels must lie in 0..{classes - 1}, or be ignore_index={self.ignore_index}. If {wrong} marks positions "
            f"that do not count, say so: likelihood=uq.Categorical(..., ignore_index={wrong})."
            f"{from_one(counted, classes)}"
        )

    def labels(self, outputs: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
        """The label of every position and whether it counts, each ``(samples, positions)``, for labels
        ``(samples, *positions)`` in the order of the loader. Labels that do not count are 0. Of soft labels, in the
        shape of the outputs, the most probable class.

        Without targets every position counts that could have a label.
        """
        samples, positions = outputs.shape[0], prod(self.positions(outputs))
        if targets is not None and are_soft(targets, outputs):
            rows = self.rows(targets.to(outputs.device))
            return rows.argmax(1).reshape(samples, positions), rows.any(1).reshape(samples, positions)
        if targets is None:
            labels = torch.zeros(samples, positions, dtype=torch.int64, device=outputs.device)
            counted = torch.ones_like(labels, dtype=torch.bool)
        else:
            labels = targets.to(outputs.device).long().reshape(samples, positions)
            counted = labels != self.ignore_index if outputs.ndim > 2 else torch.ones_like(labels).bool()
        labels, counted = self.shifted(labels), self.shifted(counted)
        # clamped: `fault` may not have been read yet, and on CUDA an index out of range ends the process
        return labels.clamp(0, self.classes(outputs) - 1).masked_fill(~counted, 0), counted

    def fits(self, outputs: Tensor, targets: Tensor) -> bool:
        return tuple(targets.shape) == self.shape_of_labels(outputs) or are_soft(targets, outputs)

    def counts(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        return self.labels(outputs, targets)[1]

    def attended(self, mask: Tensor) -> Tensor:
        """See `Layout`; of outputs for the next token both must be attended."""
        attended = mask != 0
        return attended & attended.roll(1, 1) if self.next_token else attended

    def shifted(self, values: Tensor) -> Tensor:
        """Values of labels in the order of the loader, ``(samples, positions)``, at the positions that predict these
        labels; a position without a label has 0.
        """
        if not self.next_token:
            return values
        values = values.roll(-1, 1)
        values[:, -1] = 0
        return values

    def counted(self, targets: Tensor) -> Tensor:
        """Which labels count, ``(samples, *positions)`` of booleans in the order of the loader."""
        return (
            targets.any(self.class_dim)
            if targets.is_floating_point()
            else targets.long() != self.ignore_index
        )

    def ignoring(self, targets: Tensor, ignored: Tensor) -> Tensor:
        """Labels of which some, ``(samples, *positions)`` of booleans in the order of the loader, do not count."""
        ignored = ignored.to(targets.device)
        if targets.is_floating_point():
            return targets.masked_fill(ignored.unsqueeze(self.class_dim), 0.0)
        return targets.long().masked_fill(ignored, self.ignore_index)

    def without(self, targets: Tensor, ignored: Tensor) -> Tensor:
        return self.ignoring(targets, ignored)

    def soft_rows(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Soft labels as rows ``(samples * positions, classes)``; None of others."""
        return self.rows(targets) if are_soft(targets, outputs) else None

    def targets(self, labels: Tensor, positions: tuple[int, ...]) -> Tensor:
        """Labels of positions ``(samples, positions)`` as a loader gives them, ``(samples, *positions)``; the reverse
        of `labels`.
        """
        if self.next_token:
            labels = labels.roll(1, 1)
        return labels.reshape(labels.shape[0], *positions)


@dataclass(frozen=True)
class BinaryLayout(LabelLayout):
    """The layout of one logit a position, and of the two classes that come of it. Labels have the shape of the logits:
    0, 1 or between, or NaN where one is not there.
    """

    def fits(self, outputs: Tensor, targets: Tensor) -> bool:
        return tuple(targets.shape) == self._shape(outputs)

    def _shape(self, outputs: Tensor) -> tuple[int, ...]:
        samples, *positions = self.shape_of_labels(outputs)
        return (samples, 1, *positions) if self.class_dim == 1 else (samples, *positions, 1)

    def check_labels(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse labels of another shape.

        Raises:
            PosthocUQError: they are not shaped like the logits.
        """
        if not self.fits(outputs, targets):
            raise PosthocUQError(
                f"Labels of one logit a position must have its shape, {self._shape(outputs)}, not "
                f"{tuple(targets.shape)}."
            )

    def fault(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((targets < 0) | (targets > 1)).any()

    def wrong_labels(self, targets: Tensor, classes: int) -> str:
        return NOT_SHARES.format("binary")

    def labels(self, outputs: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `LabelLayout`; a probability above 1/2 is the label 1."""
        samples, positions = outputs.shape[0], prod(self.positions(outputs))
        if targets is None:
            labels = torch.zeros(samples, positions, dtype=torch.int64, device=outputs.device)
            return labels, torch.ones_like(labels).bool()
        flat = targets.to(outputs.device).reshape(samples, positions)
        return (flat > 0.5).long(), ~flat.isnan()

    def soft_rows(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        known = targets.nan_to_num(0.0) if targets.is_floating_point() else targets
        if are_whole(known):
            return None
        rows = self.rows(known)
        return torch.cat([1 - rows, rows], 1)

    def counted(self, targets: Tensor) -> Tensor:
        return Layout.counted(self, targets)

    def ignoring(self, targets: Tensor, ignored: Tensor) -> Tensor:
        return Layout.ignoring(self, targets, ignored)

    def without(self, targets: Tensor, ignored: Tensor) -> Tensor:
        return Layout.without(self, targets, ignored)
