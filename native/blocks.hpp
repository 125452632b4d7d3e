// Memory that a job's threads move a file's bytes through: a block for each.
#pragma once
#include <cstddef>

#include "idle.hpp"
#include "segment.hpp"

namespace zs {

// In huge pages where there are some; shared memory seldom is, and a disk takes it in many small requests.
class Blocks : public Idle<std::byte*> {
 public:
  explicit Blocks(unsigned threads);

 private:
  Mapping memory_;
};

}  // namespace zs
