"""How large an image becomes where its shorter side is resized: a strip of one pixel by thousands becomes huge."""

UNKNOWN = 512
"""The shorter side that a transform of which nothing is known is taken to make."""
_STRETCHED = 16  # times its shorter side, an image may be long whatever the limit


def too_long(width: int, height: int, shorter: int, limit: int) -> str:
    """What is wrong with the size of an image, in words that follow its name; nothing where it is in order.

    Args:
        width: in pixels, as its file says.
        height: the same.
        shorter: what a transform makes of the shorter side, the longer one in proportion; 0 where it keeps the size.
        limit: pixels, width times height, that it may have afterwards; or as many as before, if these are more.
    """
    longer = shorter * max(width, height) // max(1, min(width, height))
    limit = max(limit, width * height, _STRETCHED * shorter**2)
    if shorter * longer <= limit:
        return ""
    return (
        f"has {width:,} x {height:,} pixels; with {shorter:,} on its shorter side it would have {longer:,} on the "
        f"longer one, and the limit is {limit:,} in all. Crop it"
    )
