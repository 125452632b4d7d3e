#include "lane.hpp"

namespace zs {

void Lane::add(const cuda::Copy& copy) {
  // Not joined with the copy before where both follow one another in memory: their allocations may be two,
  // and the driver refuses a copy across them.
  copies.push_back(copy);
  parts.back().last = copies.size();
}

}  // namespace zs
