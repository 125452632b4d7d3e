// A vault's memory → memory of a device of this process, past host memory.
#pragma once
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <utility>

#include "capture.hpp"
#include "peer.hpp"
#include "pool.hpp"

namespace zs {

// The copy engines of this device read the other one's memory. A unit is a part of the device's lane, which
// retires it. Nothing is checked on the way.
class Relay : public Job, protected Landing {
 public:
  // To `at` of the vault come `runs` (offsets and sizes, rising) of what lies at `peer`, an address here of
  // another vault's memory; each byte at the same offset. All of that must live until the job is done.
  static std::shared_ptr<Relay> begin(const Pool& pool, std::shared_ptr<Device> device, const Vault& vault,
                                      uint64_t at, CUdeviceptr peer,
                                      std::span<const std::pair<uint64_t, uint64_t>> runs);

 protected:
  Relay(const Pool& pool, Training training, std::shared_ptr<Lane> lane);
  static std::shared_ptr<Lane> empty_lane();
  static void add(Lane& lane, const cuda::Copy& copy);  // to its last part, or a new one behind it
  static void run(const std::shared_ptr<Relay>& job);
  void work(uint64_t) override {}  // no unit is claimed
  uint64_t drop_kept() noexcept override;

  const Training training_;
  const std::shared_ptr<Lane> lane_;

 private:
  void landed(std::span<const uint64_t> parts) noexcept override;
  void dropped(uint64_t parts, std::exception_ptr why) noexcept override;
};

}  // namespace zs
