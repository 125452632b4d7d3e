#include "bindings.hpp"

#include <nanobind/ndarray.h>

#include <cstdlib>
#include <cstring>

#include "crc32c.hpp"
#include "error.hpp"
#include "huge_pages.hpp"
#include "patterns.hpp"
#include "peer.hpp"
#include "pinned.hpp"
#include "segment.hpp"

namespace zs::python {
namespace {

void translate(const std::exception_ptr& pending, void*) {
  try {
    std::rethrow_exception(pending);
  } catch (const zs::Error& error) {
    if (error.kind == zs::Kind::usage) return PyErr_SetString(PyExc_ValueError, error.what());
    const char* name = "StorageError";
    if (error.kind == zs::Kind::capacity) name = "CapacityError";
    if (error.kind == zs::Kind::capability) name = "CapabilityError";
    if (error.kind == zs::Kind::format) name = "FormatError";
    if (error.kind == zs::Kind::corrupt) name = "CorruptError";
    if (error.kind == zs::Kind::device) name = "DeviceError";
    nb::object type = nb::module_::import_("zerostall.errors").attr(name);
    nb::object raised =
        error.kind == zs::Kind::storage ? type(error.what(), "errno"_a = error.code) : type(error.what());
    PyErr_SetObject(type.ptr(), raised.ptr());
  }
}

uint32_t crc32c_of(nb::handle data, uint32_t value) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  {
    nb::gil_scoped_release release;
    value = zs::crc32c(view.buf, static_cast<size_t>(view.len), value);
  }
  PyBuffer_Release(&view);
  return value;
}

void bind_devices(nb::module_& m) {
  nb::class_<Device>(m, "Device", "A CUDA device as captures use it: copy streams, a thread, spare memory.")
      .def(nb::init<int>(), "ordinal"_a, nogil(),
           "CapabilityError: there is no driver. DeviceError: the driver refuses.")
      .def_prop_ro("ordinal", [](const Device& d) { return d.device->ordinal(); })
      .def_prop_ro(
          "reserved", [](const Device& d) { return d.device->vram()->reserved(); },
          "Bytes of the device's memory that are kept for pending chunks.")
      .def(
          "reserve",
          [](const Device& d, uint64_t nbytes, uint64_t block_bytes) {
            d.device->vram()->reserve(nbytes, block_bytes);
          },
          "nbytes"_a, "block_bytes"_a, nogil(),
          "Take memory of the device for pending chunks of at most `block_bytes`. CapacityError: it has too "
          "little.")
      .def(
          "load_probes", [](const Device& d) { d.device->probes(); }, nogil(),
          "Have the driver compile the kernel that captures look at sources with. DeviceError: it refuses.")
      .def_prop_ro(
          "memory", [](const Device& d) { return zs::memory_of(*d.device->context()); },
          "Free and total bytes of the device.")
      .def(
          "close", [](const Device& d) { d.device->close(); }, nogil(),
          "End the thread. Jobs on the device that are not done fail.");
}

void bind_segments(nb::module_& m) {
  nb::class_<zs::Segment>(m, "Segment",
                          "Shared memory that can neither shrink nor grow, lent by file descriptor.")
      .def(nb::init<const std::string&, uint64_t, bool>(), "name"_a, "nbytes"_a, nb::kw_only(),
           "populate"_a = true, nogil(),
           "Take all the memory at once. CapacityError: it cannot be had.\n\n"
           "With `populate` false pages come when they are first written.")
      .def_static(
          "attach", &zs::Segment::attach, "fd"_a, "nbytes"_a, nogil(),
          "Map a segment that another process made; keeps a duplicate of `fd`. FormatError: it is none.")
      .def_prop_ro("address",
                   [](const zs::Segment& s) { return reinterpret_cast<uint64_t>(s.mapping()->data()); })
      .def_prop_ro("nbytes", &zs::Segment::nbytes)
      .def_prop_ro(
          "huge",
          [](const zs::Segment& s) {
            return zs::PageTable().kind(s.mapping()->data(), s.nbytes()) == zs::PageTable::Kind::huge;
          },
          "Whether its memory is known to lie on huge pages, but for less than one at its end.")
      .def("fileno", &zs::Segment::fileno)
      .def("close", &zs::Segment::close, nogil(),
           "Let go of the memory. Views that still live keep it mapped.")
      .def(
          "touch",
          [](const zs::Segment& s, unsigned threads) {
            if (!s.mapping()->populate(threads))
              throw zs::Error(zs::Kind::capacity, "the kernel has not enough pages for the segment");
          },
          "threads"_a, nogil(),
          "Enter all pages into this process's page table, so that later use does not fault.")
      .def(
          "pin",
          [](const zs::Segment& s, const Device& device, uint64_t stretch, unsigned threads, uint64_t offset,
             std::optional<uint64_t> nbytes) {
            const auto& mapping = s.mapping();
            mapping->attach(nullptr);  // no page is registered twice
            mapping->attach(std::make_shared<zs::Pinned>(device.device->context(), *mapping, stretch, threads,
                                                         offset, nbytes.value_or(UINT64_MAX)));
          },
          "device"_a, nb::kw_only(), "stretch"_a, "threads"_a, "offset"_a = 0, "nbytes"_a.none() = nb::none(),
          nogil(),
          "Touch whole pages, by default all, and register them with CUDA, `stretch` bytes at a time; no "
          "copy "
          "may cross the end of one.")
      .def(
          "pinned",
          [](const zs::Segment& s, uint64_t offset) {
            return s.mapping()->has_guest() && zs::cuda::is_pinned(s.mapping()->data() + offset);
          },
          "offset"_a = 0, "Whether the page at `offset` is registered with CUDA.")
      .def(
          "view",
          [](const zs::Segment& s, uint64_t offset, uint64_t nbytes) {
            const auto& mapping = s.mapping();
            if (offset > mapping->nbytes() || nbytes > mapping->nbytes() - offset)
              throw zs::Error(zs::Kind::usage, "the view ends beyond the segment");
            auto* holder = new std::shared_ptr<zs::Mapping>(mapping);
            const nb::capsule owner(holder,
                                    [](void* p) noexcept { delete static_cast<decltype(holder)>(p); });
            const size_t shape[1] = {nbytes};
            return nb::ndarray<nb::memview, uint8_t, nb::ndim<1>>(mapping->data() + offset, 1, shape, owner)
                .cast();
          },
          "offset"_a, "nbytes"_a, nb::sig("def view(self, offset: int, nbytes: int) -> memoryview"),
          "Writable bytes of the segment; keeps the memory mapped.");
}

void bind_work(nb::module_& m) {
  nb::class_<zs::Pool>(m, "Pool", "Named worker threads for several jobs at once, the oldest first.")
      .def(nb::init<const std::string&, unsigned, bool>(), "name"_a, "threads"_a, nb::kw_only(),
           "awaited"_a = false, nogil(),
           "`awaited`: training waits for its jobs; its threads need not give way to training.")
      .def_prop_ro("threads", &zs::Pool::threads)
      .def("close", &zs::Pool::close, nogil(), "End the threads. Jobs that are not done fail.");

  nb::class_<Job>(m, "Job", "Work in the background. Letting go of it cancels it.")
      .def("done", [](const Job& j) { return j.job->done(); })
      .def("wait", &Job::wait, "timeout"_a.none() = nb::none(),
           "Sleep until done or until `timeout` seconds are over; then whether it is done. Raises the job's "
           "error.")
      .def(
          "cancel", [](const Job& j) { j.job->cancel(); }, nogil(),
          "Begin nothing further. The job is done when what is in flight has ended.")
      .def(
          "fileno", [](const Job& j) { return j.job->fileno(); }, "An eventfd, readable when done.")
      .def_prop_ro(
          "cancelled", [](const Job& j) { return j.job->cancelled(); },
          "Whether a cancel kept something from being done.")
      .def_prop_ro("nbytes_done", [](const Job& j) { return j.job->nbytes_done(); });

  nb::class_<Plan>(m, "Plan", "Where each piece of an image lies.")
      .def(
          "__init__",
          [](Plan* self, uint64_t nbytes, nb::bytes header, uint64_t chunk_bytes,
             std::vector<uint64_t> offsets, std::vector<uint64_t> sizes) {
            new (self) Plan{std::make_shared<zs::Plan>(
                nbytes, std::string(static_cast<const char*>(header.data()), header.size()), chunk_bytes,
                std::move(offsets), std::move(sizes))};
          },
          nb::kw_only(), "nbytes"_a, "header"_a, "chunk_bytes"_a, "offsets"_a, "sizes"_a,
          "Pieces in rising offset order, none over another; what nothing covers is zeros.")
      .def_prop_ro("nbytes", [](const Plan& p) { return p.plan->nbytes(); })
      .def_prop_ro("chunk_bytes", [](const Plan& p) { return p.plan->chunk_bytes(); })
      .def_prop_ro("chunks", [](const Plan& p) { return p.plan->chunks(); })
      .def_prop_ro("pieces", [](const Plan& p) { return p.plan->pieces(); })
      .def(
          "pieces_in",
          [](const Plan& p, uint64_t chunk) {
            const auto [first, last] = p.plan->pieces_in(chunk);
            return nb::module_::import_("builtins").attr("range")(first, last);
          },
          "chunk"_a, nb::sig("def pieces_in(self, chunk: int) -> range"),
          "Indexes of the pieces in a chunk.");
}

}  // namespace

