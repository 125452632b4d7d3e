#include "bindings.hpp"
#include "bindings_still.hpp"
#include "huge_pages.hpp"
#include "tensors.hpp"

namespace zs::python {
namespace {

// A model may well hold, by some way, the checkpointer that watches its modules: Python must see through.
int traverse_watch(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<zs::Watch>(self)->traverse(visit, arg) : 0;
}

int clear_watch(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<zs::Watch>(self)->drop();
  return 0;
}

int traverse_still(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Still>(self)->traverse(visit, arg) : 0;
}

int clear_still(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Still>(self)->drop();
  return 0;
}

std::vector<PyObject*> pointers_of(nb::sequence objects) {
  std::vector<PyObject*> pointers;
  for (nb::handle object : objects) pointers.push_back(object.ptr());
  return pointers;
}

PyType_Slot still_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_still)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_still)},
    {0, nullptr},
};

PyType_Slot watch_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_watch)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_watch)},
    {0, nullptr},
};

}  // namespace

void bind_tensors(nb::module_& m) {
  nb::class_<zs::Watch>(m, "Watch", nb::type_slots(watch_slots),
                        "What some containers hold, held, to tell whether it is still the same.")
      .def(
          "__init__",
          [](zs::Watch* self, nb::sequence containers, nb::sequence behind, nb::sequence doors) {
            if (nb::len(behind) == 0)
              new (self) zs::Watch(pointers_of(containers));
            else
              new (self) zs::Watch(pointers_of(containers), pointers_of(behind), pointers_of(doors));
          },
          "containers"_a, "behind"_a = nb::make_tuple(), "doors"_a = nb::make_tuple(),
          nb::sig("def __init__(self, containers: collections.abc.Sequence[dict | list | set | tuple[object, "
                  "str]], "
                  "behind: collections.abc.Sequence[dict | list | set | tuple[object, str]] = (), "
                  "doors: collections.abc.Sequence[dict] = ()) -> None"),
          "A tuple is an attribute: its owner and its name. Those `behind` change only where one of the "
          "`doors` was "
          "written to, and are not looked at before; without doors they always are.")
      .def("same", &zs::Watch::same,
           "Is every key, value, element and attribute the very object it was? A plain number, string or "
           "None may have "
           "become "
           "another of its type.")
      .def(
          "untouched", &zs::Watch::untouched,
          "Has none been written to since renew()? Then all plain values are the same, too. Also false where "
          "that cannot be told.")
      .def("renew", &zs::Watch::renew, "Begin anew to look for what is written to.");

  nb::class_<zs::Block>(m, "Block", "What lay in some memory, to tell whether it still does.")
      .def(
          "__init__",
          [](zs::Block* self, uint64_t address, std::optional<uint64_t> nbytes, nb::handle) {
            const auto* const at = pointer<const std::byte>(address);
            new (self) zs::Block(nbytes ? zs::Block(at, *nbytes) : zs::Block::of_heap(at));
          },
          "address"_a, "nbytes"_a.none() = nb::none(), "owner"_a.none() = nb::none(), nb::keep_alive<1, 4>(),
          nb::sig(
              "def __init__(self, address: int, nbytes: int | None = None, owner: object = None) -> None"),
          "Without `nbytes` all of a block that the heap has given. `owner`: what the memory lives as long "
          "as, "
          "kept alive.")
      .def("__len__", &zs::Block::size)
      .def("same", &zs::Block::same);

  nb::class_<Still>(m, "Still", nb::type_slots(still_slots), "Blocks and watches that are asked together.")
      .def(nb::init<nb::iterable, nb::iterable>(), "items"_a, "untouched"_a = nb::make_tuple(),
           nb::sig("def __init__(self, items: collections.abc.Iterable[Block | Watch], "
                   "untouched: collections.abc.Iterable[Watch] = ()) -> None"))
      .def("same", &Still::same,
           "Is each the same, and were those that are to be `untouched` not even written to?");

  nb::class_<zs::Tensors>(m, "Tensors",
                          "Tensors or numpy arrays, in the order of a plan's pieces; keeps them alive.")
      .def(
          "__init__",
          [](zs::Tensors* self, nb::sequence tensors, nb::sequence tracked, bool exchange) {
            const nb::list objects(tensors);
            std::vector<PyObject*> pointers;
            for (nb::handle object : objects) pointers.push_back(object.ptr());
            std::vector<bool> marks;
            for (nb::handle mark : tracked) marks.push_back(nb::cast<bool>(mark));
            new (self) zs::Tensors(pointers, marks, exchange);
          },
          "tensors"_a, "tracked"_a, nb::kw_only(), "exchange"_a = true,
          nb::sig("def __init__(self, tensors: collections.abc.Sequence[object], "
                  "tracked: collections.abc.Sequence[bool], *, exchange: bool = True) -> None"),
          "ValueError names the index of what cannot be described. `exchange=False`: method calls only.")
      .def("__len__", &zs::Tensors::size)
      .def("refresh", &zs::Tensors::refresh,
           "Read addresses, shapes and versions afresh; the indexes of those that are no longer what they "
           "were.")
      .def_prop_ro("devices", &zs::Tensors::devices, "Numbers of the CUDA devices that hold some.")
      .def("let_go", &zs::Tensors::let_go,
           "Release memory of a device that tensors have left since refresh(). Call it when nothing reads.")
      .def(
          "moved", &zs::Tensors::moved, nb::kw_only(), "exchanged"_a = true,
          "Tracked ones that were written to since refresh(); if asked and before let_go(), also those whose "
          "memory was exchanged behind their storage.")
      .def(
          "any_within",
          [](const zs::Tensors& self, uint64_t address, uint64_t nbytes) {
            return self.any_within(pointer<std::byte>(address), nbytes);
          },
          "address"_a, "nbytes"_a, "Does any begin there, as refresh() saw them?")
      .def(
          "bring_to_huge_pages",
          [](const zs::Tensors& self) {
            std::vector<const void*> blocks = self.blocks();
            zs::HugePages pages;
            {
              nb::gil_scoped_release release;
              pages = zs::bring_to_huge_pages(std::move(blocks));
            }
            return std::make_tuple(pages.brought, pages.left, pages.why_left);
          },
          "Have what refresh() reads lie on huge pages: of regions of 2 MiB, how many do now, how many do "
          "not, and "
          "why.")
      .def_prop_ro("pointers", &zs::Tensors::pointers)
      .def_prop_ro("imprinted", &zs::Tensors::imprinted,
                   "Of how many it is told from the bytes torch keeps of them whether they have changed.");
}

}  // namespace zs::python
