// Memory on huge pages is found with fewer looks into tables that have left the caches, too.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace zs {

struct HugePages {
  size_t brought = 0;    // regions, of 2 MiB each, that lie on huge pages now
  size_t left = 0;       // that do not
  std::string why_left;  // of one of them, as the kernel says it
};

// Brings those regions onto huge pages that hold many of the addresses, each of memory that its owner got
// from malloc or from Python. What is there stays as it is: the kernel copies it, at some milliseconds a
// region. One of which little was in use takes up to 2 MiB.
HugePages bring_to_huge_pages(std::vector<const void*> addresses);

}  // namespace zs
