#include "spare.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace zs {

namespace {
constexpr size_t kPage = 4096;
}

Spare::Loan::~Loan() {
  if (owner_) owner_->take_back(block_);
}

Spare::~Spare() {
  for (const Block& block : idle_) std::free(block.data);
}

Spare::Loan Spare::lend(size_t nbytes) {
  {
    const std::lock_guard lock(mutex_);
    const auto fits = [nbytes](const Block& block) { return block.nbytes >= nbytes; };
    if (const auto found = std::find_if(idle_.rbegin(), idle_.rend(), fits); found != idle_.rend()) {
      const Block block = *found;
      idle_.erase(std::next(found).base());
      return {shared_from_this(), block};
    }
  }
  const size_t rounded = (nbytes + kPage - 1) / kPage * kPage;
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kPage, rounded));
  if (data == nullptr) throw std::bad_alloc();
  return {shared_from_this(), {data, rounded}};
}

void Spare::take_back(Block block) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    idle_.push_back(block);
  } catch (const std::bad_alloc&) {
    std::free(block.data);
  }
}

}  // namespace zs
