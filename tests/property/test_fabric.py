"""The topology file: what it says of nodes, what is no file, and what counts where nodes say otherwise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerostall.core.fabric import Fabric, Stand, expand, stand
from zerostall.core.placement import ImageId, Load, Site, place
from zerostall.core.topology import Place, apart, hops, way
from zerostall.errors import FormatError

TWO_PODS = """
[racks]
r1 = ["gpu-[01-02]"]
r2 = ["gpu-[03-04]"]
r3 = ["gpu-[05-06]"]

[leaves]
leaf1 = ["gpu-[01,03]"]
leaf2 = ["gpu-02", "gpu-04"]
leaf3 = ["gpu-[05-06]"]

[spines]
spine1 = ["leaf[1-2]"]
spine2 = ["leaf1"]
spine3 = ["leaf3"]
"""


def test_what_a_file_says() -> None:
    fabric = Fabric.parse(TWO_PODS, "t.toml")
    assert fabric.words == "6 nodes, 3 racks, 3 leaf switches, 3 spine switches"
    at = fabric.places
    assert at["gpu-01"] == Place("r1", "leaf1", spines=("spine1", "spine2"))
    assert str(at["gpu-01"]) == "rack=r1,leaf=leaf1,spines=spine1+spine2"
    assert [hops(at["gpu-01"], at[f"gpu-0{other}"]) for other in (3, 2, 5)] == [2, 4, 6]
    assert [apart(at["gpu-01"], at[f"gpu-0{other}"]) for other in (2, 3, 4)] == [1, 1, 2]
    assert way(at["gpu-01"], at["gpu-02"]) == "same rack, 4 hops"
    assert way(at["gpu-01"], at["gpu-03"]) == "same leaf switch, 2 hops"
    assert way(at["gpu-01"], at["gpu-05"]) == "another rack, 6 hops"
    assert way(Place(rack="a"), Place(rack="b")) == "another rack"
    assert way(Place(), at["gpu-01"]) == "another node, no rack or switch is known"
    only = Fabric.parse('[leaves]\na = ["n1"]\nb = ["n2"]', "t.toml")
    assert only.places == {"n1": Place(leaf="a"), "n2": Place(leaf="b")} and only.words == "2 nodes, 2 leaf switches"


WRONG = {
    "racks = [": "is no TOML",
    "": "it names no node",
    "[racks]": "it names no node",
    "[nodes]\nn1 = []": "unknown field `nodes`",
    "[racks]\nr1 = 'n1'": "Expected `array`",
    "[racks]\nr1 = [7]": "Expected `str`",
    "[racks]\nr1 = ['n1']\nr2 = ['n1']": "node n1 is in two: r1, r2",
    "[racks]\nr1 = ['n1', 'n[1-2]']": "node n1 is twice in rack r1",
    "[leaves]\nl1 = ['n1']\nl2 = ['n1']": "node n1 is in two: l1, l2",
    "[racks]\nr1 = ['n1', 'n2']\n[leaves]\nl1 = ['n1']": "node n2 has a rack and no leaf switch",
    "[racks]\nr1 = ['n1']\n[leaves]\nl1 = ['n1', 'n2']": "node n2 has a leaf switch and no rack",
    "[racks]\n'../r' = ['n1']": "'../r' is no name for a rack",
    "[racks]\nr1 = ['../n']": "rack r1: '../n' is no name for a node",
    "[racks]\nr1 = ['n[3-1]']": "'3-1' is no range such as 01-08",
    "[racks]\nr1 = ['n[08-100]']": "'08-100' is no range",
    "[racks]\nr1 = ['n[1-2]x[1-2]']": "is no name, and no pattern",
    "[racks]\nr1 = ['n[1-']": "is no name, and no pattern",
    "[racks]\nr1 = ['n[1-999999999]']": "stands for more than 65536 names",
    "[racks]\nr1 = ['a[1-60000]', 'b[1-60000]']": "more than 65536 nodes",
    "[racks]\nr1 = ['n1']\n[spines]\ns1 = ['l1']": "spine switch s1 names the leaf switch l1, which has no nodes",
    "[leaves]\nl1 = ['n1']\nl2 = ['n2']\n[spines]\ns1 = ['l1']": "leaf switch l2 is at no spine switch",
    "[leaves]\nl1 = ['n1']\n[spines]\nl1 = ['l1']": "l1 is a leaf switch and a spine switch",
    "[racks]\nr1 = ['n1']\nr1 = ['n2']": "is no TOML",
    "[racks]\n" + "\n".join(f"r{n} = ['n1']" for n in range(6)): "and 2 more",
}


@pytest.mark.parametrize("text", WRONG, ids=WRONG.values())
def test_what_is_no_topology_file(text: str) -> None:
    with pytest.raises(FormatError) as refused:
        Fabric.parse(text, "/etc/topology.toml")
    assert str(refused.value).startswith("/etc/topology.toml") and WRONG[text] in str(refused.value)


@settings(max_examples=200)
@given(st.text(max_size=200))
def test_whatever_is_in_it_it_is_read_or_refused(text: str) -> None:
    for body in (text, f"[racks]\nr1 = ['{text}']", f"[leaves]\nl1 = ['n1']\n[spines]\n'{text}' = ['l1']"):
        try:
            Fabric.parse(body, "file")
        except FormatError:
            continue


@settings(max_examples=100)
@given(st.integers(0, 99), st.integers(0, 30), st.integers(2, 4))
def test_a_range_stands_for_its_numbers(first: int, more: int, digits: int) -> None:
    last = first + more
    if last >= 10**digits:
        return
    names = list(expand(f"a[{first:0{digits}}-{last:0{digits}}].b"))
    assert names == [f"a{number:0{digits}}.b" for number in range(first, last + 1)]


@st.composite
def fabrics(draw: st.DrawFn) -> tuple[str, dict[str, tuple[str, str]]]:
    """A file, and which rack and leaf switch each node is said to be at."""
    nodes = {
        f"n{number}": (f"r{draw(st.integers(0, 3))}", f"l{draw(st.integers(0, 3))}")
        for number in range(draw(st.integers(2, 12)))
    }
    lines = []
    for table, index in (("racks", 0), ("leaves", 1)):
        lines.append(f"[{table}]")
        for group in sorted({at[index] for at in nodes.values()}):
            lines.append(f"{group} = {[name for name, at in nodes.items() if at[index] == group]}")
    return "\n".join(lines), nodes


@settings(max_examples=100)
@given(fabrics())
def test_copies_stand_apart_as_the_file_says_where_they_can(fabric: tuple[str, dict[str, tuple[str, str]]]) -> None:
    text, nodes = fabric
    places = Fabric.parse(text, "file").places
    assert {name: (at.rack, at.leaf) for name, at in places.items()} == nodes
    sites = {name: Site(at, 1 << 30) for name, at in places.items()}
    loads = [Load(ImageId("run", rank), name, 1) for rank, name in enumerate(sorted(nodes))]
    placed = place(loads, sites)
    for load in loads:
        (target,) = placed.targets[load.image]
        best = max(apart(places[load.home], at) for name, at in places.items() if name != load.home)
        if best < 2:
            assert load.image in placed.short
        else:
            assert apart(places[load.home], places[target]) == 2 or load.image in placed.short


def test_the_file_counts_more_than_labels_and_who_is_not_in_it_is_told() -> None:
    fabric = Fabric.parse(TWO_PODS, "t.toml")
    assert stand("n", Place(rack="r"), None) == Stand(Place(rack="r"), "")
    assert stand("gpu-05", Place(pod="p"), fabric) == Stand(Place("r3", "leaf3", "p", ("spine3",)), "as t.toml says")
    other = stand("gpu-05", Place(rack="r1"), fabric)
    assert other.place.rack == "r3" and other.doubt
    assert other.reason == "its labels say rack=r1, t.toml says rack=r3: the file counts"
    unknown = stand("gpu-99", Place(rack="r1"), fabric)
    assert unknown == Stand(Place(rack="r1"), "not in t.toml: its labels count, rack=r1", doubt=True)
    assert stand("gpu-99", Place(), fabric).reason == "not in t.toml: it shares a rack and a switch with none"
    racks = Fabric.parse('[racks]\na = ["n1"]', "t.toml")
    assert stand("n1", Place(leaf="l7"), racks).place == Place("a", "l7")
