"""Matching: what goes where, and what is refused with which words."""

from __future__ import annotations

import re

import pytest

from zerostall.core import matching
from zerostall.core.matching import match, raise_for, select
from zerostall.errors import MismatchError

F32 = ("float32", (2, 3))


def all_of(*names: str) -> dict[str, matching.Facts]:
    return dict.fromkeys(names, F32)


def test_equal_names_match():
    found = match(all_of("m.a", "m.b"), all_of("m.b", "m.a"))
    assert found.pairs == (("m.b", "m.b"), ("m.a", "m.a"))
    assert (found.missing, found.unexpected, found.different) == ((), (), {})
    raise_for(found)


def test_strictness_has_two_sides():
    found = match(all_of("m.a", "m.b"), all_of("m.a", "m.c"))
    with pytest.raises(MismatchError) as caught:
        raise_for(found, what="step 7")
    error = caught.value
    assert (error.missing, error.unexpected, error.different) == (("m.c",), ("m.b",), {})
    for words in (
        "step 7 does not fit: 1 missing, 1 unexpected, 0 different",
        "missing",
        "m.c",
        "unexpected",
        "m.b",
        "hint:",
    ):
        assert words in str(error)
    loose = match(all_of("m.a", "m.b"), all_of("m.a", "m.c"), strict=False)
    raise_for(loose)
    assert (loose.missing, loose.unexpected) == (("m.c",), ("m.b",))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (("float32", (3, 2)), "shape (2, 3) stored, (3, 2) asked for"),
        (("bfloat16", (2, 3)), "type float32 stored, bfloat16 asked for"),
        (("float32", ()), "shape (2, 3) stored, () asked for"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_what_differs_is_never_tolerated(other: matching.Facts, words: str, strict: bool):
    with pytest.raises(MismatchError) as caught:
        raise_for(match({"a": F32}, {"a": other}, strict=strict))
    assert caught.value.different == {"a": words}
    assert words in str(caught.value)


def test_long_lists_are_cut_in_the_message_alone():
    stored = all_of(*(f"t{index}" for index in range(50)))
    with pytest.raises(MismatchError) as caught:
        raise_for(match(stored, all_of("x")))
    assert "t19" in str(caught.value) and "t20" not in str(caught.value) and "and 30 more" in str(caught.value)
    assert len(caught.value.unexpected) == 50


def test_only_takes_a_part():
    stored = all_of("m.enc.w", "m.enc.extra", "m.head", "o")
    found = match(stored, all_of("m.enc.w", "m.head", "new"), only="m.enc.*")
    assert found.pairs == (("m.enc.w", "m.enc.w"),)
    assert (found.missing, found.unexpected) == ((), ("m.enc.extra",))
    assert match(stored, stored, only=["*", "!m.*"]).pairs == (("o", "o"),)
    assert len(match(stored, stored, only="!o").pairs) == 3


def test_brackets_in_a_glob_are_brackets():
    stored = all_of("d[0].a", "d[1].a", "d0.a")
    assert match(stored, stored, only="d[0].*").pairs == (("d[0].a", "d[0].a"),)
    assert match(stored, stored, only="d[?].a").pairs == (("d[0].a", "d[0].a"), ("d[1].a", "d[1].a"))


def test_globs_take_any_text():
    selection = select(["a*z", "*x*"])
    assert (
        selection.takes("a\n.[].z")
        and selection.takes("x")
        and not selection.takes("az\n")
        and not selection.takes("A.z")
    )
    assert not select("*" * 5_000 + "b").takes("a" * 5_000)


@pytest.mark.parametrize("only", ["nothing.*", ["m.a", "nothing"], ["m.*", "!nothing"], [], ["m.*", "!m.*"], ""])
def test_only_that_fits_nothing_is_refused(only: str | list[str]):
    with pytest.raises(ValueError, match="only="):
        match(all_of("m.a"), all_of("m.a"), only=only)


def test_what_fits_nothing_is_named_as_it_was_written():
    stored = all_of("model.a", "optimizer.b")
    for only in ("modle.*", ["*", "!modle.*"]):
        text = only if isinstance(only, str) else only[1]
        with pytest.raises(ValueError, match=re.escape(f"only={text!r} fits no name; names begin with model, optim")):
            match(stored, stored, only=only)
    with pytest.raises(ValueError, match=re.escape(r"rename='^modle\\.' is found in no name; names begin with model,")):
        match(stored, stored, rename={r"^modle\.": "model."})


def test_names_are_mapped():
    stored = all_of("m.enc.w", "o")
    found = match(stored, all_of("net.encoder.w", "y"), rename={r"^net\.encoder": "m.enc"}, only="net.encoder.*")
    assert found.pairs == (("m.enc.w", "net.encoder.w"),)
    assert found.missing == () and found.unexpected == ()
    with pytest.raises(MismatchError) as caught:
        raise_for(match(stored, all_of("x"), rename={"x": "nope"}))
    assert caught.value.missing == ("x",) and "x (looked for as nope)" in str(caught.value)


def test_mappings_follow_each_other_and_may_fill_twice():
    rules = {r"^b\.(?P<rest>.*)": r"c.\g<rest>", "^c": "a"}
    found = match(all_of("a.w"), all_of("a.w", "b.w"), rename=rules)
    assert found.pairs == (("a.w", "a.w"), ("a.w", "b.w"))


@pytest.mark.parametrize(
    "rename",
    [{"(": "a"}, {"a": r"\1"}, {"a": r"\g<x>"}, {"a": r"\q"}, {"nothing": "a"}, {"a": "b", "a$": "c"}],
)
def test_a_mapping_that_cannot_be_used_is_refused(rename: dict[str, str]):
    with pytest.raises(ValueError, match="rename"):
        match(all_of("a"), all_of("a"), rename=rename)


def test_a_mapping_may_begin_with_flags():
    assert select(rename={r"(?i)^NET\.(\w+)": r"m.\1"}).stored_name("net.w") == "m.w"


def test_wrappers_match_when_asked():
    stored, wanted = all_of("model.module.a", "model.b"), all_of("model.a", "model.b")
    found = match(stored, wanted)
    assert found.missing == ("model.a",)
    with pytest.raises(MismatchError, match="prefixes=True"):
        raise_for(found)
    found = match(stored, wanted, prefixes=True)
    assert found.pairs == (("model.module.a", "model.a"), ("model.b", "model.b"))
    raise_for(found)
    assert match(wanted, stored, prefixes=True).pairs == (
        ("model.a", "model.module.a"),
        ("model.b", "model.b"),
    )
    assert match(all_of("model.module.a"), all_of("model._orig_mod.a"), prefixes=True).missing == ()


def test_wrappers_match_only_where_that_is_clear():
    found = match(all_of("model.module.a", "model._orig_mod.a"), all_of("model.a"), prefixes=True)
    assert found.missing == ("model.a",) and len(found.unexpected) == 2
    exact = match(all_of("model.module.a", "model.a"), all_of("model.module.a", "model.a"), prefixes=True)
    assert exact.pairs == (("model.module.a", "model.module.a"), ("model.a", "model.a"))


def test_nothing_fits_nothing():
    with pytest.raises(ValueError):
        match(all_of("a"), {}, only="*")
    assert match({}, {}).pairs == ()


def test_a_name_takes_all_that_is_below_it_and_no_name_that_goes_on():
    stored = all_of("m.enc.w", "m.enc[0]", "m.encoder.w", r"m.enc\.w", "m.head", "m2")
    assert [name for name, _ in match(stored, stored, only="m.enc").pairs] == ["m.enc.w", "m.enc[0]"]
    left = [name for name, _ in match(stored, stored, only=["m", "!m.enc"]).pairs]
    assert left == ["m.encoder.w", r"m.enc\.w", "m.head"]
