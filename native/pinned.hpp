// Host memory that the driver knows and the copy engines reach directly.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda.hpp"
#include "segment.hpp"

namespace zs {

// Registered stretch by stretch; undone when nobody holds it any more. Must go before the memory does.
class Pinned {
 public:
  // `nbytes` from `offset` on, `stretch` bytes at a time, while `threads` touch what comes next. All are
  // whole pages; no copy may cross the end of a stretch.
  Pinned(std::shared_ptr<cuda::Context> context, const Mapping& mapping, uint64_t stretch, unsigned threads,
         uint64_t offset = 0, uint64_t nbytes = UINT64_MAX);
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  ~Pinned();

 private:
  void add(std::byte* data, uint64_t nbytes);
  void undo() noexcept;
  const std::shared_ptr<cuda::Context> context_;
  std::vector<std::byte*> stretches_;
};

}  // namespace zs
