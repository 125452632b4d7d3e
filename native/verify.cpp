#include "verify.hpp"

#include "crc32c.hpp"

namespace zs {

std::shared_ptr<Verify> Verify::begin(const Pool& pool, const std::byte* image, uint64_t nbytes,
                                      uint64_t chunk_bytes, std::vector<uint32_t> checksums) {
  auto checks = std::make_unique<Checks>(nbytes, chunk_bytes, std::move(checksums));
  std::shared_ptr<Verify> job(new Verify(pool, image, std::move(checks)));
  job->start();
  return job;
}

Verify::Verify(const Pool& pool, const std::byte* image, std::unique_ptr<Checks> checks)
    : Job(pool.workers(), checks->blocks()), image_(image), checks_(std::move(checks)) {}

void Verify::work(uint64_t index) {
  const Checks::Block block = checks_->block(index);
  checks_->record(index, crc32c(image_ + block.offset, block.nbytes));
  add_progress(block.nbytes);
}

}  // namespace zs
