// The only file that knows nanobind. It turns integers into pointers, zs::Error into zerostall.errors, and
// keeps alive what the jobs work on.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstdlib>

#include "capture.hpp"
#include "crc32c.hpp"
#include "device.hpp"
#include "error.hpp"
#include "patterns.hpp"
#include "pinned.hpp"
#include "scatter.hpp"
#include "segment.hpp"
#include "tensors.hpp"
#include "transfer.hpp"
#include "verify.hpp"
#include "watch.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using nogil = nb::call_guard<nb::gil_scoped_release>;

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

template <class T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
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

struct Plan {
  std::shared_ptr<const zs::Plan> plan;
};

// What Python holds of a device; jobs that are under way keep it, but get nothing more done.
struct Device {
  std::shared_ptr<zs::Device> device;
  pid_t owner = ::getpid();

  explicit Device(int ordinal) : device(zs::Device::open(ordinal)) {}
  Device(const Device&) = delete;
  ~Device() {
    if (::getpid() != owner) {  // a forked child has neither its thread nor a driver
      new std::shared_ptr<zs::Device>(std::move(device));
      return;
    }
    nb::gil_scoped_release release;
    device->close();
    device.reset();
  }
};

using Streams = std::vector<std::pair<nb::object, uint64_t>>;  // devices and their streams of now

std::vector<zs::Training> trainings_of(const Streams& streams, std::vector<nb::object>* keep) {
  std::vector<zs::Training> result;
  for (const auto& [device, stream] : streams) {
    result.push_back({nb::cast<const Device&>(device).device, pointer<CUstream_st>(stream)});
    if (keep != nullptr) keep->push_back(device);
  }
  return result;
}

// What Python holds of a job. Whoever lets go of it gives up the job: it is cancelled, and what is in flight
// is awaited, so that no thread touches the memory of tensors and images that may go next.
struct Job {
  std::shared_ptr<zs::Job> job;
  std::vector<nb::object> kept;
  pid_t owner = ::getpid();

  Job(std::shared_ptr<zs::Job> started, std::vector<nb::object> keep)
      : job(std::move(started)), kept(std::move(keep)) {}
  Job(const Job&) = delete;
  ~Job() {
    if (::getpid() !=
        owner) {  // a forked child has no threads to wait for, nor their locks in a usable state
      new std::shared_ptr<zs::Job>(std::move(job));
      return;
    }
    nb::gil_scoped_release release;
    job->cancel();
    job->wait_for(std::nullopt);
    job.reset();
  }
  bool wait(std::optional<double> timeout) {
    using namespace std::chrono;
    const auto deadline = steady_clock::now() +
                          duration_cast<nanoseconds>(duration<double>(std::min(timeout.value_or(1e9), 1e9)));
    // In slices, so that Ctrl-C is noticed.
    while (true) {
      const auto slice = std::min<nanoseconds>(deadline - steady_clock::now(), milliseconds(100));
      {
        nb::gil_scoped_release release;
        if (job->wait_for(std::max(slice, nanoseconds(0)))) break;
      }
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (steady_clock::now() >= deadline) return false;
    }
    job->rethrow();
    return true;
  }
};

template <class T>
struct JobOf : Job {
  using Job::Job;
  T& get() const { return static_cast<T&>(*job); }
};

template <class T, class Begin>
void make(JobOf<T>* self, std::vector<nb::object> keep, Begin&& begin) {
  std::shared_ptr<T> job;
  {
    nb::gil_scoped_release release;
    job = begin();
  }
  new (self) JobOf<T>(std::move(job), std::move(keep));
}

using Capture = JobOf<zs::Capture>;
using Scatter = JobOf<zs::Scatter>;
using Verify = JobOf<zs::Verify>;
using FileWrite = JobOf<zs::FileWrite>;
using FileRead = JobOf<zs::FileRead>;

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
          "close", [](const Device& d) { d.device->close(); }, nogil(),
          "End the thread. Jobs on the device that are not done fail.");
}

