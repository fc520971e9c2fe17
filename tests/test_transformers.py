"""The main job on unmodified models of transformers and peft, with random weights: fit over all layers and over the
last, save, load, predict through every head.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import posthoc_uq as uq

WORDS, LENGTH, SAMPLES, CLASSES = 50, 6, 8, 3
TOKENS = uq.Categorical(class_dim=-1)
CAUSAL = uq.Categorical(class_dim=-1, next_token=True)
HEADS = ("linearized", "sampling", "moments")

_BERT = dict(
    vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=16, num_labels=CLASSES,
)  # fmt: skip
_DISTIL = dict(
    vocab_size=WORDS,
    dim=16,
    n_layers=1,
    n_heads=2,
    hidden_dim=32,
    max_position_embeddings=16,
    num_labels=CLASSES,
)
_GPT2 = dict(vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
_LLAMA = dict(
    vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=32, max_position_embeddings=16,
)  # fmt: skip
_T5 = dict(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
_VIT = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
    num_labels=CLASSES,
)  # fmt: skip


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().eval()


def numbers(*shape: int, below: int | None = None, above: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if below is None:
        return torch.randn(*shape, generator=generator)
    return torch.randint(above, below, shape, generator=generator)


IDS = numbers(SAMPLES, LENGTH, below=WORDS, above=1)
MASK = torch.ones_like(IDS)
MASK[0, 4:] = 0


@dataclass(frozen=True)
class Kind:
    """A model, its likelihood, and what its batches hold.

    Attributes:
        targets: ``"class"`` of an input, ``"tags"`` or ``"words"`` of tokens.
    """

    make: Callable[[], nn.Module]
    likelihood: Any
    targets: str
    tied: str | None = None

    def inputs(self) -> dict[str, Tensor]:
        if self.make in (vit,):
            return {"pixel_values": numbers(SAMPLES, 3, 16, 16)}
        inputs = {"input_ids": IDS, "attention_mask": MASK}
        if self.make is t5:  # teacher forced: the decoder's inputs are the labels, moved by one
            inputs["decoder_input_ids"] = nn.functional.pad(IDS[:, :-1], (1, 0))
        return inputs

    def labels(self) -> Tensor:
        if self.targets == "class":
            return numbers(SAMPLES, below=CLASSES)
        labels = IDS if self.targets == "words" else numbers(SAMPLES, LENGTH, below=CLASSES)
        return labels.masked_fill(MASK == 0, -100)

    def loader(self) -> list[tuple[dict[str, Tensor], Tensor]]:
        inputs, labels = self.inputs(), self.labels()
        return [({k: v[i : i + 4] for k, v in inputs.items()}, labels[i : i + 4]) for i in (0, 4)]


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(hf.T5Config(**_T5))


def vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**_VIT))


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT2))


def llama(**options: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA, **options))


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**_BERT))


KINDS = {
    "BERT, sequences": Kind(bert, "classification", "class"),
    "BERT, tokens": Kind(lambda: hf.BertForTokenClassification(hf.BertConfig(**_BERT)), TOKENS, "tags"),
    "BERT, masked words": Kind(
        lambda: hf.BertForMaskedLM(hf.BertConfig(**_BERT)), TOKENS, "words", "cls.predictions.decoder"
    ),
    "DistilBERT, sequences": Kind(
        lambda: hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**_DISTIL)),
        "classification",
        "class",
    ),
    "DistilBERT, tokens": Kind(
        lambda: hf.DistilBertForTokenClassification(hf.DistilBertConfig(**_DISTIL)), TOKENS, "tags"
    ),
    "DistilBERT, masked words": Kind(
        lambda: hf.DistilBertForMaskedLM(hf.DistilBertConfig(**_DISTIL)), TOKENS, "words", "vocab_projector"
    ),
    "GPT-2": Kind(gpt2, CAUSAL, "words", "lm_head"),
    "LLaMA": Kind(llama, CAUSAL, "words"),
    "LLaMA, tied": Kind(lambda: llama(tie_word_embeddings=True), CAUSAL, "words", "lm_head"),
    "T5": Kind(t5, TOKENS, "words", "lm_head"),
    "ViT": Kind(vit, "classification", "class"),
}


def fitted(model: nn.Module, kind: Kind, method: str = "inf", **options: Any) -> uq.Posterior:
    options = {"likelihood": kind.likelihood, "progress": False, "prior_precision": 10.0} | options
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Weights without a posterior")  # the embeddings
        return uq.fit(model, kind.loader(), method, **options)


@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.covering(1)
def test_main_job(name: str, layers: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    model = seeded(kind.make)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    options = {} if layers == "all" else {"prior_precision": None}
    posterior = fitted(model, kind, layers=layers, rank=20, **options)
    linear = [
        n for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d, hf.pytorch_utils.Conv1D))
    ]
    assert set(posterior.layers) == (set(linear) if layers == "all" else {linear[-1]})
    if kind.tied is not None:
        assert kind.tied in posterior.layers
        assert f"'{kind.tied}' shares its weight" in str(posterior.report())
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", seeded(kind.make))
    inputs, labels = kind.loader()[0]
    for head in HEADS:
        options = {"n_samples": 3} if head == "sampling" else {}
        found, again = (
            uq.wrap(of, p, head, **options)(**inputs)
            for of, p in ((model, posterior), (seeded(kind.make), loaded))
        )
        torch.testing.assert_close(found.probs, again.probs)
        assert torch.isfinite(found.probs).all() and bool((found.epistemic_variance > 0).all())
        assert found.entropy().shape == labels.shape and bool((found.mutual_information() > -1e-6).all())
        assert bool(torch.isfinite(found.log_prob(labels)).all())
        if layers == "last" and head == "linearized":
            assert found.novelty().shape == labels.shape
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["BERT, masked words", "GPT-2", "LLaMA", "T5"])
def test_the_likelihood_is_the_models_own_loss(name: str) -> None:
    kind = KINDS[name]
    model, inputs, labels = seeded(kind.make), kind.inputs(), kind.labels()
    with torch.no_grad():
        returned = model(**inputs, labels=labels)
    counted = (labels[:, 1:] if kind.likelihood is CAUSAL else labels) != -100
    own = -float(returned.loss) * int(counted.sum())
    assert float(kind.likelihood.log_prob(returned.logits, labels).sum()) == pytest.approx(own, rel=1e-5)
    # what a collator makes: one dictionary with labels
    posterior = uq.fit(
        model, [{**inputs, "labels": labels}], "diag", layers="last", likelihood=kind.likelihood, progress=False,
        prior_precision=10.0,
    )  # fmt: skip
    assert posterior.evidence.log_likelihood == pytest.approx(own, rel=1e-5)


def test_the_last_layer_of_gpt2_against_a_dense_posterior() -> None:
    """Its tied weight, by the definition: features and probabilities alone."""
    kind = KINDS["GPT-2"]
    model = seeded(kind.make).double()
    inputs, labels = kind.inputs(), kind.labels()
    with torch.no_grad():
        hidden, logits = model.transformer(**inputs).last_hidden_state, model(**inputs).logits
    counted = nn.functional.pad(labels[:, 1:] != -100, (0, 1))
    p, phi = logits[counted].softmax(-1), hidden[counted]
    # sum over tokens of the diagonal of (diag p - p p^T) x phi phi^T
    precision = torch.einsum("tc,tn->cn", p * (1 - p), phi.square()) + 7.0
    posterior = fitted(model, kind, "diag", layers="last", fisher="exact", prior_precision=7.0)
    torch.testing.assert_close(posterior.variance()["lm_head.weight"], 1 / precision)
    variance = torch.einsum("cn,btn->btc", 1 / precision, hidden.square())
    head = uq.wrap(model, posterior, "linearized")
    torch.testing.assert_close(head.functional_variance(**inputs), variance)


# LoRA


def with_lora(make: Callable[[], nn.Module], **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's, of transformers
        model = peft.get_peft_model(make(), peft.LoraConfig(r=2, lora_dropout=0.1, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero before training
            nn.init.normal_(parameter, std=0.1)
    return model


LORA = {
    "GPT-2": lambda: with_lora(gpt2, task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True),
    "LLaMA": lambda: with_lora(llama, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]),
    "BERT, sequences": lambda: with_lora(bert, task_type="SEQ_CLS", target_modules=["query", "value"]),
}


@pytest.mark.parametrize("method", ["inf", "kfac"])
@pytest.mark.parametrize("name", LORA)
@pytest.mark.covering(1)
def test_lora(name: str, method: str, tmp_path: Path) -> None:
    kind, model = KINDS[name], seeded(LORA[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trained = [p.requires_grad for p in model.parameters()]
    posterior = fitted(model, kind, method, layers="*lora_*")
    own = [name for name, parameter in model.named_parameters() if "lora_" in name]
    assert sorted(posterior.mean) == sorted(own)
    uq.save(posterior, tmp_path / "p.h5")
    other = seeded(LORA[name])
    loaded = uq.load(tmp_path / "p.h5", other)
    inputs, labels = kind.loader()[0]
    for head in HEADS:
        options = {"n_samples": 3} if head == "sampling" else {}
        found = uq.wrap(model, posterior, head, **options)(**inputs)
        torch.testing.assert_close(found.probs, uq.wrap(other, loaded, head, **options)(**inputs).probs)
        assert found.entropy().shape == labels.shape and bool((found.epistemic_variance > 0).all())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == trained


def test_the_linearised_variance_of_lora_is_that_of_the_jacobian() -> None:
    kind, model = KINDS["BERT, sequences"], seeded(LORA["BERT, sequences"]).double()
    posterior = fitted(model, kind, "full", layers="*lora_*", prior_precision=3.0)
    inputs = kind.loader()[0][0]
    own = {name: p for name, p in model.named_parameters() if "lora_" in name}

    def logits(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (), inputs).logits

    jacobians = torch.func.jacrev(logits)({name: p.detach() for name, p in own.items()})
    flat = torch.cat([jacobians[layer.weight].flatten(2) for layer in posterior.layers.values()], -1)
    precision = SAMPLES * next(iter(posterior.blocks.values())).fisher + 3.0 * torch.eye(flat.shape[-1])
    truth = torch.einsum("bcw,wv,bdv->bcd", flat, precision.double().inverse(), flat)
    found = uq.wrap(model, posterior, "linearized").functional_covariance(**inputs)
    torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-12)


def test_an_adapter_and_the_layer_that_peft_saves_with_it() -> None:
    kind, model = KINDS["BERT, sequences"], seeded(LORA["BERT, sequences"])
    posterior = fitted(model, kind, layers=["*lora_*", "*.classifier"])
    assert "base_model.model.classifier.modules_to_save.default" in posterior.layers
    assert len(posterior.layers) == 5


# Scores of sequences, multiple choice


def test_scores_of_sequences() -> None:
    kind, model = KINDS["GPT-2"], seeded(gpt2)
    posterior = fitted(model, kind, layers="last")
    inputs, labels = kind.inputs(), kind.labels()
    prediction = uq.wrap(model, posterior, "linearized")(**inputs)
    found = uq.sequence_scores(prediction, labels)
    for n in range(SAMPLES):  # by loops: token t predicts the label at t + 1
        logs, entropies = [], []
        for t in range(LENGTH - 1):
            if labels[n, t + 1] != -100:
                p = prediction.probs[n, t]
                logs.append(float(p[labels[n, t + 1]].log()))
                entropies.append(float(-(p * p.log()).sum()))
        assert found["tokens"][n] == len(logs)
        assert float(found["log_probability"][n]) == pytest.approx(sum(logs), rel=1e-5)
        perplexity = float(torch.tensor(logs).mean().neg().exp())
        assert float(found["perplexity"][n]) == pytest.approx(perplexity, rel=1e-5)
        assert float(found["entropy"][n]) == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)
        assert float(found["largest_entropy"][n]) == pytest.approx(max(entropies), rel=1e-5)
        own = prediction.novelty()[n, : len(logs)]
        assert float(found["novelty"][n]) == pytest.approx(float(own.mean()), rel=1e-5)
        assert float(found["largest_novelty"][n]) == pytest.approx(float(own.max()))
    masked = uq.sequence_scores(prediction, mask=inputs["attention_mask"])
    own = prediction.mutual_information()[0, :4].mean()
    torch.testing.assert_close(masked["mutual_information"][0], own)
    assert "perplexity" not in masked
    assert bool(prediction.perplexity(torch.full_like(labels, -100)).isnan().all())
    with pytest.raises(uq.PosthocUQError, match="labels or mask, not both"):
        uq.sequence_scores(prediction, labels, MASK)
    with pytest.raises(uq.PosthocUQError, match="needs a PositionPrediction"):
        uq.sequence_scores(uq.ClassPrediction.from_logits(torch.randn(3, 4, 5)))


def test_the_last_token_and_whole_sequences_by_draws() -> None:
    kind, model = KINDS["GPT-2"], seeded(gpt2)
    posterior, inputs, labels = fitted(model, kind, layers="last"), kind.inputs(), kind.labels()
    linear = uq.wrap(model, posterior, "linearized")
    next_word = linear.at(-1)(input_ids=IDS[1:]).probs
    assert next_word.shape == (SAMPLES - 1, 1, WORDS)
    torch.testing.assert_close(next_word[:, 0], linear(input_ids=IDS[1:]).probs[:, -1])
    outputs = uq.wrap(model, posterior, "sampling", n_samples=5).outputs(**inputs)
    found = torch.stack([kind.likelihood.log_prob(own, labels) for own in outputs])
    assert found.shape == (5, SAMPLES)
    shares = outputs.double().softmax(-1)
    for n in range(SAMPLES):
        counted = [t for t in range(LENGTH - 1) if labels[n, t + 1] != -100]
        joint = torch.stack([shares[:, n, t, labels[n, t + 1]] for t in counted]).prod(0)
        torch.testing.assert_close(found[:, n].double().exp(), joint, rtol=1e-4, atol=0)


class Answers(nn.Module):
    """The logits of three words at the last position that the mask leaves."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :, [7, 3, 21]]
        last = (torch.arange(logits.shape[1]) * attention_mask).argmax(1)
        return logits.take_along_dim(last[:, None, None], 1).squeeze(1)


