#include "scatter.hpp"

#include <algorithm>

#include "error.hpp"

namespace zs {
namespace {
constexpr uint64_t kTask = 4 << 20;
}

void Scatter::check(const Plan& plan, const Arrays& targets, const std::vector<uint32_t>& pieces) {
  if (targets.data.size() != pieces.size())
    throw Error(Kind::usage, std::to_string(targets.data.size()) + " targets for " +
                                 std::to_string(pieces.size()) + " pieces");
  for (size_t k = 0; k < pieces.size(); ++k) {
    if (pieces[k] >= plan.pieces())
      throw Error(Kind::usage, "there is no piece " + std::to_string(pieces[k]) + " in the plan");
    const uint64_t have = (*targets.geometries)[k].nbytes;
    if (have != plan.size(pieces[k]))
      throw Error(Kind::usage, "target " + std::to_string(k) + " has " + std::to_string(have) +
                                   " bytes, piece " + std::to_string(pieces[k]) + " has " +
                                   std::to_string(plan.size(pieces[k])));
  }
}

std::shared_ptr<Scatter> Scatter::begin(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays targets,
                                        const std::byte* image, std::vector<uint32_t> pieces) {
  check(*plan, targets, pieces);
  std::vector<Task> tasks = cut_tasks(*plan, pieces, kTask);
  std::shared_ptr<Scatter> job(
      new Scatter(pool, std::move(plan), std::move(targets), image, std::move(pieces), std::move(tasks)));
  job->start();
  return job;
}

Scatter::Scatter(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays targets, const std::byte* image,
                 std::vector<uint32_t> pieces, std::vector<Task> tasks)
    : Job(pool.workers(), tasks.size()),
      plan_(std::move(plan)),
      targets_(std::move(targets)),
      image_(image),
      pieces_(std::move(pieces)),
      tasks_(std::move(tasks)) {}

void Scatter::work(uint64_t unit) {
  const Task& task = tasks_[unit];
  for (size_t k = task.first; k < task.last; ++k) {
    const uint64_t end = std::min(task.end, plan_->size(pieces_[k]));
    scatter(targets_.data[k], image_ + plan_->offset(pieces_[k]) + task.begin, (*targets_.geometries)[k],
            task.begin, end);
    add_progress(end - task.begin);
  }
}

}  // namespace zs
