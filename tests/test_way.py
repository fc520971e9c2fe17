"""How far calls go: functions, files and modules that a small fit and a later prediction enter, and torch operations.

The numbers are bounds, taken a little above what was counted when they were written. They do not depend on the machine:
who adds to the way of a call raises one, and says why in the same commit.
"""

from __future__ import annotations

import json
import subprocess
import sys

_COUNTS = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
import posthoc_uq as uq

torch.manual_seed(0)
x = torch.randn(300, 8)
y, model = (x[:, 0] > 0).long(), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 64)
options = {"layers": "last", "prior_precision": 1.0, "progress": False}
root, counts = os.path.dirname(uq.__file__) + os.sep, {}

uq.wrap(model, uq.fit(model, loader, "kfac", **options))(x[:5]).probs
counts["modules"] = sum(name.startswith("posthoc_uq") for name in sys.modules)
uq.fit(model, loader, progress=False)  # imports and caches of the default


class Operations(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        return function(*args, **(kwargs or {}))


def operations(call):
    with Operations() as counted:
        call()
    return counted.number


def walk(name, call):
    functions, files = set(), set()

    def profile(frame, event, _):
        code = frame.f_code
        # later versions of Python run comprehensions in place
        if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
            functions.add(code)
            files.add(code.co_filename)

    sys.setprofile(profile)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    counts[name] = len(functions)
    counts[name + ", files"] = len(files)
    return result


posterior = walk("last-layer fit", lambda: uq.fit(model, loader, "kfac", **options))
walk("default fit", lambda: uq.fit(model, loader, progress=False))
predictor = uq.wrap(model, posterior)
predictor(x[:5]).probs
walk("later prediction", lambda: predictor(x[5:15]).probs)
counts["operations"] = operations(lambda: predictor(x[5:15]).probs) - operations(lambda: model(x[5:15]))
print(json.dumps(counts))
"""

BOUNDS = {
    "modules": 86,
    "last-layer fit": 427,
    "last-layer fit, files": 45,
    "default fit": 742,
    "default fit, files": 67,
    "later prediction": 104,
    "later prediction, files": 24,
    "operations": 83,
}
"""``"operations"`` are those of a later prediction of a last layer above a forward pass of the network."""


def test_no_call_goes_farther() -> None:
    done = subprocess.run([sys.executable, "-c", _COUNTS], capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout)
    assert counts.keys() == BOUNDS.keys()
    assert not {name: count for name, count in counts.items() if count > BOUNDS[name]}, counts
