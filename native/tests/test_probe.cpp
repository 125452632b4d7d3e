// The kernel for checksums, interpreted by the stand-in driver: every alignment and length against the CPU's.
#include <cstring>
#include <random>

#include "../crc32c.hpp"
#include "../device.hpp"
#include "../error.hpp"
#include "../probe.hpp"
#include "check.hpp"
#include "stand_in.hpp"

namespace {

using Run = zs::Probe::Run;

std::vector<uint32_t> looked_at(zs::Probes& probes, const std::vector<Run>& runs, uint64_t span_bytes) {
  const auto probe = probes.probe(runs, span_bytes);
  probe->launch(probes.stream());
  probe->fetch(probes.stream());
  return probe->checksums();
}

std::vector<uint32_t> expected(const std::vector<Run>& runs) {
  std::vector<uint32_t> result;
  for (const Run& run : runs) result.push_back(zs::crc32c(reinterpret_cast<const void*>(run.at), run.nbytes));
  return result;
}

// Memory of exactly so many bytes: what is read beyond them is an illegal address.
std::byte* filled(uint64_t nbytes, std::mt19937_64& random) {
  CUdeviceptr at = 0;
  ZS_CUDA(cuMemAlloc, &at, nbytes);
  auto* const bytes = reinterpret_cast<std::byte*>(at);
  for (uint64_t k = 0; k < nbytes; ++k) bytes[k] = static_cast<std::byte>(random());
  return bytes;
}

void every_edge(zs::Probes& probes, std::mt19937_64& random) {
  std::vector<Run> runs;
  for (const uint64_t nbytes : {1u,    2u,    3u,    4u,    5u,    127u,  128u,  129u,    255u,    256u,
                                4095u, 4096u, 4097u, 4224u, 8191u, 8192u, 8193u, 12'288u, 12'289u, 40'001u}) {
    std::byte* const bytes = filled(nbytes, random);
    runs.push_back({reinterpret_cast<CUdeviceptr>(bytes), nbytes});
    for (int k = 0; k < 8; ++k) {
      const uint64_t first = random() % nbytes, last = first + random() % (nbytes - first + 1);
      runs.push_back({reinterpret_cast<CUdeviceptr>(bytes) + first, last - first});
    }
  }
  const auto base = reinterpret_cast<CUdeviceptr>(filled(8192, random));
  for (uint64_t head = 0; head < zs::fold::kRow; ++head) runs.push_back({base + head, 200 + random() % 7000});
  for (const uint64_t span_bytes : {uint64_t{0}, zs::fold::kBlock, 3 * zs::fold::kBlock})
    CHECK(looked_at(probes, runs, span_bytes) == expected(runs));
  CHECK(looked_at(probes, {}, 0).empty());
  CHECK(looked_at(probes, {{0, 0}}, 0) == std::vector<uint32_t>{0});
}

void another_bit_is_seen(zs::Probes& probes, std::mt19937_64& random) {
  constexpr uint64_t kBytes = 100'000;
  std::byte* const bytes = filled(kBytes, random);
  const std::vector<Run> runs{{reinterpret_cast<CUdeviceptr>(bytes) + 3, kBytes - 3}};
  const std::vector<uint32_t> before = looked_at(probes, runs, 0);
  for (int k = 0; k < 50; ++k) {
    const uint64_t at = 3 + random() % (kBytes - 3);
    const auto bit = static_cast<std::byte>(1 << random() % 8);
    bytes[at] ^= bit;
    CHECK(looked_at(probes, runs, 0) != before);
    bytes[at] ^= bit;
  }
  CHECK(looked_at(probes, runs, 0) == before);
}

// A device that refuses or miscalculates is told at once, and nothing is left behind.
void refusals(const zs::Device& device) {
  for (const char* function : {"cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuMemHostAlloc",
                               "cuStreamCreateWithPriority", "cuMemcpyDtoHAsync"}) {
    stand_in::reset();
    stand_in::fail(function, 1, CUDA_ERROR_NOT_SUPPORTED);
    bool threw = false;
    try {
      zs::Probes::load(device.context(), device.vram());
    } catch (const zs::Error& error) {
      threw = error.kind == zs::Kind::device && std::strstr(error.what(), function) != nullptr;
    }
    CHECK(threw);
  }
  stand_in::reset();
}

}  // namespace

int main() {
  std::mt19937_64 random(3);
  const auto device = zs::Device::open(0);
  {
    const zs::cuda::Context::Current current(*device->context());
    const auto probes = zs::Probes::load(device->context(), device->vram());
    every_edge(*probes, random);
    another_bit_is_seen(*probes, random);
    refusals(*device);
  }
  device->close();
  return 0;
}
