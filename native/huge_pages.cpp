#include "huge_pages.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace zs {
namespace {

// <linux/fs.h> of Linux 6.7, which few machines that build this have.
struct Region {
  uint64_t start, end, categories;
};
struct Scan {
  uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
  uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
static_assert(sizeof(Region) == 24 && sizeof(Scan) == 96);
constexpr unsigned long kScan = _IOWR('f', 16, Scan);
constexpr uint64_t kPresent = 1 << 3, kSwapped = 1 << 4, kHuge = 1 << 6;

struct Whole {
  uintptr_t begin, end;
};

// The huge pages that lie within.
Whole whole(const std::byte* data, uint64_t nbytes) {
  const auto at = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (at + kHugePage - 1) / kHugePage * kHugePage,
                  end = (at + nbytes) / kHugePage * kHugePage;
  return {begin, std::max(begin, end)};
}

}  // namespace

bool make_huge_pages(std::byte* data, uint64_t nbytes) {
  const auto [begin, end] = whole(data, nbytes);
  if (begin == end) return true;
  for (uintptr_t at = begin; at < end; at += kHugePage)  // it makes nothing of nothing; and never a SIGBUS
    if (::madvise(reinterpret_cast<void*>(at), 4096, MADV_POPULATE_WRITE) != 0) return false;
  int result = 0;
  do {
    result = ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_COLLAPSE);
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

PageTable::PageTable() : fd_(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {}

PageTable::~PageTable() {
  if (fd_ >= 0) ::close(fd_);
}

PageTable::Kind PageTable::kind(const std::byte* data, uint64_t nbytes) const {
  const auto [begin, end] = whole(data, nbytes);
  if (begin == end) return Kind::small;
  if (fd_ < 0) return Kind::unknown;
  Region regions[2]{};
  Scan scan{};
  scan.size = sizeof scan;
  scan.start = begin;
  scan.end = end;
  scan.vec = reinterpret_cast<uint64_t>(regions);
  scan.vec_len = 2;
  scan.category_anyof_mask = kPresent | kSwapped;
  scan.return_mask = kPresent | kHuge;
  const int count = ::ioctl(fd_, kScan, &scan);
  if (count < 0) return Kind::unknown;
  if (count == 0) return Kind::untouched;
  const bool all = count == 1 && regions[0].start == begin && regions[0].end == end;
  return all && (regions[0].categories & kHuge) != 0 ? Kind::huge : Kind::small;
}

HugePages bring_to_huge_pages(std::vector<const void*> addresses) {
  constexpr size_t kMany = 64;  // fewer are not worth a page
  const auto region = [](const void* at) { return reinterpret_cast<uintptr_t>(at) / kHugePage; };
  std::sort(addresses.begin(), addresses.end());
  HugePages result;
  for (size_t first = 0, last = 0; first < addresses.size(); first = last) {
    while (last < addresses.size() && region(addresses[last]) == region(addresses[first])) ++last;
    if (last - first < kMany) continue;
    if (::madvise(reinterpret_cast<void*>(region(addresses[first]) * kHugePage), kHugePage, MADV_COLLAPSE) ==
        0) {
      ++result.brought;
    } else {
      ++result.left;
      result.why_left = std::strerror(errno);
    }
  }
  return result;
}

}  // namespace zs
