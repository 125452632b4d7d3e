#include "probe.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "crc32c.hpp"
#include "error.hpp"

namespace zs {
namespace {

// As many as keep the memory of a large device busy; more would leave more for the CPU to do.
constexpr uint64_t kWarps = 2048;
constexpr uint64_t kLeast = 16 * fold::kBlock;  // a span of which the residue is a sixteenth

uint64_t span_bytes_for(std::span<const Probe::Run> runs) {
  uint64_t total = 0;
  for (const Probe::Run& run : runs) total += run.nbytes;
  return std::max(kLeast, (total / kWarps + fold::kBlock - 1) / fold::kBlock * fold::kBlock);
}

// Enough for most samples, and had before the first: taking memory may hold the device up. Larger ones are
// not all of one size: what is lent is, so that it can be lent again.
uint64_t rounded(uint64_t nbytes) {
  return std::bit_ceil(std::max(nbytes, uint64_t{16} << 20));
}

}  // namespace

Probe::Probe(std::shared_ptr<Probes> owner, std::span<const Run> runs, uint64_t span_bytes)
    : owner_(std::move(owner)) {
  if (span_bytes == 0) span_bytes = span_bytes_for(runs);
  for (const Run& run : runs) {
    residue_bytes_ += fold::cut(run.at, run.nbytes, span_bytes, residue_bytes_, spans_);
    ends_.push_back(spans_.size());
    nbytes_ += run.nbytes;
  }
  if (spans_.empty()) return;
  memory_ = owner_->lend(spans_.size() * sizeof(fold::Span) + residue_bytes_);
  for (fold::Span& span : spans_) span.residue += memory_.residues.at();
  std::memcpy(memory_.host, spans_.data(), spans_.size() * sizeof(fold::Span));
}

Probe::~Probe() {
  if (memory_.host == nullptr) return;
  try {
    const cuda::Context::Current current(*owner_->context_);
    if (launched_ && !awaited_) cuda::driver().cuEventSynchronize(memory_.fetched);
    owner_->take_back(std::move(memory_));
  } catch (const Error&) {
    // The process ends and the driver has gone before us.
  }
}

void Probe::launch(CUstream stream) {
  if (spans_.empty()) return;
  const cuda::Context::Current current(*owner_->context_);
  CUdeviceptr spans = memory_.at;
  void* parameters[] = {&spans};
  ZS_CUDA(cuLaunchKernel, owner_->kernel_, static_cast<unsigned>(spans_.size()), 1, 1, fold::kLanes, 1, 1, 0,
          stream, parameters, nullptr);
  launched_ = true;
  awaited_ = false;
  ZS_CUDA(cuEventRecord, memory_.fetched, stream);
}

void Probe::fetch(CUstream stream) {
  if (spans_.empty()) return;
  const cuda::Context::Current current(*owner_->context_);
  ZS_CUDA(cuMemcpyDtoHAsync, const_cast<std::byte*>(residues()), memory_.residues.at(), residue_bytes_,
          stream);
  ZS_CUDA(cuEventRecord, memory_.fetched, stream);
}

std::vector<uint32_t> Probe::checksums() {
  if (!spans_.empty()) {
    const cuda::Context::Current current(*owner_->context_);
    ZS_CUDA(cuEventSynchronize, memory_.fetched);
    awaited_ = true;
  }
  std::vector<uint32_t> result;
  const std::byte* residue = residues();
  size_t first = 0;
  for (const size_t end : ends_) {
    const std::span<const fold::Span> spans(spans_.data() + first, end - first);
    result.push_back(fold::checksum(spans, residue));
    for (const fold::Span& span : spans) residue += span.residue_rows() * fold::kRow;
    first = end;
  }
  return result;
}

std::shared_ptr<Probes> Probes::load(std::shared_ptr<cuda::Context> context, std::shared_ptr<Vram> vram) {
  std::shared_ptr<Probes> probes(new Probes(std::move(context), std::move(vram)));
  probes->prove();
  return probes;
}

Probes::Probes(std::shared_ptr<cuda::Context> context, std::shared_ptr<Vram> vram)
    : context_(std::move(context)), vram_(std::move(vram)) {
  const cuda::Context::Current current(*context_);
  try {
    int least = 0, greatest = 0;
    ZS_CUDA(cuCtxGetStreamPriorityRange, &least, &greatest);
    ZS_CUDA(cuStreamCreateWithPriority, &stream_, CU_STREAM_NON_BLOCKING, least);
    ZS_CUDA(cuModuleLoadData, &module_, fold::kernel().c_str());
    ZS_CUDA(cuModuleGetFunction, &kernel_, module_, fold::kName);
  } catch (...) {
    destroy();
    throw;
  }
}

Probes::~Probes() {
  try {
    const cuda::Context::Current current(*context_);
    destroy();
  } catch (const Error&) {
    // The process ends and the driver has gone before us.
  }
}

void Probes::destroy() noexcept {
  const cuda::Driver& d = cuda::driver();
  for (const Probe::Memory& memory : idle_) {
    d.cuEventDestroy(memory.fetched);
    d.cuMemFreeHost(memory.host);
  }
  if (stream_ != nullptr) d.cuStreamDestroy(stream_);
  if (module_ != nullptr) d.cuModuleUnload(module_);
}

// The driver compiled the kernel a moment ago, for a device that nobody may have tried it on. If it is wrong
// there, no snapshot may be called so.
void Probes::prove() {
  constexpr uint64_t kBytes = 3 * fold::kBlock + 77, kFrom = 5;
  std::vector<std::byte> pattern(kBytes);
  for (uint64_t k = 0; k < kBytes; ++k) pattern[k] = static_cast<std::byte>(k * k >> 3);
  const Vram::Loan memory = vram_->lend(kBytes);
  if (!memory) throw Error(Kind::capacity, "the device has no memory to try a kernel on");
  const cuda::Context::Current current(*context_);
  ZS_CUDA(cuMemcpyHtoDAsync, memory.at(), pattern.data(), kBytes, stream_);
  const Probe::Run runs[] = {{memory.at() + kFrom, kBytes - kFrom}, {memory.at(), 3}};
  const std::shared_ptr<Probe> look = probe(runs);
  look->launch(stream_);
  look->fetch(stream_);
  ZS_CUDA(cuStreamSynchronize, stream_);
  const std::vector<uint32_t> expected{crc32c(pattern.data() + kFrom, kBytes - kFrom),
                                       crc32c(pattern.data(), 3)};
  if (look->checksums() != expected)
    throw Error(Kind::device, "the kernel for checksums finds wrong ones on this device");
}

std::shared_ptr<Probe> Probes::probe(std::span<const Probe::Run> runs, uint64_t span_bytes) {
  return std::shared_ptr<Probe>(new Probe(shared_from_this(), runs, span_bytes));
}

Probe::Memory Probes::lend(uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  if (!idle_.empty() && idle_.back().nbytes >= nbytes) {
    Probe::Memory memory = std::move(idle_.back());
    idle_.pop_back();
    return memory;
  }
  const cuda::Context::Current current(*context_);
  for (; !idle_.empty(); idle_.pop_back()) {
    cuda::driver().cuEventDestroy(idle_.back().fetched);
    cuda::driver().cuMemFreeHost(idle_.back().host);
  }
  nbytes = rounded(nbytes);
  Probe::Memory memory;
  memory.residues = vram_->lend(nbytes);
  if (!memory.residues)
    throw Error(Kind::capacity, "the device has no " + std::to_string(nbytes) + " bytes to spare");
  void* host = nullptr;
  ZS_CUDA(cuMemHostAlloc, &host, nbytes, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE);
  memory.host = static_cast<std::byte*>(host);
  memory.nbytes = nbytes;
  try {
    ZS_CUDA(cuMemHostGetDevicePointer, &memory.at, host, 0);
    ZS_CUDA(cuEventCreate, &memory.fetched, CU_EVENT_DISABLE_TIMING);
  } catch (...) {
    cuda::driver().cuMemFreeHost(host);
    throw;
  }
  return memory;
}

void Probes::take_back(Probe::Memory memory) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(memory));
}

}  // namespace zs
