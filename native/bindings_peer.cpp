#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "completion.hpp"
#include "error.hpp"
#include "peer.hpp"
#include "recall.hpp"
#include "relay.hpp"
#include "tensors.hpp"
#include "unload.hpp"

namespace zs::python {
namespace {

using Unload = JobOf<zs::Unload>;
using Recall = JobOf<zs::Recall>;
using Relay = JobOf<zs::Relay>;
using Runs = std::vector<std::pair<uint64_t, uint64_t>>;

void bind_facts(nb::module_& m) {
  nb::class_<zs::DeviceFacts>(m, "DeviceFacts", "A CUDA device that this process sees.")
      .def_ro("ordinal", &zs::DeviceFacts::ordinal)
      .def_ro("uuid", &zs::DeviceFacts::uuid, "As nvidia-smi writes it; the same in every process.")
      .def_ro("name", &zs::DeviceFacts::name)
      .def_ro("multicast", &zs::DeviceFacts::multicast,
              "Whether NVLink multicast could be had; nothing here uses it.");
  nb::class_<zs::LinkFacts>(m, "LinkFacts", "How one device reaches another's memory.")
      .def_ro("access", &zs::LinkFacts::access, "Whether it does at all.")
      .def_ro("rank", &zs::LinkFacts::rank, "The driver's; 0 is the fastest kind of link.")
      .def_ro("atomics", &zs::LinkFacts::atomics, "Whether all atomics work: over NVLink, not over PCIe.");
  m.def("visible_devices", &zs::visible_devices, nogil(),
        "The devices this process sees. CapabilityError: there is no driver.");
  m.def("link_between", &zs::link_between, "ordinal"_a, "to"_a, nogil());
}

void bind_lending(nb::module_& m) {
  nb::class_<zs::Vault>(m, "Vault", "Memory of a device that other processes open by its handle.")
      .def(
          "__init__",
          [](zs::Vault* self, const Device& device, uint64_t nbytes) {
            nb::gil_scoped_release release;
            new (self) zs::Vault(device.device->context(), nbytes);
          },
          "device"_a, "nbytes"_a, "CapacityError: the device has too little.")
      .def_prop_ro("nbytes", &zs::Vault::nbytes)
      .def_prop_ro("address", &zs::Vault::at)
      .def("handle", [](const zs::Vault& v) {
        const std::string handle = v.handle();
        return nb::bytes(handle.data(), handle.size());
      });
  nb::class_<zs::Peer>(m, "Peer", "A vault's memory in another process.")
      .def(
          "__init__",
          [](zs::Peer* self, const Device& device, nb::bytes handle) {
            const std::string text(static_cast<const char*>(handle.data()), handle.size());
            nb::gil_scoped_release release;
            new (self) zs::Peer(device.device->context(), text);
          },
          "device"_a, "handle"_a, "`device`: whose copy engines will use it. DeviceError: it cannot.")
      .def_prop_ro("address", &zs::Peer::at)
      .def("close", &zs::Peer::close, nogil(), "Nothing may be copying.");
}

void bind_unload(nb::module_& m) {
  nb::class_<Unload, Job>(m, "Unload", "What lies in a vault of an image, to where the rest of it lies.")
      .def(
          "__init__",
          [](Unload* self, nb::object pool, nb::object device, nb::object vault, uint64_t at, uint64_t image,
             uint64_t nbytes, uint64_t chunk_bytes, const Runs& runs) {
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            const std::shared_ptr<zs::Device> from = nb::cast<const Device&>(device).device;
            const auto& memory = nb::cast<const zs::Vault&>(vault);
            make(self, {pool, device, vault}, [&] {
              return zs::Unload::begin(workers, from, memory, at, pointer<std::byte>(image), nbytes,
                                       chunk_bytes, runs);
            });
          },
          "pool"_a, "device"_a, "vault"_a, "at"_a, "image"_a, "nbytes"_a, nb::kw_only(), "chunk_bytes"_a,
          "runs"_a,
          nb::sig("def __init__(self, pool: Pool, device: Device, vault: Vault, at: int, image: int, "
                  "nbytes: int, *, chunk_bytes: int, "
                  "runs: collections.abc.Sequence[tuple[int, int]]) -> None"),
          "The image begins at `at` of the vault; `runs` (offset, size) of it are copied to `image`.")
      .def_prop_ro(
          "checksums",
          [](const Unload& u) {
            if (!u.job->done() || u.job->cancelled())
              throw zs::Error(zs::Kind::usage, "there are checksums when all is unloaded");
            u.job->rethrow();
            return u.get().checksums();
          },
          "CRC-32C of each chunk of the whole image, when done.");
}

void bind_completion(nb::module_& m) {
  m.def(
      "complete",
      [](const Device& device, const zs::Vault& vault, uint64_t at, uint64_t image, const Runs& missing,
         const Runs& looked) {
        return zs::complete(*device.device, vault, at, pointer<const std::byte>(image), missing, looked);
      },
      "device"_a, "vault"_a, "at"_a, "image"_a, nb::kw_only(), "missing"_a, "looked"_a, nogil(),
      nb::sig("def complete(device: Device, vault: Vault, at: int, image: int, *, "
              "missing: collections.abc.Sequence[tuple[int, int]], "
              "looked: collections.abc.Sequence[tuple[int, int]]) -> list[int]"),
      "Bring `missing` (offset, size) of the image in host memory to the one at `at` of the vault.\n\n"
      "Returns the CRC-32C of each of `looked` as the device sees it then. DeviceError: it cannot look.");
}

void bind_relay(nb::module_& m) {
  nb::class_<Relay, Job>(m, "Relay", "What lies in a vault of an image, to another vault.")
      .def(
          "__init__",
          [](Relay* self, nb::object pool, nb::object device, nb::object vault, uint64_t at, uint64_t peer,
             const Runs& runs) {
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            const std::shared_ptr<zs::Device> to = nb::cast<const Device&>(device).device;
            const auto& memory = nb::cast<const zs::Vault&>(vault);
            make(self, {pool, device, vault},
                 [&] { return zs::Relay::begin(workers, to, memory, at, peer, runs); });
          },
          "pool"_a, "device"_a, "vault"_a, "at"_a, nb::kw_only(), "peer"_a, "runs"_a,
          nb::sig("def __init__(self, pool: Pool, device: Device, vault: Vault, at: int, *, peer: int, "
                  "runs: collections.abc.Sequence[tuple[int, int]]) -> None"),
          "`runs` (offset, size) of the memory at `peer`, which must stay open, are copied to the same "
          "offsets "
          "from `at` of the vault, by the copy engines of `device`.");
}

void bind_recall(nb::module_& m) {
  nb::class_<Recall, Job>(m, "Recall", "What lies in a vault of an image, to tensors on a device.")
      .def(
          "__init__",
          [](Recall* self, nb::object pool, const Plan& plan, nb::object targets,
             std::vector<uint32_t> pieces, uint64_t peer, const Runs& runs,
             const std::pair<nb::object, uint64_t>& stream) {
            zs::Arrays arrays = nb::cast<zs::Tensors&>(targets).targets();
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            std::vector<nb::object> keep{pool, targets};
            zs::Training training = trainings_of({stream}, &keep).front();
            make(self, std::move(keep), [&] {
              return zs::Recall::begin(workers, plan.plan, std::move(arrays), std::move(pieces), peer, runs,
                                       std::move(training));
            });
          },
          "pool"_a, "plan"_a, "targets"_a, "pieces"_a, nb::kw_only(), "peer"_a, "runs"_a, "stream"_a,
          nb::sig("def __init__(self, pool: Pool, plan: Plan, targets: Tensors, "
                  "pieces: collections.abc.Sequence[int], *, peer: int, "
                  "runs: collections.abc.Sequence[tuple[int, int]], stream: tuple[Device, int]) -> None"),
          "targets[i] is to receive piece pieces[i]; those that are on the device of `stream` and whose "
          "piece lies whole in `runs` (offset, size) of the memory at `peer` do. That memory must stay open.")
      .def_prop_ro(
          "taken", [](const Recall& r) { return r.get().taken(); }, "Which targets it brings, rising.")
      .def(
          "bad",
          [](const Recall& r, uint64_t image, const std::vector<uint32_t>& checksums) {
            return r.get().bad(pointer<const std::byte>(image), checksums);
          },
          "image"_a, "checksums"_a, nogil(),
          "When done: chunks of which other bytes have arrived, as the device itself sees them. What it did "
          "not bring is taken from `image`. DeviceError, CapacityError: the device cannot look.");
}

}  // namespace

void bind_peer(nb::module_& m) {
  bind_facts(m);
  bind_lending(m);
  bind_unload(m);
  bind_completion(m);
  bind_relay(m);
  bind_recall(m);
}

}  // namespace zs::python