void bind_memory(nb::module_& m) {
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
      .def(nb::init<const std::string&, unsigned>(), "name"_a, "threads"_a, nogil())
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

// A model may well hold, by some way, the checkpointer that watches its modules: Python must see through.
int traverse_watch(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<zs::Watch>(self)->traverse(visit, arg) : 0;
}

int clear_watch(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<zs::Watch>(self)->drop();
  return 0;
}

PyType_Slot watch_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_watch)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_watch)},
    {0, nullptr},
};

void bind_tensors(nb::module_& m) {
  nb::class_<zs::Watch>(m, "Watch", nb::type_slots(watch_slots),
                        "The items of some dicts and lists, held, to tell whether they are still the same.")
      .def(
          "__init__",
          [](zs::Watch* self, nb::sequence containers) {
            std::vector<PyObject*> pointers;
            for (nb::handle container : containers) pointers.push_back(container.ptr());
            new (self) zs::Watch(pointers);
          },
          "containers"_a,
          nb::sig("def __init__(self, containers: collections.abc.Sequence[dict | list]) -> None"))
      .def("same", &zs::Watch::same,
           "Is every key, value and element the very object it was? A plain number, string or None may have "
           "become "
           "another of its type.");

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
      .def("moved", &zs::Tensors::moved, "Tracked ones that were written to since refresh().")
      .def_prop_ro("pointers", &zs::Tensors::pointers);
}