@pytest.mark.parametrize("layers", ["*lora_*", "last"])
def test_multiple_choice(layers: str, tmp_path: Path) -> None:
    model = seeded(LORA["LLaMA"])
    answers = Answers(model).eval()
    data = [({"input_ids": IDS, "attention_mask": MASK}, numbers(SAMPLES, below=3))]
    posterior = uq.fit(answers, data, "kfac", layers=layers, progress=False, prior_precision=2.0)
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", answers)
    prediction = uq.wrap(answers, loaded, "linearized")(**data[0][0])
    assert prediction.probs.shape == (SAMPLES, 3) and bool((prediction.epistemic_variance > 0).all())
    with torch.no_grad():
        torch.testing.assert_close(prediction.logits_mean, answers(**data[0][0]))
    own = {name: p for name, p in answers.named_parameters() if name in posterior.mean}
    assert (len(own) == 4) if layers != "last" else (list(own) == ["model.base_model.model.lm_head.weight"])

    def logits(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(answers, weights, (), data[0][0])

    jacobians = torch.func.jacrev(logits)({name: p.detach() for name, p in own.items()})
    parts = {layer: jacobians[posterior.layers[layer].weight] for layer in posterior.layers}
    for n in (0, 3):
        rows = {name: part[n].unsqueeze(1) for name, part in parts.items()}  # one group
        found = uq.wrap(answers, posterior, "linearized").functional_covariance(**data[0][0])[n]
        torch.testing.assert_close(found, posterior.quadratic(rows).to(found), rtol=1e-3, atol=1e-6)


def test_a_forgotten_shift_is_said_aloud() -> None:
    model, labels = seeded(gpt2), IDS.masked_fill(MASK == 0, -100)
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    options = {"layers": "last", "progress": False, "prior_precision": 2.0}
    with pytest.warns(
        UserWarning, match="labels are the inputs themselves, and GPT2LMHeadModel .*next_token=True"
    ):
        posterior = uq.fit(model, [(inputs, labels)], "diag", likelihood=TOKENS, **options)
    assert "faithful prior" not in str(posterior.report())
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        uq.fit(model, [(inputs, labels)], "diag", likelihood=CAUSAL, **options)
        uq.fit(model, [(inputs, shifted)], "diag", likelihood=TOKENS, **options)
        masked = seeded(lambda: hf.BertForMaskedLM(hf.BertConfig(**_BERT)))
        uq.fit(masked, [(inputs, labels)], "diag", likelihood=TOKENS, **options)
    assert not any("next_token" in str(warning.message) for warning in caught)


def bart() -> nn.Module:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = hf.BartConfig(vocab_size=WORDS, d_model=16, max_position_embeddings=16, **sizes, **heads)
    return seeded(lambda: hf.BartForConditionalGeneration(config))


@pytest.mark.parametrize("make", [t5, bart])
def test_an_encoder_decoder_fits_from_inputs_and_labels(make: Callable[[], Any]) -> None:
    """Labels make the decoder's inputs, as inside the model where they are passed."""
    model, options = (
        make().eval(),
        {"likelihood": TOKENS, "layers": "last", "prior_precision": 2.0, "progress": False},
    )
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}
    posterior = uq.fit(model, [batch], "diag", **options)
    predictor = uq.wrap(model, posterior)
    given = {"input_ids": IDS, "attention_mask": MASK}
    given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(IDS)
    found = predictor(**given)
    torch.testing.assert_close(found.logits_mean, model(**batch).logits)
    for same in (predictor(batch), predictor.predict([batch], progress=False)):
        assert torch.equal(same.probs, found.probs)
    tuned = uq.tune(posterior, [batch], parameters=(), progress=False)
    predictors = {"plain": model, "posterior": uq.wrap(model, tuned)}
    measured = uq.evaluate(predictors, [batch], progress=False).metrics
    trials = tuned.history.trials
    assert trials is not None and trials.chosen is not None
    assert measured["posterior"]["nll"] == pytest.approx(trials.chosen.objective, rel=1e-4)


def test_an_encoder_decoder_without_labels_says_what_its_decoder_lacks() -> None:
    options: dict[str, Any] = {
        "layers": "last",
        "prior_precision": 2.0,
        "progress": False,
        "likelihood": TOKENS,
    }
    with pytest.raises(uq.PosthocUQError, match=r"put decoder_input_ids="):
        uq.fit(t5(), [(IDS, IDS)], "diag", **options)
    with pytest.warns(
        UserWarning, match="without decoder_input_ids, so its decoder reads the encoder's inputs"
    ):
        uq.fit(bart(), [(IDS, IDS)], "diag", **options)
