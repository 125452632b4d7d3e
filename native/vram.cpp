#include "vram.hpp"

#include <algorithm>
#include <utility>

#include "error.hpp"

namespace zs {

Vram::Loan& Vram::Loan::operator=(Loan&& other) noexcept {
  give_back();
  owner_ = std::move(other.owner_);
  block_ = std::exchange(other.block_, {});
  return *this;
}

void Vram::Loan::give_back() noexcept {
  if (owner_) owner_->take_back(block_);
  owner_.reset();
  block_ = {};
}

Vram::~Vram() {
  try {
    const cuda::Context::Current current(*context_);
    for (const CUdeviceptr at : taken_) cuda::driver().cuMemFree(at);
  } catch (const Error&) {
    // The process ends and the driver has gone before us.
  }
}

void Vram::reserve(size_t nbytes, size_t block_bytes) {
  const std::lock_guard lock(mutex_);
  if (nbytes <= reserved_) return;
  const size_t blocks = (nbytes - reserved_ + block_bytes - 1) / block_bytes;
  const cuda::Context::Current current(*context_);
  CUdeviceptr at = 0;
  ZS_CUDA(cuMemAlloc, &at, blocks * block_bytes);
  taken_.push_back(at);
  for (size_t k = 0; k < blocks; ++k) idle_.push_back({at + k * block_bytes, block_bytes, true});
  reserved_ += blocks * block_bytes;
}

size_t Vram::reserved() const {
  const std::lock_guard lock(mutex_);
  return reserved_;
}

Vram::Loan Vram::lend_reserved(size_t nbytes) {
  const std::lock_guard lock(mutex_);
  const auto fits = [nbytes](const Block& block) { return block.reserved && block.nbytes >= nbytes; };
  const auto found = std::find_if(idle_.begin(), idle_.end(), fits);
  if (found == idle_.end()) return {};
  const Block block = *found;
  idle_.erase(found);
  return {shared_from_this(), block};
}

Vram::Loan Vram::lend(size_t nbytes) {
  const std::lock_guard lock(mutex_);
  const auto fits = [nbytes](const Block& block) { return !block.reserved && block.nbytes >= nbytes; };
  if (const auto found = std::find_if(idle_.begin(), idle_.end(), fits); found != idle_.end()) {
    const Block block = *found;
    idle_.erase(found);
    return {shared_from_this(), block};
  }
  const cuda::Context::Current current(*context_);
  CUdeviceptr at = 0;
  const CUresult result = cuda::driver().cuMemAlloc(&at, nbytes);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return {};
  cuda::check(result, "cuMemAlloc");
  taken_.push_back(at);
  return {shared_from_this(), {at, nbytes, false}};
}

void Vram::take_back(const Block& block) noexcept {
  const std::lock_guard lock(mutex_);
  idle_.push_back(block);  // there was room for it before
}

}  // namespace zs
