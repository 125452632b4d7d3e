#include "bindings.hpp"
#include "cufile.hpp"
#include "device_file.hpp"
#include "load.hpp"
#include "pinned.hpp"
#include "segment.hpp"
#include "tensors.hpp"

namespace zs::python {
namespace {

using Load = JobOf<zs::Load>;
using DeviceTransfer = JobOf<zs::DeviceTransfer>;

// As Device: nothing is undone in a forked child, which has no driver.
template <class T>
struct Owned {
  std::shared_ptr<T> held;
  uint32_t owner = forks();
  explicit Owned(std::shared_ptr<T> one) : held(std::move(one)) {}
  Owned(const Owned&) = delete;
  ~Owned() {
    if (forks() != owner) {
      new std::shared_ptr<T>(std::move(held));
      return;
    }
    nb::gil_scoped_release release;
    held.reset();
  }
};

using DeviceFile = Owned<zs::DeviceFile>;
using Staging = Owned<zs::Mapping>;

using RegisteredMemory = Owned<cufile::Registration>;

void bind_cufile(nb::module_& m) {
  nb::class_<cufile::Facts>(m, "CuFileFacts", "What cuFile says of this machine.")
      .def_ro("library", &cufile::Facts::library)
      .def_ro("version", &cufile::Facts::version,
              "1000 times the major version and 10 times the minor; 0: unknown.")
      .def_prop_ro(
          "nvfs", [](const cufile::Facts& f) { return std::pair(f.nvfs_major, f.nvfs_minor); },
          "Version of the nvidia-fs driver; (0, 0) where it is not loaded.")
      .def_ro("p2p", &cufile::Facts::p2p, "Whether it reaches NVMe by the kernel's own peer-to-peer DMA.")
      .def_ro("compat", &cufile::Facts::compat, "Whether it may move bytes through host memory instead.")
      .def_prop_ro("direct", &cufile::Facts::direct, "Whether it can do without.");
  m.def(
      "cufile_open",
      [](const Device& device, const std::vector<std::string>& libraries) {
        const cuda::Context::Current current(*device.device->context());
        return cufile::open(libraries);
      },
      "device"_a, "libraries"_a, nogil(),
      nb::sig("def cufile_open(device: Device, libraries: collections.abc.Sequence[str]) -> CuFileFacts"),
      "Open the first of these that there is, or what ZEROSTALL_LIBCUFILE names; once a process.\n\n"
      "CapabilityError: why that cannot be.");

  nb::class_<DeviceFile>(m, "DeviceFile", "An open file that cuFile takes, for one device.")
      .def(
          "__init__",
          [](DeviceFile* self, const Device& device, int fd) {
            new (self) DeviceFile(std::make_shared<zs::DeviceFile>(device.device->context(), fd));
          },
          "device"_a, "fd"_a, nogil(),
          "Keeps a duplicate of `fd`. CapabilityError: cuFile refuses it. Call cufile_open first.");

  nb::class_<RegisteredMemory>(m, "RegisteredMemory",
                               "Memory of a device that cuFile knows; goes before the memory.")
      .def(
          "__init__",
          [](RegisteredMemory* self, const Device& device, uint64_t address, uint64_t nbytes) {
            new (self) RegisteredMemory(
                std::make_shared<cufile::Registration>(device.device->context(), address, nbytes));
          },
          "device"_a, "address"_a, "nbytes"_a, nogil())
      .def_prop_ro(
          "problem", [](const RegisteredMemory& r) { return r.held->problem(); },
          "Why cuFile does not take it; empty where it does. Transfers work all the same.");

  nb::class_<DeviceTransfer, Job>(m, "DeviceTransfer", "File to memory of a device, or back, through cuFile.")
      .def(
          "__init__",
          [](DeviceTransfer* self, nb::object pool, nb::object file, uint64_t address, uint64_t nbytes,
             uint64_t offset, bool write, nb::object memory) {
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            const auto held = nb::cast<const DeviceFile&>(file).held;
            const CUdeviceptr base =
                memory.is_none() ? 0 : nb::cast<const RegisteredMemory&>(memory).held->at();
            make(self, {pool, file, memory}, [&] {
              using Way = zs::DeviceTransfer::Way;
              return zs::DeviceTransfer::begin(workers, held, write ? Way::to_file : Way::to_device, address,
                                               nbytes, offset, base);
            });
          },
          "pool"_a, "file"_a, "address"_a, "nbytes"_a, nb::kw_only(), "offset"_a, "write"_a,
          "memory"_a.none() = nb::none(),
          nb::sig(
              "def __init__(self, pool: Pool, file: DeviceFile, address: int, nbytes: int, *, offset: int, "
              "write: bool, memory: RegisteredMemory | None = None) -> None"),
          "`memory`: what was registered of the device's and is written from. Whole pages are moved: memory "
          "and file may be touched up to the end of the last. Nothing is "
          "checked "
          "or synced. CorruptError: the file ends too early.");
}

void bind_load(nb::module_& m) {
  nb::class_<Staging>(m, "Staging", "Memory of this process alone that loads read into on the way.")
      .def(
          "__init__",
          [](Staging* self, unsigned threads, const nb::object& device) {
            auto memory = std::make_shared<zs::Mapping>(threads * zs::Checks::kBlock);
            if (!device.is_none()) {
              const auto context = nb::cast<const Device&>(device).device->context();
              nb::gil_scoped_release release;
              memory->attach(std::make_shared<zs::Pinned>(context, *memory, memory->nbytes(), 1));
            }
            new (self) Staging(std::move(memory));
          },
          "threads"_a, "device"_a.none() = nb::none(),
          nb::sig("def __init__(self, threads: int, device: Device | None = None) -> None"),
          "4 MiB for each thread; for a device, registered with CUDA. CapacityError: there is none.");
  nb::class_<Load, Job>(m, "Load", "File to tensors, in the host's memory or a device's, checked on the way.")
      .def(
          "__init__",
          [](Load* self, nb::object pool, const Plan& plan, nb::object targets, int fd,
             std::vector<uint32_t> pieces, std::optional<std::vector<uint32_t>> checksums, bool direct,
             nb::object staging, nb::object device, nb::object straight,
             std::optional<std::vector<uint64_t>> only, uintptr_t held) {
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            zs::Load::Order order{plan.plan,
                                  nb::cast<zs::Tensors&>(targets).targets(),
                                  std::move(pieces),
                                  std::move(checksums),
                                  fd,
                                  direct,
                                  nb::cast<const Staging&>(staging).held};
            if (!device.is_none()) order.device = nb::cast<const Device&>(device).device;
            if (!straight.is_none()) order.straight = nb::cast<const DeviceFile&>(straight).held;
            order.only = std::move(only);
            order.held = reinterpret_cast<const std::byte*>(held);
            make(self, {pool, targets, staging, device, straight},
                 [&] { return zs::Load::begin(workers, std::move(order)); });
          },
          "pool"_a, "plan"_a, "targets"_a, "fd"_a, "pieces"_a, nb::kw_only(), "checksums"_a.none(),
          "direct"_a, "staging"_a, "device"_a.none() = nb::none(), "straight"_a.none() = nb::none(),
          "only"_a.none() = nb::none(), "held"_a = 0,
          nb::sig(
              "def __init__(self, pool: Pool, plan: Plan, targets: Tensors, fd: int, "
              "pieces: collections.abc.Sequence[int], *, checksums: collections.abc.Sequence[int] | None, "
              "direct: bool, staging: Staging, device: Device | None = None, "
              "straight: DeviceFile | None = None, "
              "only: collections.abc.Sequence[int] | None = None, held: int = 0) -> None"),
          "targets[i] receives piece pieces[i]; offsets of the plan count from the file's first byte. With "
          "checksums whole chunks are read. `staging`: of as many threads as the pool has, for this "
          "job alone, "
          "and of the device where one gets something. `device`: of all targets that lie on one, whose "
          "memory must "
          "be "
          "idle. `straight`: the same file, for cuFile to read. `only`: no chunk but these, which rise. "
          "`held`: an address from which on memory lies as the file, with those chunks: they are taken from "
          "there; the caller keeps it.\n\n"
          "CorruptError: a chunk fails its checksum, or the file is too short. Nothing may be used before "
          "the job "
          "is done.")
      .def_prop_ro(
          "fell_back", [](const Load& l) { return l.get().fell_back(); },
          "Why the page cache was used although `direct` was asked for.")
      .def_prop_ro(
          "bounced", [](const Load& l) { return l.get().bounced(); },
          "Why cuFile reads into memory of its own first; empty where it does not, or reads nothing.");
}

}  // namespace

void bind_device_files(nb::module_& m) {
  bind_cufile(m);
  bind_load(m);
}

}  // namespace zs::python
