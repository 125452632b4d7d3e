#include "blocks.hpp"

#include "checks.hpp"

namespace zs {

Blocks::Blocks(unsigned threads) : memory_(threads * Checks::kBlock) {
  for (unsigned k = 0; k < threads; ++k) all().push_back(memory_.data() + k * Checks::kBlock);
}

}  // namespace zs
