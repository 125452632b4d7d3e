#include "bindings.hpp"
#include "probe.hpp"

namespace zs::python {
namespace {

struct Probe {
  std::shared_ptr<zs::Probe> probe;
};

}  // namespace

void bind_probes(nb::module_& m) {
  nb::class_<Probe>(m, "Probe", "CRC-32C of runs of a CUDA device's memory, computed where they lie.")
      .def(
          "__init__",
          [](Probe* self, const Device& device, const std::vector<std::pair<uint64_t, uint64_t>>& runs,
             uint64_t span_bytes) {
            std::vector<zs::Probe::Run> all;
            for (const auto& [at, nbytes] : runs) all.push_back({at, nbytes});
            nb::gil_scoped_release release;
            new (self) Probe{device.device->probes()->probe(all, span_bytes)};
          },
          "device"_a, "runs"_a, nb::kw_only(), "span_bytes"_a = 0,
          nb::sig("def __init__(self, device: Device, runs: collections.abc.Sequence[tuple[int, int]], *, "
                  "span_bytes: int = 0) -> None"),
          "`runs`: (address, bytes). `span_bytes`: how much a warp reads, a multiple of 4096; 0: as suits.")
      .def(
          "launch", [](const Probe& p, uint64_t stream) { p.probe->launch(pointer<CUstream_st>(stream)); },
          "stream"_a, nogil(), "Read every run, as work of a CUstream.")
      .def(
          "fetch", [](const Probe& p, uint64_t stream) { p.probe->fetch(pointer<CUstream_st>(stream)); },
          "stream"_a, nogil(), "Bring what `launch` left to the host, as work of a CUstream.")
      .def(
          "checksums", [](const Probe& p) { return p.probe->checksums(); }, nogil(),
          "By run; waits for `fetch`.");
}

}  // namespace zs::python
