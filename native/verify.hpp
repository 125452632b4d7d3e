// An image in memory against its checksum table.
#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "checks.hpp"
#include "pool.hpp"

namespace zs {

class Verify final : public Job {
 public:
  static std::shared_ptr<Verify> begin(const Pool& pool, const std::byte* image, uint64_t nbytes,
                                       uint64_t chunk_bytes, std::vector<uint32_t> checksums);
  std::vector<uint64_t> bad() const { return checks_->bad(); }

 protected:
  void work(uint64_t block) override;

 private:
  Verify(const Pool& pool, const std::byte* image, std::unique_ptr<Checks> checks);
  const std::byte* const image_;
  const std::unique_ptr<Checks> checks_;
};

}  // namespace zs
