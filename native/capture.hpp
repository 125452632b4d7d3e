// Tensors → image, in the background, while the tensors' owner goes on until it must change them.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "copy.hpp"
#include "job.hpp"
#include "plan.hpp"
#include "pool.hpp"

namespace zs {

// Addresses as they are now, and shapes as they always are, of the arrays of a plan's pieces.
struct Arrays {
  std::vector<std::byte*> data;
  std::shared_ptr<const std::vector<Geometry>> geometries;
};

// What protect() had to do.
struct Protection {
  uint64_t pending = 0;  // chunks nobody had begun
  uint64_t frozen_bytes = 0;
  uint64_t helped_bytes = 0;
  double waited = 0;  // seconds, for chunks in flight
};

// A unit is a chunk. A chunk is *released* once none of its sources will be read again: copied, frozen or
// dropped.
class Capture final : public Job {
 public:
  // Copies the pieces in `at_once` before it returns. At the end 1 is added to the eventfd `announce`, if
  // given. `image` has plan->nbytes() bytes; it and the arrays must live until the job is done.
  static std::shared_ptr<Capture> begin(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays sources,
                                        std::byte* image, std::span<const uint32_t> at_once,
                                        int announce = -1);

  // Returns when no source will be read any more. Pending chunks are copied aside while `freeze_bytes` last,
  // then helped along; those in flight are awaited.
  Protection protect(uint64_t freeze_bytes);

  // Of each chunk; valid when done and not cancelled.
  const std::vector<uint32_t>& checksums() const { return checksums_; }

  bool has_work() const override;

 protected:
  void work(uint64_t chunk) override;
  bool work_aside() override;
  void skipped(uint64_t chunks) override;

 private:
  struct Frozen {
    uint64_t chunk;
    Spare::Loan bytes;
  };
  Capture(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays sources, std::byte* image);
  void copy_at_once(std::span<const uint32_t> at_once);
  void pack(uint64_t chunk, const std::byte* aside);
  bool freeze(uint64_t chunk);
  void release(uint64_t chunks) noexcept;

  const std::shared_ptr<const Plan> plan_;
  const Arrays sources_;
  std::byte* const image_;
  std::vector<uint8_t> copied_;  // by piece: at once, in the constructor
  std::vector<uint32_t> checksums_;
  mutable std::mutex frozen_mutex_;
  std::vector<Frozen> frozen_;
  std::atomic<uint64_t> unreleased_;
  std::mutex release_mutex_;
  std::condition_variable released_;
};

}  // namespace zs
