"""The one table of what each field of a description may be, for posteriors and for checkpoints.

`check_posterior` and `check_checkpoint` are called both when a file is read and when it is written, so that no file is
written that could not be read again. ``consistency`` checks fields against each other, and ``numbers`` the numbers of
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from posthoc_uq.core.options import (
    AnyNumber,
    ByName,
    Field,
    Flag,
    Items,
    Named,
    NumberField,
    OneOf,
    Plain,
    Record,
    Simple,
    Text,
    Whole,
    maybe,
    number_or_named,
    or_empty,
)
from posthoc_uq.files import schema
from posthoc_uq.layers.layer import KINDS
from posthoc_uq.likelihoods import LIKELIHOODS
from posthoc_uq.likelihoods.prediction import SCORES
from posthoc_uq.likelihoods.selective import QUANTILES
from posthoc_uq.posteriors.block import BLOCKS, FAMILIES, LARGEST
from posthoc_uq.posteriors.features import SOURCES
from posthoc_uq.posteriors.settings import ABOUT, HEAD_CRITERIA, HEADS, NOVELTIES

_ANY = 1e300
_POSITIVE = NumberField(1 / LARGEST, LARGEST)
_TEMPERATURE = ABOUT["temperature"].bounds
_SHARE = NumberField(0.0, 1.0)
_COUNT = Whole(1)
_SUM = NumberField(-_ANY, _ANY)
_NAME = Text()
_NAMES = Items(_NAME, most=2**20)
_FORMAT = Text(tuple(schema.DTYPES))
_DIGEST = Text(pattern="[0-9a-f]{64}")
_HEAD = Text(HEADS)
_HASH = Whole(-(2**63), 2**64)

_LAYER: dict[str, Field] = {
    "kind": Text(tuple(KINDS)),
    "weight": _NAME,
    "bias": _NAME,
    "groups": Whole(1, 2**31),
    "outputs": Whole(1, 2**31),
    "inputs": Whole(1, 2**40),
    "weight_shape": Items(Whole(1, 2**31), 2, 5),
}


class _Block(Field):
    """A block of one of the kinds that are registered, with the attributes that its class declares."""

    def check(self, value: Any, where: str) -> None:
        kinds: dict[str, Field] = {
            kind: Record(
                {
                    "kind": Text((kind,)),
                    "members": Items(_NAME, 1),
                    "attributes": Record(block_class.fields, block_class.optional_fields),
                    "dtypes": Named(_FORMAT),
                }
            )
            for kind, block_class in BLOCKS.items()
        }
        ByName("kind", kinds).check(value, where)


_FEATURES = Record(
    {
        "attributes": Record(
            {
                "layer": Record({"name": _NAME, **_LAYER}),
                "source": Text(SOURCES),
                "samples": _COUNT,
                "smoothing": NumberField(1e-12, 1e12),
                "classes": Whole(1, 2**31),
                "width": Whole(1, 2**40),
                "rank": Whole(0, 2**40),
            },
            {"totals": Flag()},
        ),
        "dtypes": Named(_FORMAT),
    }
)

_LIKELIHOOD = OneOf(
    lambda value: isinstance(value, dict) and "class" in value,
    (
        ByName(
            "name",
            {
                name: Record({"name": _NAME, **kind.fields}, kind.optional_fields)
                for name, kind in LIKELIHOODS.items()
            },
        ),
        # a user's own: these texts are compared with the object passed to `load`, and never imported
        Record(
            {
                "name": Text(longest=200),
                "class": Text(pattern=r"[\w.<>]+:[\w.<>]+", longest=1000),
                "attributes": Named(Plain()),
            }
        ),
    ),
)

_HYPERPARAMETERS: dict[str, Field] = {
    name: number_or_named(about.bounds) if about.by_layer else about.bounds for name, about in ABOUT.items()
}

_EVIDENCE = Record(
    {
        "samples": _COUNT,
        "squared_residuals": NumberField(0.0, _ANY),
        "targets": Whole(0),
        "noise_power": Whole(0, 2),
    },
    {"log_likelihood": _SUM, "weight": NumberField(1e-300, _ANY)},
)

_FAITHFUL = Record(
    {
        "head": _HEAD,
        "value": number_or_named(_POSITIVE),
        "temperature": _TEMPERATURE,
        "network_temperature": _TEMPERATURE,
        "budget": NumberField(1e-300, _ANY),
    },
    {
        "divergence": _SUM,
        "settings": Record(
            {},
            {name: about.bounds for name, about in ABOUT.items() if about.of_weights and not about.by_layer},
        ),  # older files lack it
    },
)

_CALIBRATION = Record(
    {
        "alpha": NumberField(-40.0, 40.0),
        "beta": NumberField(-10.0, 10.0),
        "residual": NumberField(0.0, _ANY),
        "before": NumberField(0.0, _ANY),
        "n_mc": Whole(2),
        "head": Named(Plain()),
        "posterior": Record({}, _HYPERPARAMETERS),
    }
)

_THRESHOLDS: dict[str, Field] = {
    "rate": _SHARE,
    "inputs": _COUNT,
    "head": Named(Plain(), {"head": _HEAD}),
    "posterior": Record({}, _HYPERPARAMETERS),
}

_REFERRAL = OneOf(
    lambda value: isinstance(value, dict) and "scores" in value,
    (
        Record({"score": Text(SCORES), "threshold": NumberField(-inf, inf), **_THRESHOLDS}),
        Record(
            {
                "scores": Record(
                    {},
                    dict.fromkeys(
                        SCORES, Record({"threshold": _SUM, "quantiles": Items(_SUM, 1, QUANTILES)})
                    ),
                ),
                "shares": Items(_SHARE, 1, QUANTILES),
                **_THRESHOLDS,
            }
        ),
    ),
)

_CHANGES = Record(
    {
        **{name: Whole(0) for name in ("updates", "added", "removals", "removed")},
        "digest": _DIGEST,
        "balance": _HASH,
        "last": _HASH,
    },
    {name: NumberField(0.0, 1.0) for name in ("outside", "outside before")},
)

_OUTPUT = OneOf(
    lambda value: 0 if not isinstance(value, dict) or "name" in value else 1 + ("index" in value),
    tuple(
        Record({kind: form, "guessed": Flag()})
        for kind, form in (
            ("name", _NAME),
            ("function", Text(longest=200)),
            ("index", Whole(-(2**31), 2**31)),
        )
    ),
)

_HISTORY = Record(
    {
        "fit": Named(
            Plain(finite=False),  # the losses of a training may be infinite
            {
                "images": _NAME,
                "image size": Whole(1, 2**14),
                "image mean": Items(NumberField(-LARGEST, LARGEST), most=1024),
                "image std": Items(NumberField(-LARGEST, LARGEST), most=1024),
                "class names": _NAMES,
                "table classes": _NAMES,
                "last layer": _NAME,
                "novelty": _NAME,
                "prior body variance": NumberField(0.0, LARGEST),
            },
        ),
        "deterministic": Named(_NAME),
        "tuning": Named(_NAME),
    },
    {
        "head": or_empty(
            Record({"name": _HEAD, "options": Named(Simple()), "criterion": Text(HEAD_CRITERIA)})
        ),
        "faithful": or_empty(_FAITHFUL),
        "calibration": or_empty(_CALIBRATION),
        "referral": or_empty(_REFERRAL),
        "novelty": Text(NOVELTIES),
        "changes": or_empty(_CHANGES),
        "output": or_empty(_OUTPUT),
    },
)

_PRIOR = Record(
    {},
    {
        "mean": NumberField(-LARGEST, LARGEST),
        **{group: Named(_FORMAT) for group in schema.PRIOR_GROUPS},
    },
)

_POSTERIOR = Record(
    {
        "library_version": Text(longest=100),
        "fingerprint": _DIGEST,
        "attributes": Record(
            {
                "method": Text(FAMILIES),
                **_HYPERPARAMETERS,
                "likelihood": _LIKELIHOOD,
                "evidence": _EVIDENCE,
                "record": _HISTORY,
            }
        ),
        "layers": Named(Record(_LAYER)),
        "blocks": Named(_Block()),
        "centre": Named(_FORMAT),
        "certain": Named(Items(Whole(0, 2**40), most=8)),
        "features": maybe(_FEATURES),
    },
    {"prior": _PRIOR, "buffers_fingerprint": _DIGEST},
)

_SUMMARY = Record(
    {
        "batches": Whole(0),
        "seen": Whole(0),
        "samples": Whole(0),
        "weight": NumberField(0.0, _ANY),
        "log_likelihood": maybe(_SUM),
        "outputs": Whole(0),
        "keys": Items(Whole(-(2**63), 2**63)),
        "digest": _HASH,
        "content": _HASH,
    }
)

_ENTRY = OneOf(
    lambda value: 0 if not isinstance(value, dict) or "value" in value else 1 + ("numbers" in value),
    (
        Record({"value": Plain(finite=False)}),
        Record({"dtype": _NAME}),
        Record({"dtype": _NAME, "numbers": Plain()}),
    ),
)

_TRAINING = Record(
    {
        "state": Record(
            {
                **{name: Whole(0) for name in ("epoch", "batch", "step", "length", "samples", "batches")},
                "digest": _HASH,
                "content": _HASH,
                "sums": Named(_SUM),
                "seconds": NumberField(0.0, _ANY),
                "history": Items(Named(_SUM, {"validation NLL": AnyNumber()})),
                "best": Whole(-1),
                "done": Flag(),
            }
        ),
        "optimiser": Record(
            {"kind": _NAME, "state": Named(Named(_ENTRY)), "groups": Items(Named(Plain(finite=False)))}
        ),
    }
)

_CHECKPOINT = Record(
    {
        "kind": Text((schema.CHECKPOINT,)),
        "description": Record(
            {
                "identity": Named(Plain(finite=False, depth=50)),
                "memory_budget": Whole(2**20),
                "stages": Named(_SUMMARY),
                "sweep": maybe(_NAME),
                "summary": maybe(_SUMMARY),
                "training": maybe(_TRAINING),
            }
        ),
        "index": Items(Items(_NAME, 2, 2)),
    }
)


def check_posterior(state: Any) -> None:
    """Refuse a posterior's description with a field that it may not have.

    Raises:
        CorruptPosteriorError: says which field, and what it may be.
    """
    _POSTERIOR.check(state, "its description")


def check_values(attributes: Mapping[str, Any]) -> None:
    """Refuse numbers of a posterior's attributes that they may not have.

    Args:
        attributes: hyperparameters, ``evidence`` and, of the package's own likelihoods, ``likelihood``.

    Raises:
        CorruptPosteriorError: says which, and what it may be.
    """
    for name, field in {**_HYPERPARAMETERS, "evidence": _EVIDENCE, "likelihood": _LIKELIHOOD}.items():
        if name in attributes:
            field.check(attributes[name], f"its {name}")


def check_checkpoint(state: Any) -> None:
    """Refuse a checkpoint's description with a field that it may not have.

    Raises:
        CorruptPosteriorError: says which field, and what it may be.
    """
    _CHECKPOINT.check(state, "its description")
