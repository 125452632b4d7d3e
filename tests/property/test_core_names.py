"""Names: every path has one, every name one path, whatever the keys look like."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from zerostall.core import names, steps
from zerostall.core.names import Key, join, split, strip_wrappers
from zerostall.errors import FormatError

# Lone surrogates are texts in Python, so they may be keys.
TEXT = st.text(st.characters(exclude_categories=()), max_size=8) | st.text(".[]\\e=u0d8", max_size=8)
PATHS = st.lists(TEXT | st.integers() | TEXT.map(Key), min_size=1, max_size=6).map(tuple)
SEGMENTS = st.sampled_from(
    ["a", "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "b\\.module", "x[0]"]
)


@given(PATHS)
@example(("a.b", ""))
@example(("\ud83d\ude00",))
def test_a_path_comes_back_from_its_name(path: tuple[names.Part, ...]):
    name = join(path)
    name.encode()
    assert split(name) == path
    assert [type(part) for part in split(name)] == [type(part) for part in path]


@given(TEXT | st.lists(TEXT | st.sampled_from([".", "[", "]", "[0]", "[=", "\\"])).map("".join))
def test_a_text_is_the_name_of_its_path_or_refused(text: str):
    try:
        path = split(text)
    except FormatError:
        return
    assert join(path) == text


@given(PATHS, st.integers(0, 5))
def test_a_name_is_built_step_by_step(path: tuple[names.Part, ...], cut: int):
    head, tail = path[: cut + 1], path[cut + 1 :]
    name = join(head)
    for part in tail:
        name = names.child(name, part)
    assert name == join(path)


@given(st.lists(SEGMENTS, min_size=1, max_size=8), st.booleans())
def test_stripping_twice_is_stripping_once(segments: list[str], rooted: bool):
    name = ".".join(segments)
    stripped = strip_wrappers(name, rooted=rooted)
    assert strip_wrappers(stripped, rooted=rooted) == stripped
    assert stripped.split(".")[-1] == name.split(".")[-1]
    if rooted:
        assert stripped.split(".")[0] == name.split(".")[0]


@given(st.integers(0, steps.MAX_STEP), st.integers(0, steps.MAX_RANK), st.binary(min_size=4, max_size=16))
def test_files_and_folders_come_back_from_their_names(step: int, rank: int, nonce: bytes):
    assert steps.parse_step(steps.step_folder(step)) == step
    assert steps.parse_rewound(steps.rewound_folder(step)) == step
    assert steps.parse_staging(steps.staging_folder(step, nonce.hex())) == (step, nonce.hex())
    assert steps.parse_image(steps.image_file(rank)) == rank
    assert steps.parse_record(steps.record_file(rank)) == rank


@given(
    st.from_regex(r"(step|rewound|staging|rank)-[0-9]{0,21}(-[0-9a-f]{0,9})?(\.json|\.safetensors)?", fullmatch=True)
    | st.text()
)
def test_a_name_that_is_read_is_the_only_one(name: str):
    step, rewound, staging = steps.parse_step(name), steps.parse_rewound(name), steps.parse_staging(name)
    image, record = steps.parse_image(name), steps.parse_record(name)
    assert step is None or steps.step_folder(step) == name
    assert rewound is None or steps.rewound_folder(rewound) == name
    assert staging is None or steps.staging_folder(*staging) == name
    assert image is None or steps.image_file(image) == name
    assert record is None or steps.record_file(record) == name
    assert sum(found is not None for found in (step, rewound, staging, image, record)) <= 1
