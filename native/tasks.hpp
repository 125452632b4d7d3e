// Cuts the copying of many pieces, small and large, into tasks of about the same number of bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace zs {

class Plan;

// Entries [first, last) of a list of pieces. A task of one large piece moves its bytes [begin, end); any
// other task moves its pieces whole: then begin is 0 and end is beyond every piece.
struct Task {
  size_t first, last;
  uint64_t begin, end;
};

std::vector<Task> cut_tasks(const Plan& plan, std::span<const uint32_t> pieces, uint64_t task_bytes);

}  // namespace zs