void bind_copies(nb::module_& m) {
  nb::class_<zs::Protection>(m, "Protection", "What protect() had to do.")
      .def_ro("pending", &zs::Protection::pending, "Chunks that nobody had begun.")
      .def_ro("frozen_bytes", &zs::Protection::frozen_bytes)
      .def_ro("helped_bytes", &zs::Protection::helped_bytes)
      .def_ro("waited", &zs::Protection::waited, "Seconds, for chunks in flight.");

  nb::class_<Capture, Job>(m, "Capture", "Tensors to image. The image's memory must outlive the job.")
      .def(
          "__init__",
          [](Capture* self, nb::object pool, const Plan& plan, nb::object sources, uint64_t image,
             std::vector<uint32_t> at_once, int announce, const Streams& streams,
             std::optional<uint64_t> ahead) {
            zs::Arrays arrays = nb::cast<zs::Tensors&>(sources).sources();
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            std::vector<nb::object> keep{pool, sources};
            std::vector<zs::Training> trainings = trainings_of(streams, &keep);
            make(self, std::move(keep), [&] {
              return zs::Capture::begin(workers, plan.plan, std::move(arrays), pointer<std::byte>(image),
                                        at_once, announce, std::move(trainings),
                                        ahead.value_or(zs::kForecast));
            });
          },
          "pool"_a, "plan"_a, "sources"_a, "image"_a, nb::kw_only(), "at_once"_a, "announce"_a = -1,
          "streams"_a = Streams(), "ahead"_a.none() = UINT64_MAX,
          nb::sig("def __init__(self, pool: Pool, plan: Plan, sources: Tensors, image: int, *, "
                  "at_once: collections.abc.Sequence[int], announce: int = -1, "
                  "streams: collections.abc.Sequence[tuple[Device, int]] = (), ahead: int | None = 2**64 - "
                  "1) -> None"),
          "Pieces in `at_once` are copied before this returns. Call sources.refresh() right before.\n\n"
          "At the end 1 is added to the eventfd `announce`, which must stay open until then. `streams`: of "
          "each "
          "device that holds sources the CUstream that training uses now; everything is read as the work it "
          "has "
          "been given leaves it. `ahead`: chunks that a device is given before a guard comes, which can "
          "then only be waited for; None: as many as should have landed by then, by what was measured "
          "before.")
      .def(
          "protect",
          [](const Capture& c, uint64_t freeze_bytes, const Streams& streams) {
            const std::vector<zs::Training> trainings = trainings_of(streams, nullptr);
            nb::gil_scoped_release release;
            return c.get().protect(freeze_bytes, trainings);
          },
          nb::kw_only(), "freeze_bytes"_a = 0, "streams"_a = Streams(),
          nb::sig("def protect(self, *, freeze_bytes: int = 0, "
                  "streams: collections.abc.Sequence[tuple[Device, int]] = ()) -> Protection"),
          "Return when no source will be read any more, or by nothing that these streams do not wait for.")
      .def_prop_ro(
          "drain_seconds", [](const Capture& c) { return c.job->done() ? c.get().drain_seconds() : 0.0; },
          "From the beginning until the last chunk of a device had landed, when done.")
      .def_prop_ro(
          "checksums",
          [](const Capture& c) {
            if (!c.job->done() || c.job->cancelled())
              throw zs::Error(zs::Kind::usage, "a capture has checksums when it is done");
            c.job->rethrow();
            return c.get().checksums();
          },
          "CRC-32C of each chunk of the image, when done.");

  nb::class_<Scatter, Job>(m, "Scatter", "Image to tensors.")
      .def(
          "__init__",
          [](Scatter* self, nb::object pool, const Plan& plan, nb::object targets, uint64_t image,
             std::optional<std::vector<uint32_t>> pieces, std::optional<std::vector<uint32_t>> checksums,
             const Streams& streams) {
            zs::Arrays arrays = nb::cast<zs::Tensors&>(targets).targets();
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            if (!pieces) {
              pieces.emplace(plan.plan->pieces());
              for (size_t k = 0; k < pieces->size(); ++k) (*pieces)[k] = static_cast<uint32_t>(k);
            }
            std::vector<nb::object> keep{pool, targets};
            std::vector<zs::Training> trainings = trainings_of(streams, &keep);
            make(self, std::move(keep), [&] {
              return zs::Scatter::begin(workers, plan.plan, std::move(arrays),
                                        pointer<const std::byte>(image), std::move(*pieces),
                                        std::move(checksums), trainings);
            });
          },
          "pool"_a, "plan"_a, "targets"_a, "image"_a, "pieces"_a.none() = nb::none(), nb::kw_only(),
          "checksums"_a.none() = nb::none(), "streams"_a = Streams(),
          nb::sig("def __init__(self, pool: Pool, plan: Plan, targets: Tensors, image: int, "
                  "pieces: collections.abc.Sequence[int] | None = None, *, "
                  "checksums: collections.abc.Sequence[int] | None = None, "
                  "streams: collections.abc.Sequence[tuple[Device, int]] = ()) -> None"),
          "targets[i] receives piece pieces[i]; None: all pieces. `streams` as for a Capture.\n\n"
          "With `checksums` each chunk is checked while it is copied (before, where it goes to a device); "
          "the "
          "first that fails ends the job with CorruptError, and what was written by then stays.");
}

