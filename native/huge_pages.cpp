#include "huge_pages.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace zs {

HugePages bring_to_huge_pages(std::vector<const void*> addresses) {
  constexpr uintptr_t kRegion = 2 << 20;
  constexpr size_t kMany = 64;  // fewer are not worth a page
  const auto region = [](const void* at) { return reinterpret_cast<uintptr_t>(at) / kRegion; };
  std::sort(addresses.begin(), addresses.end());
  HugePages result;
  for (size_t first = 0, last = 0; first < addresses.size(); first = last) {
    while (last < addresses.size() && region(addresses[last]) == region(addresses[first])) ++last;
    if (last - first < kMany) continue;
    if (::madvise(reinterpret_cast<void*>(region(addresses[first]) * kRegion), kRegion, MADV_COLLAPSE) == 0) {
      ++result.brought;
    } else {
      ++result.left;
      result.why_left = std::strerror(errno);
    }
  }
  return result;
}

}  // namespace zs
