"""Predictions with their uncertainty over HTTP: `application` makes an ASGI application of a predictor.

Needs the extra ``serve``: ``pip install 'posthoc-uq[serve]'``.
"""

from posthoc_uq.serving.app import application
from posthoc_uq.serving.requests import Limits
from posthoc_uq.serving.service import Service, Settings

__all__ = ["Limits", "Service", "Settings", "application"]
