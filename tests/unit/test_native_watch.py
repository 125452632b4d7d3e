"""Whether dicts and lists still hold the very objects they held, however they were changed."""

from __future__ import annotations

import gc
import weakref
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerostall.native import Block, Still, Watch

Change = Callable[[dict], object]

CHANGES: dict[str, Change] = {
    "another value": lambda d: d.__setitem__("a", object()),
    "another type": lambda d: d.__setitem__("n", "1"),
    "another key": lambda d: d.__setitem__("z", 1),
    "deleted": lambda d: d.__delitem__("a"),
    "popped": lambda d: d.pop("a"),
    "popped last": lambda d: d.popitem(),
    "cleared": lambda d: d.clear(),
    "updated": lambda d: d.update(a=object()),
    "merged": lambda d: d.__ior__({"a": object()}),
    "set by default": lambda d: d.setdefault("z", 1),
    "put behind": lambda d: d.__setitem__("a", d.pop("a")),
}


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda items: defaultdict(list, items)])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_a_dict_is_told(kind: Callable[[dict], dict], change: Change) -> None:
    held = kind({"a": object(), "n": 1, "t": None})
    watch = Watch([{}, held, []])
    assert watch.same() and watch.same()
    change(held)
    assert not watch.same()
    assert not watch.same()


def test_what_is_put_back_is_the_same_again() -> None:
    one, other = object(), object()
    held = {"a": one, "b": 2.0}
    watch = Watch([held])
    held["a"] = other
    assert not watch.same()
    held["a"] = one
    held["b"] = 3.0  # a plain value may be another of its type
    assert watch.same()
    held["a"] = other
    assert not watch.same()


def test_attributes_of_an_object_are_told() -> None:
    class Thing:
        pass

    thing = Thing()
    thing.a = object()
    watch, still = Watch([vars(thing)]), Still([Watch([{}, vars(thing)])], [])
    for _ in range(100):  # the interpreter finds a shorter way to set an attribute
        assert watch.same() and still.same() and still.same()
        before, thing.a = thing.a, object()
        assert not watch.same() and not still.same()
        thing.a = before
    assert watch.same() and still.same()
    thing.b = 1
    assert not watch.same() and not still.same()
    del thing.b
    assert watch.same() and still.same()


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.integers(0, 3)), max_size=30))
def test_it_says_what_a_look_at_every_item_says(moves: list[tuple[int, str, int]]) -> None:
    things = [object() for _ in range(4)]
    held: list[dict[str, object]] = [{"a": things[0]}, {}, {"a": things[1], "b": things[2]}]
    then = [dict(one) for one in held]
    watch = Watch(held)
    for which, key, value in moves:
        if value == 3:
            held[which].pop(key, None)
        else:
            held[which][key] = things[value]
        expected = all(
            list(one) == list(other) and all(one[k] is other[k] for k in one)
            for one, other in zip(held, then, strict=True)
        )
        assert watch.same() == expected


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_written_to_is_told_until_it_is_taken_for_untouched_again(change: Change) -> None:
    held = {"a": object(), "n": 1, "t": None}
    watch = Watch([{}, held])
    if not watch.untouched():
        pytest.skip("this Python does not say which dicts were written to")
    change(held)
    assert not watch.untouched()
    assert not watch.untouched()
    watch.renew()
    assert watch.untouched()


def test_a_plain_value_of_the_same_type_is_the_same_and_yet_written() -> None:
    held = {"lr": 0.1}
    watch = Watch([held])
    held["lr"] = 0.2
    assert watch.same()
    assert not watch.untouched()


def test_a_list_never_says_that_it_is_untouched() -> None:
    assert not Watch([[1]]).untouched()


def test_a_block_keeps_whoever_has_the_memory() -> None:
    class Owner:
        pass

    memory, owner = array("B", bytes(8)), Owner()
    block, gone = Block(memory.buffer_info()[0], 8, owner), weakref.ref(owner)
    del owner
    assert gone() is not None and block.same()
    del block
    assert gone() is None


def test_still_is_what_every_block_and_every_watch_says() -> None:
    memory = array("B", bytes(100))
    held: dict[str, object] = {"a": object()}
    still = Still([Block(memory.buffer_info()[0], 100), Watch([held])])
    assert still.same()
    memory[99] = 1
    assert not still.same()
    memory[99] = 0
    assert still.same()
    held["a"] = object()
    assert not still.same()
    assert Still([]).same()
    with pytest.raises(ValueError, match="only blocks and watches"):
        Still([held])  # pyright: ignore[reportArgumentType]


@given(st.lists(st.tuples(st.sampled_from("owdibl"), st.sampled_from("ab"), st.integers(0, 3)), max_size=30))
def test_still_says_what_its_watches_say_one_by_one(moves: list[tuple[str, str, int]]) -> None:
    """However often it was asked before, and whatever it has learnt from that."""
    things: list[object] = [object(), 1, 2, "2"]
    held: dict[str, dict[str, object]] = {name: {"a": things[0], "b": 1} for name in "owdib"}
    rows = [things[0], 1]

    def watches() -> tuple[list[Watch], list[Watch]]:
        same = [Watch([held["w"], rows]), Watch([{}], [held["i"]], [held["d"]]), Watch([], [held["b"], rows])]
        return same, [Watch([held["o"]])]

    still, (same, untouched) = Still(*watches()), watches()
    for which, key, value in moves:
        if which == "l":
            rows["ab".index(key)] = things[value]
        else:
            held[which][key] = things[value]
        expected = all(watch.untouched() for watch in untouched) and all(watch.same() for watch in same)
        assert still.same() == expected


def test_still_is_let_go_of_with_what_it_looks_at() -> None:
    class Thing:
        pass

    held: dict[str, object] = {"thing": Thing()}
    gone = weakref.ref(held["thing"])
    held["still"] = still = Still([Watch([held])])
    assert not still.same()
    del held, still
    gc.collect()
    assert gone() is None


def test_members_of_a_set_and_attributes_are_told() -> None:
    class Thing:
        mark = object()

    names = {"a", "b"}
    watch = Watch([names, (Thing, "mark")])
    assert watch.same() and not watch.untouched()
    names ^= {"a", "c"}
    assert not watch.same()
    names ^= {"a", "c"}
    assert watch.same()
    Thing.mark, before = object(), Thing.mark
    assert not watch.same()
    del Thing.mark
    assert not watch.same()
    Thing.mark = before
    assert watch.same()
    with pytest.raises(ValueError, match="watched"):
        Watch([(Thing, "mark", 1)])
    with pytest.raises(ValueError, match="none"):
        Watch([(Thing, "none")])


def test_what_lies_behind_is_looked_at_once_a_door_was_written_to_and_as_long_as_it_differs() -> None:
    inside, door = {"a": object()}, {"n": 1}
    watch = Watch([{}], [inside], [door])
    before, inside["a"] = inside["a"], object()
    assert watch.same()  # nobody has come in
    door["n"] = 2
    assert not watch.same() and not watch.same()
    inside["a"] = before
    assert watch.same()
    inside["a"] = object()
    assert watch.same()
    always = Watch([], [inside])
    inside["a"] = object()
    assert not always.same()


def test_what_lies_behind_is_let_go_of() -> None:
    class Thing:
        pass

    held, thing = {}, Thing()
    held["me"] = Watch([], [{"thing": thing, "held": held}], [held])
    gone = weakref.ref(thing)
    del held, thing
    gc.collect()
    assert gone() is None
