#include "completion.hpp"

#include "error.hpp"

namespace zs {
namespace {

void require_within(const Vault& vault, uint64_t at, Extents extents) {
  for (const auto& [offset, size] : extents)
    if (at > vault.nbytes() || offset > vault.nbytes() - at || size > vault.nbytes() - at - offset)
      throw Error(Kind::usage, "that is not within the vault's memory");
}

}  // namespace

std::vector<uint32_t> complete(Device& device, const Vault& vault, uint64_t at, const std::byte* image,
                               Extents missing, Extents looked) {
  require_within(vault, at, missing);
  require_within(vault, at, looked);
  const std::shared_ptr<Probes> probes = device.probes();
  const cuda::Context::Current current(*device.context());
  std::vector<cuda::Copy> copies;
  for (const auto& [offset, size] : missing)
    if (size != 0)
      copies.push_back({vault.at() + at + offset, reinterpret_cast<CUdeviceptr>(image + offset), size});
  cuda::copy(cuda::Way::to_device, copies, probes->stream(), false);
  std::vector<Probe::Run> runs;
  for (const auto& [offset, size] : looked) runs.push_back({vault.at() + at + offset, size});
  std::vector<uint32_t> found;
  if (!runs.empty()) {
    const std::shared_ptr<Probe> look = probes->probe(runs);
    look->launch(probes->stream());
    look->fetch(probes->stream());
    found = look->checksums();
  }
  ZS_CUDA(cuStreamSynchronize, probes->stream());
  return found;
}

}  // namespace zs
