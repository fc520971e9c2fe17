"""What scores and measures mean, in a sentence each, for pages whose readers have not seen the library."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SCORES = {
    "entropy": "How undecided the predicted probabilities are, in nats; 0 is certain.",
    "mutual_information": "The part of the entropy that comes from not knowing the weights, in nats.",
    "max_probability": "1 minus the largest probability.",
    "functional_variance": "How far the outputs vary because the weights are not known. Of classifiers it also grows "
    "with the size of the features, and may rank foreign inputs below familiar ones: compare it with novelty.",
    "variation_ratio": "The share of the drawn networks that vote for another class.",
    "novelty": "How unlike the training data an input is: the share of the prior's uncertainty that the data left "
    "there. Between 0 and 1; compare it with held-out inputs, not with a fixed number.",
    "standard_deviation": "How far the target may be from the prediction, noise included, in the target's units.",
    "epistemic_variance": "The part of the variance that comes from not knowing the weights.",
}
_MEASURES = {
    "accuracy": "Share of predictions that are right.",
    "top-5 accuracy": "Share of inputs whose right class is among the five most probable.",
    "NLL": "Mean of the negative log probability (or density) of the right answer. Smaller is better; it punishes "
    "confident mistakes.",
    "Brier": "Squared distance between the probabilities and the right answer. Smaller is better.",
    "ECE": "Expected calibration error: mean gap between how sure the predictions are and how often they are right. "
    "Smaller is better.",
    "ECE (equal mass)": "The same, in groups of equally many predictions.",
    "classwise ECE": "The same for the probability of each class, and then their mean.",
    "mean entropy": "How undecided the predictions are on average, in nats. Neither large nor small is better.",
    "RMSE": "Root of the mean squared error, in the target's units. Smaller is better.",
    "log density": "Mean log density that the prediction gives to the target. Larger is better.",
    "CRPS": "Mean distance of the predicted distribution from the target, in its units. Smaller is better.",
    "coverage": "Share of targets inside the central intervals of a level. Best where it is the level itself.",
    "sharpness": "Mean width of those intervals, in the target's units.",
    "mean deviance": "Mean deviance of a target from its predicted mean. Smaller is better; 0 is perfect.",
    "mAP": "Average precision of finding a label's inputs, mean over labels. Larger is better.",
    "F1 (macro)": "Balance of precision and recall, mean over labels. Larger is better.",
    "F1 (micro)": "The same over all labels together.",
    "Hamming loss": "Share of labels that are decided wrongly.",
    "RPS": "Squared distance between the cumulative probabilities of ordered classes and the right answer. Smaller is "
    "better.",
    "MAE": "Mean distance of the median class from the right one, in classes. Smaller is better.",
    "quadratic kappa": "Agreement with the right classes beyond chance; far misses count more. 1 is perfect.",
    "AUROC": "How often a foreign input has a larger score than a familiar one: 1 is perfect, 0.5 is chance.",
    "AUPR": "Mean precision of finding the foreign inputs by the score. Larger is better.",
    "FPR95": "Share of the familiar inputs that are flagged when 95 % of the foreign ones are. Smaller is better.",
    "AURC": "Mean loss over all shares of inputs that could be kept (area under the risk-coverage curve). Smaller is "
    "better.",
    "AUC": "Area under the ROC curve of the two classes. Larger is better.",
}
_MEANINGS = _SCORES | _MEASURES
_LEVEL = re.compile(r" of \d+ %$")
_REFERRED = re.compile(r"^(.+) at ([\d.e-]+)$")


def words(name: str) -> str:
    """A score's or measure's name as it is written for people: ``"RMSE at 0.05"`` is the RMSE with 5 % referred."""
    found = _REFERRED.match(name)
    if found:
        return f"{found[1]}, {100 * float(found[2]):.4g} % referred"
    return name.replace("_", " ")


def meanings(names: Iterable[str]) -> dict[str, str]:
    """By name as it is written, without levels and shares, what it means; names that are not known are left out."""
    found: dict[str, str] = {}
    for name in names:
        referred = _REFERRED.match(name)
        plain = _LEVEL.sub("", referred[1] if referred else name)
        if plain in _MEANINGS:
            found[words(plain)] = _MEANINGS[plain]
    return found
