"""Posteriors in files: `save`, `load` and `inspect`; the schema is in ``docs/format.md``.

``userblock`` seals the file with a digest, ``hdf5`` is the only module that imports h5py, and ``sandbox``
runs it in a child process.
"""

from posthoc_uq.files.loading import inspect, load
from posthoc_uq.files.saving import save

__all__ = ["inspect", "load", "save"]
