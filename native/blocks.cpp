#include "blocks.hpp"

#include "checks.hpp"

namespace zs {

Blocks::Blocks(unsigned threads) : memory_(threads * Checks::kBlock) {
  for (unsigned k = 0; k < threads; ++k) idle_.push_back(memory_.data() + k * Checks::kBlock);
}

Blocks::Lease::Lease(Blocks& blocks)
    : data([&blocks] {
        const std::lock_guard lock(blocks.mutex_);
        std::byte* const block = blocks.idle_.back();  // there is one for each thread
        blocks.idle_.pop_back();
        return block;
      }()),
      blocks_(blocks) {}

Blocks::Lease::~Lease() {
  const std::lock_guard lock(blocks_.mutex_);
  blocks_.idle_.push_back(data);
}

}  // namespace zs