void bind_files(nb::module_& m) {
  nb::class_<Verify, Job>(m, "Verify", "An image in memory against its checksums.")
      .def(
          "__init__",
          [](Verify* self, nb::object pool, uint64_t image, uint64_t nbytes, uint64_t chunk_bytes,
             std::vector<uint32_t> checksums) {
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            make(self, {pool}, [&] {
              return zs::Verify::begin(workers, pointer<const std::byte>(image), nbytes, chunk_bytes,
                                       std::move(checksums));
            });
          },
          "pool"_a, "image"_a, "nbytes"_a, "chunk_bytes"_a, "checksums"_a,
          nb::sig("def __init__(self, pool: Pool, image: int, nbytes: int, chunk_bytes: int, "
                  "checksums: collections.abc.Sequence[int]) -> None"))
      .def_prop_ro("bad", [](const Verify& v) { return v.get().bad(); }, "Chunks found bad so far.");

  nb::class_<FileWrite, Job>(m, "FileWrite",
                             "Image to file. CorruptError: the image fails a checksum. Syncs nothing.")
      .def(
          "__init__",
          [](FileWrite* self, nb::object pool, int fd, uint64_t image, uint64_t nbytes, uint64_t chunk_bytes,
             std::vector<uint32_t> checksums, bool direct) {
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            make(self, {pool}, [&] {
              return zs::FileWrite::begin(workers, fd, pointer<const std::byte>(image), nbytes, chunk_bytes,
                                          std::move(checksums), direct);
            });
          },
          "pool"_a, "fd"_a, "image"_a, "nbytes"_a, nb::kw_only(), "chunk_bytes"_a, "checksums"_a, "direct"_a,
          nb::sig("def __init__(self, pool: Pool, fd: int, image: int, nbytes: int, *, chunk_bytes: int, "
                  "checksums: collections.abc.Sequence[int], direct: bool) -> None"))
      .def_prop_ro(
          "fell_back", [](const FileWrite& w) { return w.get().fell_back(); },
          "Why the page cache was used although `direct` was asked for.");

  nb::class_<FileRead, Job>(m, "FileRead", "File to image.")
      .def(
          "__init__",
          [](FileRead* self, nb::object pool, int fd, uint64_t image, uint64_t nbytes, uint64_t chunk_bytes,
             std::vector<uint32_t> checksums, bool direct) {
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            make(self, {pool}, [&] {
              return zs::FileRead::begin(workers, fd, pointer<std::byte>(image), nbytes, chunk_bytes,
                                         std::move(checksums), direct);
            });
          },
          "pool"_a, "fd"_a, "image"_a, "nbytes"_a, nb::kw_only(), "chunk_bytes"_a, "checksums"_a, "direct"_a,
          nb::sig("def __init__(self, pool: Pool, fd: int, image: int, nbytes: int, *, chunk_bytes: int, "
                  "checksums: collections.abc.Sequence[int], direct: bool) -> None"))
      .def_prop_ro(
          "bad", [](const FileRead& r) { return r.get().bad(); },
          "Chunks so far that fail their checksum or that the file does not have.")
      .def_prop_ro(
          "verified", [](const FileRead& r) { return r.get().verified(); },
          "Chunks 0 to verified - 1 are in the image and whole.")
      .def_prop_ro(
          "fell_back", [](const FileRead& r) { return r.get().fell_back(); },
          "Why the page cache was used although `direct` was asked for.");
}

}  // namespace

NB_MODULE(_native, m) {
  // An interpreter that ends while a checkpointer lives leaves objects behind: nobody's stderr needs to hear
  // of it.
  nb::set_leak_warnings(std::getenv("ZEROSTALL_LEAKS") != nullptr);
  m.doc() = "C++ core of zerostall. Private: import zerostall.native, not this.";
  nb::register_exception_translator(translate);
  m.attr("CRC_HARDWARE") = zs::crc32c_hardware();
  m.def("crc32c", &crc32c_of, "data"_a, "value"_a = 0,
        nb::sig("def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int"),
        "CRC-32C of `data`, which follows bytes whose checksum is `value`.");
  m.def(
      "crc32c_memory",
      [](uint64_t address, uint64_t nbytes, uint32_t value) {
        return zs::crc32c(pointer<const void>(address), nbytes, value);
      },
      "address"_a, "nbytes"_a, "value"_a = 0, nogil(), "The same of memory by its address.");
  m.def(
      "any_masked",
      [](uint64_t address, uint64_t nbytes, uint32_t width, uint64_t mask, uint64_t value) {
        return zs::any_masked(pointer<const void>(address), nbytes, width, mask, value);
      },
      "address"_a, "nbytes"_a, nb::kw_only(), "width"_a, "mask"_a, "value"_a, nogil(),
      "Whether some element of `width` bytes there has the bits `value` under `mask`.");
  bind_devices(m);
  bind_memory(m);
  bind_work(m);
  bind_tensors(m);
  bind_copies(m);
  bind_files(m);
}
