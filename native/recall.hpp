// A vault's memory → tensors on a device, past host memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "plan.hpp"
#include "relay.hpp"

namespace zs {

// Brings those pieces of an image that lie whole in a vault and belong on a device straight there.
//
// What has arrived the device looks at itself, in its own memory: `bad`.
class Recall final : public Relay {
 public:
  // targets[i] is to receive piece pieces[i] of the plan; pieces rise. `peer`: address here of the vault's
  // memory, in which each byte of `runs` (offsets and sizes in the image, rising) lies at its offset. All of
  // that must live until the job is done.
  static std::shared_ptr<Recall> begin(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays targets,
                                       std::vector<uint32_t> pieces, CUdeviceptr peer,
                                       std::span<const std::pair<uint64_t, uint64_t>> runs,
                                       Training training);

  const std::vector<uint32_t>& taken() const { return taken_; }  // which targets it brings, rising

  // Of the chunks that it brought something of, those that have other checksums; rising. What it did not
  // bring of a chunk is taken from `image`. When done. Throws Kind::device or Kind::capacity where the device
  // cannot look.
  std::vector<uint64_t> bad(const std::byte* image, std::span<const uint32_t> checksums) const;

 private:
  // No copy of the lane lies in two chunks.
  Recall(const Pool& pool, std::shared_ptr<const Plan> plan, std::vector<uint32_t> taken, CUdeviceptr peer,
         Training training, std::shared_ptr<Lane> lane);

  const std::shared_ptr<const Plan> plan_;
  const std::vector<uint32_t> taken_;
  const CUdeviceptr peer_;
};

}  // namespace zs
