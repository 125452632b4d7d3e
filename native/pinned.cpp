#include "pinned.hpp"

#include <algorithm>
#include <future>

#include "error.hpp"

namespace zs {

Pinned::Pinned(std::shared_ptr<cuda::Context> context, const Mapping& mapping, uint64_t stretch,
               unsigned threads, uint64_t offset, uint64_t nbytes)
    : context_(std::move(context)) {
  if (stretch == 0 || stretch % 4096 != 0 || offset % 4096 != 0 || offset > mapping.nbytes())
    throw Error(Kind::usage, "memory is pinned by whole pages");
  const uint64_t end = offset + std::min(nbytes, mapping.nbytes() - offset);
  try {
    std::future<void> registered;  // of the stretch before
    for (uint64_t at = offset; at < end; at += stretch) {
      std::byte* const data = mapping.data() + at;
      const uint64_t size = std::min(stretch, end - at);
      const bool touched = mapping.populate(threads, false, at, size);
      if (registered.valid()) registered.get();
      if (!touched) throw Error(Kind::capacity, "the kernel has not enough pages for the segment");
      registered = std::async(std::launch::async, [this, data, size] { add(data, size); });
    }
    if (registered.valid()) registered.get();
  } catch (...) {
    undo();
    throw;
  }
}

Pinned::~Pinned() {
  undo();
}

void Pinned::add(std::byte* data, uint64_t nbytes) {
  const cuda::Context::Current current(*context_);
  ZS_CUDA(cuMemHostRegister, data, nbytes, CU_MEMHOSTREGISTER_PORTABLE);
  stretches_.push_back(data);
}

void Pinned::undo() noexcept {
  try {
    const cuda::Context::Current current(*context_);
    for (std::byte* data : stretches_) cuda::driver().cuMemHostUnregister(data);
  } catch (const Error&) {
    // The process ends and the driver has gone before us.
  }
  stretches_.clear();
}

}  // namespace zs
