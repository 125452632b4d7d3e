// Memory on huge pages is found with fewer looks into tables that have left the caches, too.
#pragma once
#include <cstddef>
#include <cstdint>
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

constexpr uint64_t kHugePage = 2 << 20;

// Of memory that nobody has touched yet, makes huge pages of all that can be one, whatever the system gives
// shared memory by itself; it costs less than touching the small ones would. False: not of all of it. What is
// there stays as it is.
bool make_huge_pages(std::byte* data, uint64_t nbytes);

// What this process's memory lies on, as the kernel says (Linux 6.7).
class PageTable {
 public:
  enum class Kind : uint8_t { untouched, huge, small, unknown };

  PageTable();
  PageTable(const PageTable&) = delete;
  PageTable& operator=(const PageTable&) = delete;
  ~PageTable();
  // Of all that can be a huge page of it; `other` where parts differ, where nothing can, and where nobody
  // says.
  Kind kind(const std::byte* data, uint64_t nbytes) const;

 private:
  int fd_;
};

}  // namespace zs
