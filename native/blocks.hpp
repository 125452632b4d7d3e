// Memory that a job's threads move a file's bytes through: a block for each.
#pragma once
#include <cstddef>
#include <mutex>
#include <vector>

#include "segment.hpp"

namespace zs {

// In huge pages where there are some; shared memory seldom is, and a disk takes it in many small requests.
class Blocks {
 public:
  explicit Blocks(unsigned threads);

  // A block for as long as one unit lasts.
  class Lease {
   public:
    explicit Lease(Blocks& blocks);
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease();
    std::byte* const data;

   private:
    Blocks& blocks_;
  };

 private:
  Mapping memory_;
  std::mutex mutex_;
  std::vector<std::byte*> idle_;
};

}  // namespace zs
