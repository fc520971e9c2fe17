"""What a client is told in the place of an answer."""

from __future__ import annotations


class Refused(Exception):
    """A request that gets no prediction.

    Args:
        status: of the HTTP answer, 4xx, or 503 where the server is busy.
        kind: one word, for the metrics.
        sentence: what is wrong and what would be right.
    """

    def __init__(self, status: int, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.kind, self.sentence = status, kind, sentence


def shortened(text: object, length: int = 300) -> str:
    """A message of another library in one line."""
    line = " ".join(str(text).split()).rstrip(".")
    return line if len(line) <= length else line[:length] + " ..."
