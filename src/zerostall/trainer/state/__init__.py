"""The user's objects as named tensors and small values, and the way back. Start at `state.State`.

state       State: survey, fits, values, targets, accept
walk tree   the objects, part by part; `parts/` has one file a kind of object; choice: what of them is saved
surveying   a walk into a layout; aliasing: memory that several names share
dealing     which of its tensors a rank stores; sharded: distributed tensors
returning   where every stored tensor goes; asked, aim, stored, refs, writes, tensors serve it
            assigning: off the meta device; of several ranks' images: stored_step, gathering
load        a stored state as new tensors
"""

from zerostall.trainer.state.asked import Asked
from zerostall.trainer.state.choice import Choice
from zerostall.trainer.state.state import OutdatedError, Rest, RestoreReport, State, Survey, Targets, Values

__all__ = ["Asked", "Choice", "OutdatedError", "Rest", "RestoreReport", "State", "Survey", "Targets", "Values"]
