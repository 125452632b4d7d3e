// Image → tensors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "capture.hpp"
#include "plan.hpp"
#include "pool.hpp"

namespace zs {

// A unit is a chunk that holds wanted bytes. With checksums, each chunk is checked while it is copied: memory
// is read once. The first chunk that fails ends the job with Kind::corrupt; what was written by then stays.
class Scatter final : public Job {
 public:
  // targets[i] receives piece pieces[i] of the plan; pieces rise. Image and arrays must live until the job is
  // done.
  static std::shared_ptr<Scatter> begin(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays targets,
                                        const std::byte* image, std::vector<uint32_t> pieces,
                                        std::optional<std::vector<uint32_t>> checksums = std::nullopt);

 protected:
  void work(uint64_t unit) override;

 private:
  // Of the wanted pieces, [first, last) lie in the chunk, the outer ones perhaps in part.
  struct Share {
    uint64_t chunk;
    size_t first, last;
  };

  Scatter(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays targets, const std::byte* image,
          std::vector<uint32_t> pieces, std::vector<uint32_t> checksums, std::vector<Share> shares);
  static void check(const Plan& plan, const Arrays& targets, const std::vector<uint32_t>& pieces);
  static std::vector<Share> cut(const Plan& plan, const std::vector<uint32_t>& pieces);

  const std::shared_ptr<const Plan> plan_;
  const Arrays targets_;
  const std::byte* const image_;
  const std::vector<uint32_t> pieces_;
  const std::vector<uint32_t> checksums_;  // empty: nothing is checked
  const std::vector<Share> shares_;
};

}  // namespace zs
