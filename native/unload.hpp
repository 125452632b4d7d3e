// A vault's memory → image in host memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "device.hpp"
#include "job.hpp"
#include "peer.hpp"
#include "pool.hpp"

namespace zs {

// Brings what of an image was captured into a vault to where the rest of it lies, and takes the checksum of
// every chunk. Each byte has the same offset here and there. A unit is a chunk; of one that has bytes in the
// vault, the device's lane retires it.
class Unload final : public Job, private Landing {
 public:
  // `runs`: offsets and sizes of what is in the vault, rising, none over another. `image` and the vault must
  // live until the job is done.
  static std::shared_ptr<Unload> begin(const Pool& pool, std::shared_ptr<Device> device, const Vault& vault,
                                       uint64_t at, std::byte* image, uint64_t nbytes, uint64_t chunk_bytes,
                                       std::span<const std::pair<uint64_t, uint64_t>> runs);
  const std::vector<uint32_t>& checksums() const { return checksums_; }  // when done
  bool has_work() const override;

 protected:
  void work(uint64_t unit) override;
  bool work_aside() override;
  uint64_t drop_kept() noexcept override;

 private:
  Unload(const Pool& pool, std::shared_ptr<Device> device, std::shared_ptr<Lane> lane, std::byte* image,
         uint64_t nbytes, uint64_t chunk_bytes, std::vector<uint64_t> on_host);
  void landed(std::span<const uint64_t> chunks) noexcept override;
  void dropped(uint64_t chunks, std::exception_ptr why) noexcept override;
  void check(uint64_t chunk);

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Lane> lane_;
  std::byte* const image_;
  const uint64_t nbytes_, chunk_bytes_;
  const std::vector<uint64_t> on_host_;  // chunks that have nothing in the vault
  std::vector<uint32_t> checksums_;
  mutable std::mutex mutex_;
  std::vector<uint64_t> landed_;
};

}  // namespace zs
