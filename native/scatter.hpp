// Image → tensors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "capture.hpp"
#include "plan.hpp"
#include "pool.hpp"

namespace zs {

// A unit is a chunk that holds wanted bytes. With checksums, each chunk is checked while it is copied: memory
// is read once. The first chunk that fails ends the job with Kind::corrupt; what was written by then stays.
// What of a chunk belongs on a device is handed to that device's lane after the check, and is a unit more.
class Scatter final : public Job, private Landing {
 public:
  // targets[i] receives piece pieces[i] of the plan; pieces rise. Image and arrays must live until the job is
  // done. `trainings`: one for each device that has targets, which must be contiguous there; their copies
  // come after all work that the stream has been given so far.
  static std::shared_ptr<Scatter> begin(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays targets,
                                        const std::byte* image, std::vector<uint32_t> pieces,
                                        std::optional<std::vector<uint32_t>> checksums = std::nullopt,
                                        std::span<const Training> trainings = {});

 protected:
  void work(uint64_t unit) override;
  uint64_t drop_kept() noexcept override;

 private:
  struct Fill {
    Training training;
    std::shared_ptr<Lane> lane;
  };
  // Of the wanted pieces, [first, last) lie in the chunk, the outer ones perhaps in part.
  struct Share {
    uint64_t chunk;
    size_t first, last;
  };

  Scatter(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays targets, const std::byte* image,
          std::vector<uint32_t> pieces, std::vector<uint32_t> checksums, std::vector<Share> shares,
          std::vector<Fill> fills);
  static std::vector<Fill> fills_of(const Arrays& targets, const std::byte* image,
                                    const std::vector<Share>& shares, std::span<const Training> trainings);
  void start_lanes();
  void landed(std::span<const uint64_t> parts) noexcept override;
  void dropped(uint64_t parts, std::exception_ptr why) noexcept override;
  static void check(const Plan& plan, const Arrays& targets, const std::vector<uint32_t>& pieces);
  static std::vector<Share> cut(const Plan& plan, const std::vector<uint32_t>& pieces);

  const std::shared_ptr<const Plan> plan_;
  const Arrays targets_;
  const std::byte* const image_;
  const std::vector<uint32_t> pieces_;
  const std::vector<uint32_t> checksums_;  // empty: nothing is checked
  const std::vector<Share> shares_;
  const std::vector<Fill> fills_;
};

}  // namespace zs
