"""The C++ core: checksums, shared memory, and the jobs that move bytes in the background.

Addresses and sizes are integers. A job begins when it is made, on the threads of a Pool; letting go of it
cancels it and waits for what is in flight. The memory of an image must outlive the jobs on it; tensors are
kept alive by theirs. Everything releases the GIL while it works.
"""

from zerostall._native import (
    CRC_HARDWARE,
    Capture,
    Comparison,
    Device,
    FileRead,
    FileWrite,
    Job,
    Pieces,
    Plan,
    Pool,
    Probe,
    Protection,
    Scatter,
    Segment,
    Tensors,
    Verify,
    Watch,
    any_masked,
    crc32c,
    crc32c_memory,
    same_memory,
)

__all__ = [
    "CRC_HARDWARE",
    "Capture",
    "Comparison",
    "Device",
    "FileRead",
    "FileWrite",
    "Job",
    "Pieces",
    "Plan",
    "Pool",
    "Probe",
    "Protection",
    "Scatter",
    "Segment",
    "Tensors",
    "Verify",
    "Watch",
    "any_masked",
    "crc32c",
    "crc32c_memory",
    "same_memory",
]