void bind_memory(nb::module_& m) {
  bind_devices(m);
  bind_segments(m);
  bind_work(m);
}

}  // namespace zs::python

NB_MODULE(_native, m) {
  // An interpreter that ends while a checkpointer lives leaves objects behind: nobody's stderr needs to hear
  // of it.
  nb::set_leak_warnings(std::getenv("ZEROSTALL_LEAKS") != nullptr);
  m.doc() = "C++ core of zerostall. Private: import zerostall.native, not this.";
  nb::register_exception_translator(zs::python::translate);
  m.attr("CRC_HARDWARE") = zs::crc32c_hardware();
  m.def(
      "interpreter", [] { return PyInterpreterState_GetID(PyInterpreterState_Get()); },
      "Which of this process's interpreters asks; the main one is 0.");
  m.def(
      "forks",
      [] {
        auto* const at = reinterpret_cast<char*>(const_cast<uint32_t*>(zs::forks_at()));
        return nb::steal<nb::object>(PyMemoryView_FromMemory(at, sizeof(uint32_t), PyBUF_READ));
      },
      nb::sig("def forks() -> memoryview"),
      "The number of forks that this process is away from the one that loaded this module.");
  m.def("crc32c", &zs::python::crc32c_of, "data"_a, "value"_a = 0,
        nb::sig("def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int"),
        "CRC-32C of `data`, which follows bytes whose checksum is `value`.");
  m.def(
      "crc32c_memory",
      [](uint64_t address, uint64_t nbytes, uint32_t value) {
        return zs::crc32c(zs::python::pointer<const void>(address), nbytes, value);
      },
      "address"_a, "nbytes"_a, "value"_a = 0, nogil(), "The same of memory by its address.");
  m.def(
      "any_masked",
      [](uint64_t address, uint64_t nbytes, uint32_t width, uint64_t mask, uint64_t value) {
        return zs::any_masked(zs::python::pointer<const void>(address), nbytes, width, mask, value);
      },
      "address"_a, "nbytes"_a, nb::kw_only(), "width"_a, "mask"_a, "value"_a, nogil(),
      "Whether some element of `width` bytes there has the bits `value` under `mask`.");
  zs::python::bind_memory(m);
  zs::python::bind_tensors(m);
  zs::python::bind_jobs(m);
  zs::python::bind_peer(m);
  zs::python::bind_probes(m);
  zs::python::bind_device_files(m);
}
