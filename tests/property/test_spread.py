"""What lies here and there in an image, filled chunk by chunk: the same as when the whole image is looked into."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerostall.core.shards import View
from zerostall.core.strides import lying_in
from zerostall.trainer.state import writes
from zerostall.trainer.state.spread import Loose, alone

CHUNK = 4096
IMAGE = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 10 * CHUNK + 100, dtype=np.uint8))
SIZES = {"uint8": 1, "bfloat16": 2, "float32": 4, "int64": 8, "complex128": 16}


@st.composite
def spans(draw):
    """Shape and strides; strides need not be nested, and elements may repeat."""
    dims = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=3))
    return tuple(size for size, _ in dims), tuple(stride for _, stride in dims)


@given(spans(), st.integers(-5, 90), st.integers(0, 60))
def test_the_elements_of_a_stretch_are_found_once_each(span, begin, nbytes):
    shape, strides = span
    found = [
        index
        for box in lying_in(shape, strides, begin, begin + nbytes)
        for index in itertools.product(*map(range, box.start, box.stop))
    ]
    places = {index: sum(map(int.__mul__, index, strides)) for index in itertools.product(*map(range, shape))}
    assert sorted(found) == sorted(index for index, place in places.items() if begin <= place < begin + nbytes)


@given(st.permutations([3, 7, 500]), st.integers(0, 9000), st.integers(1, 9000))
def test_a_tensors_stretch_is_a_handful_of_boxes(order, begin, nbytes):
    strides = {500: 1, 7: 500, 3: 3500}
    assert len(lying_in(order, [strides[size] for size in order], begin, begin + nbytes)) <= 7


@st.composite
def views(draw):
    """Views into the image, aligned or not."""
    dtype = draw(st.sampled_from(sorted(SIZES)))
    dims = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300)), max_size=3))
    shape, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    reach = (sum((size - 1) * stride for size, stride in dims) + 1) * SIZES[dtype] if 0 not in shape else 0
    start = draw(st.integers(0, max(0, IMAGE.numel() - reach)))
    if draw(st.booleans()):
        start -= start % SIZES[dtype]
    return View("", "", dtype, shape, strides, start)


@settings(max_examples=200)
@given(st.lists(views(), max_size=4), st.randoms(use_true_random=False), st.booleans())
def test_chunk_by_chunk_is_as_from_the_whole_image(wanted, chance, single):
    loose = Loose(CHUNK)
    targets = [torch.zeros(view.shape, dtype=getattr(torch, view.dtype)) for view in wanted]
    for view, target in zip(wanted, targets, strict=True):
        loose.add(0, view, target, alone=single)
    chunks = list(range(math.ceil(IMAGE.numel() / CHUNK)))
    chance.shuffle(chunks)
    for chunk in chunks:
        # Nobody has the rest of it: what is read beyond a chunk would be something else.
        loose.pour(chunk, IMAGE[chunk * CHUNK : (chunk + 1) * CHUNK].clone())
    assert loose.settle() == []
    for view, target in zip(wanted, targets, strict=True):
        assert writes.alike(target, writes.view_of(IMAGE, view))


def test_numpys_arrays_are_filled_too():
    target = np.zeros((3, 2), dtype=np.float32)
    loose = Loose(CHUNK)
    loose.add(CHUNK - 8, View("", "", "float32", (3, 2), (1, 1000), 0), target[:, ::-1][:, ::-1], alone=True)
    for chunk in (2, 1, 0):
        loose.pour(chunk, IMAGE[chunk * CHUNK : (chunk + 1) * CHUNK])
    whole = IMAGE.numpy()[: 9 * CHUNK].view(np.float32)[(CHUNK - 8) // 4 :]
    assert target.tobytes() == np.stack([whole[:3], whole[1000:1003]], axis=1).tobytes()


def test_what_shares_memory_is_written_last_and_in_order():
    memory = torch.zeros(4)
    whole = torch.arange(3 * CHUNK, dtype=torch.float32).view(torch.uint8)[: 3 * CHUNK]
    loose = Loose(CHUNK)
    for begin in (2 * CHUNK, 0, CHUNK):
        target = memory[1:3] if begin == CHUNK else memory[:2]
        loose.add(begin, View("", "", "float32", (2,), (1,), 0), target, alone=False)
    loose.add(0, View("", "", "float32", (1,), (1,), 4), memory[3:], alone=False, compared="m.other")
    for chunk in (2, 0, 1):
        loose.pour(chunk, whole[chunk * CHUNK : (chunk + 1) * CHUNK])
    assert not memory.any()
    assert loose.settle() == ["m.other"]  # another decides about it, and has written other bytes there
    assert memory.tolist() == [0.0, 1024.0, 1025.0, 0.0]


def test_who_is_alone_in_its_memory():
    one, two = torch.zeros(4), torch.zeros(4)
    assert alone([one, two[:2], two[3:]]) == {one.untyped_storage().data_ptr()}
