"""Names of the files and folders of a run; whatever has another name is not ours and is never touched.

    run.json                                   what run this is
    layouts/<sha256>.json                      once a layout
    layouts/<sha256>-spare.json                the same once more, should that one be damaged
    step-000000012000/                         one step
        rank-00000.safetensors                 a rank's image
        rank-00000.json                        its record
        manifest.json                          the commit
        pinned                                 an empty marker: never evict this step
        ranks.json                             whose images are here, where each node has a folder of its own
    rewound-000000005000/                      a step set aside, for training went on from an older one
    staging-000000012000-3f9a0c1d/             a step that is to replace a committed one, until it takes its
                                                   place
    <file>.3f9a0c1d.partial                    a file as long as it is not whole
    images/step-000000012000/                  in an object store, where nothing can be renamed:
        rank-00000-3f9a0c1d52e4b067.safetensors    an image and its record, named by the record's digest
        rank-00000-3f9a0c1d52e4b067.json
    disks.json                                 folders on other disks that hold images, named in the same way
    disk.json                                  in such a folder: whose images it holds

Steps have 12 digits, and more when they need to; ranks 5. Every name is legal on every operating system, and
none leads out of the folder it is in.
"""

from __future__ import annotations

import operator
import re

RUN = "run.json"
LAYOUTS = "layouts"
IMAGES = "images"
MANIFEST = "manifest.json"
REPLICA = "replica.json"
PINNED = "pinned"
RANKS = "ranks.json"
DISKS = "disks.json"
DISK = "disk.json"

MAX_STEP = 2**63 - 1
MAX_RANK = 2**31 - 1

_NUMBER = "([0-9]{12,19})"
_STEP = re.compile(f"step-{_NUMBER}")
_REWOUND = re.compile(f"rewound-{_NUMBER}")
_NONCE = re.compile("[0-9a-f]{8,32}")
_STAGING = re.compile(f"staging-{_NUMBER}-([0-9a-f]{{8,32}})")
_PARTIAL = re.compile(r"([a-z0-9-]+\.(?:json|safetensors))\.([0-9a-f]{8,32})\.partial")
_IMAGE = re.compile(r"rank-([0-9]{5,10})\.safetensors")
_RECORD = re.compile(r"rank-([0-9]{5,10})\.json")
_KEPT = re.compile(r"rank-([0-9]{5,10})-[0-9a-f]{16}\.(?:json|safetensors)")
_DIGEST = re.compile("[0-9a-f]{64}")
_LAYOUT = re.compile(r"([0-9a-f]{64})\.json")
_SPARE = re.compile(r"([0-9a-f]{64})-spare\.json")


def step_number(step: int) -> int:
    """A number of finished training steps; anything that is an integer will do, but no bool."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step must be a number of steps, not {step!r}")
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"step must not be negative: {number}")
    if number > MAX_STEP:
        raise ValueError(f"step must be less than 2^63: {number}")
    return number


def _step_digits(step: int) -> str:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise ValueError(f"a step is an integer from 0 to {MAX_STEP}, not {step!r}")
    return f"{step:012d}"


def _rank_digits(rank: int) -> str:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= MAX_RANK:
        raise ValueError(f"a rank is an integer from 0 to {MAX_RANK}, not {rank!r}")
    return f"{rank:05d}"


def _checked_nonce(nonce: str) -> str:
    if not _NONCE.fullmatch(nonce):
        raise ValueError(f"a nonce is 8 to 32 lower-case hex digits, not {nonce!r}")
    return nonce


def _checked_digest(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"a digest is 64 lower-case hex digits, not {digest!r}")
    return digest


def _number(digits: str, width: int, most: int) -> int | None:
    number = int(digits)
    # One spelling a number: zeros in front only up to the usual width.
    return number if number <= most and f"{number:0{width}d}" == digits else None


def step_folder(step: int) -> str:
    """Return the name of a step's folder. ValueError for what is no step."""
    return f"step-{_step_digits(step)}"


def parse_step(name: str) -> int | None:
    """Return the step a folder name stands for, None for any other name."""
    match = _STEP.fullmatch(name)
    return _number(match[1], 12, MAX_STEP) if match else None


