#include "tasks.hpp"

#include <algorithm>

#include "plan.hpp"

namespace zs {

std::vector<Task> cut_tasks(const Plan& plan, std::span<const uint32_t> pieces, uint64_t task_bytes) {
  constexpr uint64_t kPieceCost = 512;  // moving a tiny piece takes as long as moving some hundred bytes
  std::vector<Task> tasks;
  for (size_t k = 0; k < pieces.size();) {
    const uint64_t size = plan.size(pieces[k]);
    if (size >= task_bytes) {
      for (uint64_t begin = 0; begin < size; begin += task_bytes)
        tasks.push_back({k, k + 1, begin, std::min(begin + task_bytes, size)});
      ++k;
      continue;
    }
    const size_t first = k;
    for (uint64_t total = 0; k < pieces.size() && total + plan.size(pieces[k]) <= task_bytes; ++k)
      total += plan.size(pieces[k]) + kPieceCost;
    tasks.push_back({first, k, 0, UINT64_MAX});
  }
  return tasks;
}

}  // namespace zs
