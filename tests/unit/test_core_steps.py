"""Names of files and folders: one spelling each, and nothing that leads elsewhere."""

from __future__ import annotations

import pytest

from zerostall.core import steps

DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (0, "step-000000000000"),
        (12000, "step-000000012000"),
        (10**12, "step-1000000000000"),
        (2**63 - 1, "step-9223372036854775807"),
    ],
)
def test_steps(step: int, name: str):
    assert steps.step_folder(step) == name
    assert steps.parse_step(name) == step
    assert steps.rewound_folder(step) == name.replace("step", "rewound")
    assert steps.parse_rewound(name.replace("step", "rewound")) == step
    staging = steps.staging_folder(step, "00ff00ff")
    assert staging == name.replace("step", "staging") + "-00ff00ff"
    assert steps.parse_staging(staging) == (step, "00ff00ff")


def test_ranks_layouts_and_partial_files():
    assert steps.image_file(3) == "rank-00003.safetensors" and steps.parse_image("rank-00003.safetensors") == 3
    assert steps.record_file(100_000) == "rank-100000.json" and steps.parse_record("rank-100000.json") == 100_000
    assert steps.layout_file(DIGEST) == f"{DIGEST}.json" and steps.parse_layout(f"{DIGEST}.json") == DIGEST
    spare = steps.spare_layout_file(DIGEST)
    assert spare == f"{DIGEST}-spare.json" and steps.parse_spare_layout(spare) == DIGEST
    assert steps.parse_layout(spare) is None and steps.parse_spare_layout(f"{DIGEST}.json") is None
    for name in (
        steps.RUN,
        steps.MANIFEST,
        steps.image_file(0),
        steps.record_file(0),
        steps.layout_file(DIGEST),
        spare,
    ):
        assert steps.parse_partial(steps.partial_file(name, "12345678")) == (name, "12345678")
        assert steps.parse_partial(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "step-",
        "step-12000",
        "step-000000012000 ",
        "step-000000012000\n",
        "step-0000000012000",
        "Step-000000012000",
        "step-00000001200a",
        "step--00000012000",
        "step-+00000012000",
        "step-０００００００１２０００",
        "step-000000012000.tmp",
        "step-99999999999999999999",
        "step-9223372036854775808",
        "../step-000000012000",
        "/step-000000012000",
        "latest",
        "step-000000012000/",
        "rewound-12",
        "staging-000000012000",
        "staging-000000012000-",
        "staging-000000012000-XYZ",
        "staging-000000012000-00FF00FF",
        "staging-000000012000-00ff00ff/..",
        "rank-0.json",
        "rank-000000.json",
        "rank-00000.json.tmp",
        "rank-99999999999.json",
        "rank-2147483648.json",
        "rank-00000.pt",
        "rank-00000.safetensors\n",
        f"{DIGEST}",
        f"{DIGEST.upper()}.json",
        "x.00000000.partial",
        "../run.json.00000000.partial",
        "run.json.0.partial",
        "pinned.00000000.partial",
    ],
)
def test_every_other_name_is_not_ours(name: str):
    for parse in (
        steps.parse_step,
        steps.parse_rewound,
        steps.parse_staging,
        steps.parse_image,
        steps.parse_record,
        steps.parse_layout,
        steps.parse_spare_layout,
        steps.parse_partial,
    ):
        assert parse(name) is None


@pytest.mark.parametrize("odd", [-1, True, 1.0, "1", None, 2**63])
def test_what_is_no_number_gets_no_name(odd: int):
    for make in (steps.step_folder, steps.rewound_folder, steps.image_file, steps.record_file):
        with pytest.raises(ValueError):
            make(odd)
    with pytest.raises(ValueError):
        steps.staging_folder(odd, "00000000")


@pytest.mark.parametrize("odd", ["", "..", "0" * 7, "0" * 33, "XYZXYZXY", "0000000/", "00000000\n"])
def test_what_is_no_nonce_or_digest_gets_no_name(odd: str):
    for call in (
        lambda: steps.staging_folder(1, odd),
        lambda: steps.partial_file("run.json", odd),
        lambda: steps.layout_file(odd),
        lambda: steps.spare_layout_file(odd),
        lambda: steps.partial_file(odd, "00000000"),
    ):
        with pytest.raises(ValueError):
            call()


def test_names_are_legal_on_every_system():
    names = [
        steps.step_folder(1),
        steps.rewound_folder(1),
        steps.staging_folder(1, "0" * 8),
        steps.image_file(1),
        steps.record_file(1),
        steps.layout_file(DIGEST),
        steps.spare_layout_file(DIGEST),
        steps.RUN,
        steps.LAYOUTS,
        steps.MANIFEST,
        steps.PINNED,
        steps.partial_file(steps.RUN, "0" * 8),
    ]
    for name in names:
        assert not set(name) & set('<>:"/\\|?* ') and not name.endswith(".") and name == name.lower()
