"""The GPUs that this process sees, and which reach which one's memory."""

from __future__ import annotations

from zerostall import native
from zerostall.core import vaults


def topology() -> tuple[dict[str, native.DeviceFacts], vaults.Links]:
    """GPUs by UUID, in the driver's order, and the links between them.

    Raises:
        CapabilityError: there is no driver.
        DeviceError: it does not say.
    """
    gpus = {facts.uuid: facts for facts in native.visible_devices()}
    links: vaults.Links = {}
    for one in gpus.values():
        for other in gpus.values():
            if one.ordinal == other.ordinal:
                continue
            link = native.link_between(one.ordinal, other.ordinal)
            if link.access:
                links[one.uuid, other.uuid] = vaults.Link(link.rank, link.atomics)
    return gpus, links
