"""Names: what they look like, and what is no name."""

from __future__ import annotations

import pytest

from zerostall.core.names import Key, Part, child, join, split, strip_wrappers
from zerostall.errors import FormatError


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("model", "layers", "0", "weight"), "model.layers.0.weight"),
        (("data", 3, "a.b"), r"data[3].a\.b"),
        (("data", -1), "data[-1]"),
        (("a", "0"), "a.0"),
        (("a", ""), r"a.\e"),
        (("", ""), r"\e.\e"),
        (("a", "[0]"), r"a.\[0\]"),
        (("a", "\\"), r"a.\\"),
        (("a", r"\e"), r"a.\\e"),
        (("a", "\ud800"), r"a.\ud800"),
        (("a", Key("1.5"), 0), r"a[=1\.5][0]"),
        (("a", Key("")), r"a[=\e]"),
        (("a", "é\n/"), "a.é\n/"),
        ((0, "a"), "[0].a"),
    ],
)
def test_a_path_has_one_name(path: tuple[Part, ...], name: str):
    assert join(path) == name
    assert split(name) == path


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "a.",
        ".a",
        "a..b",
        "a[",
        "a]",
        "a[]",
        "a[01]",
        "a[-0]",
        "a[+1]",
        "a[ 1]",
        "a[1]b",
        "a\\",
        r"a\x",
        r"a\eb",
        r"a\u0041",
        r"a\ud8",
        r"a\uD800",
        "\ud800",
        "a[=]",
        "a[=1.5]",
        "a.[0]",
        "a[0",
        "a[²]",
        "a[" + "1" * 5000 + "]",
    ],
)
def test_what_is_no_name_is_refused(text: str):
    with pytest.raises(FormatError):
        split(text)


def test_odd_parts_are_refused():
    for odd in (True, 1.5, None):
        with pytest.raises(TypeError):
            child("a", odd)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        join(())
    with pytest.raises(ValueError):
        child("a", 10**10_000)


@pytest.mark.parametrize(
    ("name", "stripped"),
    [
        ("model.module.a.weight", "model.a.weight"),
        ("model._orig_mod.module.a", "model.a"),
        ("model.module._orig_mod.a", "model.a"),
        ("model.a._orig_mod.b", "model.a.b"),
        ("model.a._fsdp_wrapped_module._checkpoint_wrapped_module.b", "model.a.b"),
        ("model.a.module.b", "model.a.module.b"),
        ("model.module", "model.module"),
        ("model._orig_mod", "model._orig_mod"),
        ("model", "model"),
        ("module.module.a", "module.a"),
        (r"model.a\._orig_mod.b", r"model.a\._orig_mod.b"),
        (r"model.a\\._orig_mod.b", r"model.a\\.b"),
        ("nets[0]._orig_mod.a", "nets[0].a"),
        ("model.my_module.a", "model.my_module.a"),
    ],
)
def test_wrappers_are_stripped(name: str, stripped: str):
    assert strip_wrappers(name) == stripped


def test_wrappers_are_stripped_without_a_root():
    assert strip_wrappers("module.a.weight", rooted=False) == "a.weight"
    assert strip_wrappers("_orig_mod.module.a", rooted=False) == "a"
    assert strip_wrappers("a.module.b", rooted=False) == "a.module.b"
    assert strip_wrappers("module", rooted=False) == "module"
