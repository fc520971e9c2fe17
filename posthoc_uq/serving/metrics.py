"""What Prometheus reads."""

from __future__ import annotations

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST
_ENTROPIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
_NOVELTIES = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Metrics:
    """Counters and histograms of one server, in a registry of its own.

    Attributes:
        requests: by endpoint and status.
        inputs: predicted.
        referred: of those.
        errors: requests without an answer, by kind.
        entropy: of predictions, in nats.
        novelty: of predictions.
        latency: seconds of a request that was answered, from its first byte to the answer, by endpoint.
        model_seconds: of one prediction of the model, a batch or a single input.
        waiting: requests under way.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def name(what: str) -> str:
            return f"posthoc_uq_{what}"

        self.requests = Counter(name("requests"), "Requests.", ["endpoint", "status"], registry=registry)
        self.inputs = Counter(name("inputs"), "Inputs predicted.", registry=registry)
        self.referred = Counter(name("referred"), "Inputs referred to a person.", registry=registry)
        self.errors = Counter(name("errors"), "Requests without an answer.", ["kind"], registry=registry)
        self.entropy = Histogram(
            name("entropy_nats"), "Entropy of predictions.", registry=registry, buckets=_ENTROPIES
        )
        self.novelty = Histogram(name("novelty"), "Novelty of inputs.", registry=registry, buckets=_NOVELTIES)
        self.latency = Histogram(
            name("request_seconds"), "Time of a request.", ["endpoint"], registry=registry, buckets=_SECONDS
        )
        self.model_seconds = Histogram(
            name("model_seconds"), "Time of one prediction.", registry=registry, buckets=_SECONDS
        )
        self.waiting = Gauge(name("requests_under_way"), "Requests under way.", registry=registry)

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self._registry)
