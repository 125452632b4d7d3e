// Image → tensors.
#pragma once
#include <memory>
#include <vector>

#include "capture.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "tasks.hpp"

namespace zs {

// A unit is a run of a few megabytes of wanted bytes.
class Scatter final : public Job {
 public:
  // targets[i] receives piece pieces[i] of the plan; pieces rise. Image and arrays must live until the job is
  // done.
  static std::shared_ptr<Scatter> begin(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays targets,
                                        const std::byte* image, std::vector<uint32_t> pieces);

 protected:
  void work(uint64_t unit) override;

 private:
  Scatter(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays targets, const std::byte* image,
          std::vector<uint32_t> pieces, std::vector<Task> tasks);
  static void check(const Plan& plan, const Arrays& targets, const std::vector<uint32_t>& pieces);

  const std::shared_ptr<const Plan> plan_;
  const Arrays targets_;
  const std::byte* const image_;
  const std::vector<uint32_t> pieces_;
  const std::vector<Task> tasks_;
};

}  // namespace zs
