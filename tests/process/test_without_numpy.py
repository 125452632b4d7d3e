"""torch does not ask for numpy, so neither may saving and restoring."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("own_agent")

CODE = """
import sys, warnings
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError("No module named 'numpy'", name=name)
sys.meta_path.insert(0, Absent())
warnings.simplefilter("ignore")  # torch says that it is missing
import torch, zerostall
def state():
    return {"model": torch.nn.Linear(3, 3), "mine": torch.Generator()}
held = state()
held["mine"].manual_seed(5)
with zerostall.Checkpointer(sys.argv[1], **held) as ckpt:
    ckpt.save(1).wait("disk", timeout=60)
    drawn = torch.rand(3), torch.rand(3, generator=held["mine"])
fresh = state()
with zerostall.Checkpointer(sys.argv[1], **fresh) as ckpt:
    assert ckpt.restore() == 1
assert torch.equal(fresh["model"].weight, held["model"].weight)
assert torch.equal(torch.rand(3), drawn[0]) and torch.equal(torch.rand(3, generator=fresh["mine"]), drawn[1])
"""


def test_generators_are_saved_and_go_on_where_numpy_is_not_installed(where: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(where)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
