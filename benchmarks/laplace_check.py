"""The numbers of laplace-torch (0.3) beside those of this library, in float64.

    OMP_NUM_THREADS=1 python benchmarks/laplace_check.py --csv docs/tables/laplace_torch.csv    needs laplace-torch

For a classifier of digits with and without biases and a regressor: the largest relative difference of an output's
variance over 397 inputs, and the relative difference of the log marginal likelihoods. Fails where they should agree to
1e-10: everywhere but with biases in Kronecker factors, which laplace-torch gives a factor of their own.
"""

from __future__ import annotations

import argparse
import copy
import csv
import warnings
from typing import Any

import torch
from _harness import output_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq

TRAINING, PRIOR_PRECISION, NOISE = 1000, 2.0, 0.5
CASES = ("with biases", "without biases", "regression with biases")


def perceptron(outputs: int, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 16, bias), nn.Tanh(), nn.Linear(16, outputs, bias)).double()


def trained(network: nn.Sequential, loss: Any, x: Tensor, targets: Tensor) -> nn.Sequential:
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        loss(network(x), targets).backward()
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return network


def differences(
    network: nn.Module, structure: str, last: bool, data: TensorDataset, test: Tensor
) -> list[float]:
    """Largest relative difference of output variances, and relative difference of log marginal likelihoods."""
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

    regression = data.tensors[1].is_floating_point()
    likelihood = "regression" if regression else "classification"
    loader = DataLoader(data, batch_size=100)
    theirs = Laplace(
        copy.deepcopy(network),
        likelihood,
        "last_layer" if last else "all",
        structure,
        prior_precision=PRIOR_PRECISION,
        backend=BackPackGGN,
        **({"sigma_noise": NOISE} if regression else {}),
    )
    theirs.fit(loader)
    pull = theirs.backend.last_layer_jacobians if last else theirs.backend.jacobians
    variance = theirs.functional_variance(pull(test)[0]).diagonal(dim1=1, dim2=2)
    posterior = uq.fit(
        network,
        loader,
        {"kron": "kfac"}.get(structure, structure),
        likelihood=likelihood,
        layers="last" if last else "all",
        fisher="exact",
        prior_precision=PRIOR_PRECISION,
        dtype=torch.float64,
        noise_variance=NOISE**2 if regression else None,
        progress=False,
    )
    covariance = uq.wrap(network, posterior, head="linearized").functional_covariance(test)
    ours = covariance.diagonal(dim1=1, dim2=2)
    evidence = float(theirs.log_marginal_likelihood())
    return [
        float((ours / variance - 1).abs().max()),
        abs(float(posterior.log_marginal_likelihood()) / evidence - 1),
    ]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=output_file, help="where the table goes")
    arguments = parser.parse_args(words)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels) / 16, torch.tensor(digits)
    test = x[1400:]
    values = torch.stack([x.mean(1), x[:, :32].mean(1) - x[:, 32:].mean(1)], 1)
    values = (values - values.mean(0)) / values.std(0)
    train_x, train_y, train_values = x[:TRAINING], y[:TRAINING], values[:TRAINING]
    classifier = trained(perceptron(10), nn.functional.cross_entropy, train_x, train_y)
    bare = perceptron(10, bias=False)
    bare.load_state_dict({name: value for name, value in classifier.state_dict().items() if "weight" in name})
    regressor = trained(perceptron(2), nn.functional.mse_loss, train_x, train_values)
    classes, numbers = TensorDataset(train_x, train_y), TensorDataset(train_x, train_values)
    rows: list[list[str]] = []
    for structure in ("diag", "kron", "full"):
        for last in (False, True):
            row = [structure, "last layer" if last else "all"]
            for case, network in zip(CASES, (classifier, bare, regressor), strict=True):
                found = differences(
                    network, structure, last, numbers if network is regressor else classes, test
                )
                row += [f"{value:.1e}" for value in found]
                if structure != "kron" or case == "without biases":
                    assert max(found) < 1e-10, (structure, last, case, found)
            rows.append(row)
            print(*row)
    if arguments.csv is not None:
        heads = [f"{case}: {what}" for case in CASES for what in ("variance", "evidence")]
        with open(arguments.csv, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([["structure", "weights", *heads], *rows])


if __name__ == "__main__":
    main()
