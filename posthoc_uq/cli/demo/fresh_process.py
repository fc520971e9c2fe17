"""What a deployment does, in a new Python process: load weights and posterior, predict. No data, no refit.

``python -m posthoc_uq.cli.demo.fresh_process POSTERIOR WEIGHTS IMAGES PROBS``
"""

import sys

import torch

import posthoc_uq as uq
from posthoc_uq.cli.demo.console import one_thread
from posthoc_uq.cli.demo.digits import network


@one_thread()  # as in the demo's process: with more threads, sums are taken in another order
def main(arguments: list[str]) -> None:
    """Read the posterior, the network's weights and images; write the predicted probabilities."""
    posterior_path, weights_path, images_path, probs_path = arguments
    model = network()
    model.load_state_dict(torch.load(weights_path, weights_only=True))
    model.eval()
    posterior = uq.load(posterior_path, model)
    predictor = uq.wrap(model, posterior)
    images = torch.load(images_path, weights_only=True)
    torch.save(predictor(images).probs, probs_path)


if __name__ == "__main__":
    main(sys.argv[1:])
