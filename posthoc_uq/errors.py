"""The exceptions of the package; each message names what is wrong and the way out."""


class PosthocUQError(Exception):
    """Base of every error that the package raises on purpose."""


class UnsupportedLayerError(PosthocUQError):
    """A layer was asked for that the chosen method cannot treat, or whose weights it cannot follow."""


class PosteriorMismatchError(PosthocUQError):
    """A posterior and a model do not belong together: names, shapes or parameters differ."""


class CorruptPosteriorError(PosthocUQError):
    """A posterior file is damaged, incomplete, foreign, or of a format this version cannot read."""


class NonFiniteError(PosthocUQError):
    """A NaN or an infinity appeared where only finite numbers make sense."""