def rewound_folder(step: int) -> str:
    """Return the name of the folder of a step that was set aside. ValueError for what is no step."""
    return f"rewound-{_step_digits(step)}"


def parse_rewound(name: str) -> int | None:
    """Return the step that was set aside under this folder name, None for any other name."""
    match = _REWOUND.fullmatch(name)
    return _number(match[1], 12, MAX_STEP) if match else None


def staging_folder(step: int, nonce: str) -> str:
    """Return the name of a folder in which a step is put together that will replace a committed one.

    `nonce` is 8 to 32 lower-case hex digits, new for every attempt. ValueError for what is no step or no
    nonce.
    """
    return f"staging-{_step_digits(step)}-{_checked_nonce(nonce)}"


def parse_staging(name: str) -> tuple[int, str] | None:
    """Return the step and nonce of a staging folder's name, None for any other name."""
    match = _STAGING.fullmatch(name)
    step = _number(match[1], 12, MAX_STEP) if match else None
    return None if match is None or step is None else (step, match[2])


def image_file(rank: int) -> str:
    """Return the name of a rank's image in a step's folder. ValueError for what is no rank."""
    return f"rank-{_rank_digits(rank)}.safetensors"


def parse_image(name: str) -> int | None:
    """Return the rank whose image has this name, None for any other name."""
    match = _IMAGE.fullmatch(name)
    return _number(match[1], 5, MAX_RANK) if match else None


def record_file(rank: int) -> str:
    """Return the name of a rank's record in a step's folder. ValueError for what is no rank."""
    return f"rank-{_rank_digits(rank)}.json"


def parse_record(name: str) -> int | None:
    """Return the rank whose record has this name, None for any other name."""
    match = _RECORD.fullmatch(name)
    return _number(match[1], 5, MAX_RANK) if match else None


def kept_image(rank: int, record: str) -> str:
    """Return the name of a rank's image in an object store, by its record's SHA-256.

    The record tells every byte of the image, so objects of one name are the same, whoever wrote them. ValueError
    for what is no rank or no digest.
    """
    return f"rank-{_rank_digits(rank)}-{_checked_digest(record)[:16]}.safetensors"


def kept_record(rank: int, record: str) -> str:
    """Return the name of a rank's record in an object store, by its own SHA-256. ValueError as `kept_image`."""
    return f"rank-{_rank_digits(rank)}-{_checked_digest(record)[:16]}.json"


def parse_kept(name: str) -> int | None:
    """Return the rank whose image or record in an object store has this name, None for any other name."""
    match = _KEPT.fullmatch(name)
    return _number(match[1], 5, MAX_RANK) if match else None


def layout_file(digest: str) -> str:
    """Return the name of a layout's file in the folder `layouts`. ValueError for what is no digest."""
    return f"{_checked_digest(digest)}.json"


def spare_layout_file(digest: str) -> str:
    """Return the name of the second copy of a layout's file. ValueError for what is no digest."""
    return f"{layout_file(digest).removesuffix('.json')}-spare.json"


def parse_spare_layout(name: str) -> str | None:
    """Return the digest of the layout whose second copy has this name, None for any other name."""
    match = _SPARE.fullmatch(name)
    return match[1] if match else None


def parse_layout(name: str) -> str | None:
    """Return the digest of the layout whose file has this name, None for any other name."""
    match = _LAYOUT.fullmatch(name)
    return match[1] if match else None


def partial_file(name: str, nonce: str) -> str:
    """Return under which name a file is written until it is whole and gets its own.

    `name` is one of this module's file names. ValueError for any other, and for what is no nonce.
    """
    partial = f"{name}.{_checked_nonce(nonce)}.partial"
    if parse_partial(partial) is None:
        raise ValueError(f"{name!r} is none of a run's file names")
    return partial


def parse_partial(name: str) -> tuple[str, str] | None:
    """Return the file name and nonce of a file that is not whole, None for any other name."""
    match = _PARTIAL.fullmatch(name)
    if match is None:
        return None
    known = match[1] in (RUN, MANIFEST, REPLICA, DISKS, DISK) or any(
        parse(match[1]) is not None
        for parse in (parse_image, parse_record, parse_kept, parse_layout, parse_spare_layout)
    )
    return (match[1], match[2]) if known else None
