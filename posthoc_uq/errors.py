"""The exceptions of the package; each message names what is wrong and the way out."""


def printable(text: str, keep: str = "") -> str:
    """The text with control characters escaped: a terminal would act on them, and names from files may hold them.

    Args:
        text: of any characters.
        keep: control characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class PosthocUQError(Exception):
    """Base of every error that the package raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n\t")


class UnsupportedLayerError(PosthocUQError):
    """A layer was asked for that the chosen method cannot treat, or whose weights it cannot follow."""


class PosteriorMismatchError(PosthocUQError):
    """A posterior and a model do not belong together: names, shapes or parameters differ."""


class CorruptPosteriorError(PosthocUQError):
    """A posterior file is damaged, incomplete, foreign, or of a format this version cannot read."""


class NonFiniteError(PosthocUQError):
    """A NaN or an infinity appeared where only finite numbers make sense."""


class NotAnsweredError(PosthocUQError, AttributeError):
    """An attribute that another head or another kind of prediction has."""
