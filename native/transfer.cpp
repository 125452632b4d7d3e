#include "transfer.hpp"

#include "crc32c.hpp"
#include "error.hpp"
#include "failpoint.hpp"

namespace zs {
namespace {

std::string obstacle(const std::byte* image, const Checks& checks) {
  if (checks.nbytes() < Checks::kBlock && reinterpret_cast<uintptr_t>(image) % File::kAlign != 0)
    return "the image is not page aligned";
  if (checks.chunk_bytes() % File::kAlign != 0) return "chunks are no multiple of a page";
  return "";
}

}  // namespace

Transfer::Transfer(const Pool& pool, int fd, std::byte* image, std::unique_ptr<Checks> checks, bool direct)
    : Job(pool.workers(), checks->blocks()),
      image_(image),
      checks_(std::move(checks)),
      file_(fd, direct, obstacle(image, *checks_)) {
  if (checks_->nbytes() >= Checks::kBlock) blocks_.emplace(pool.threads());
}

void Transfer::only(const std::vector<uint64_t>& chunks) {
  const uint64_t count = (checks_->nbytes() + checks_->chunk_bytes() - 1) / checks_->chunk_bytes();
  wanted_.assign(count, false);
  for (const uint64_t chunk : chunks) {
    if (chunk >= count) throw Error(Kind::usage, "there is no chunk " + std::to_string(chunk));
    wanted_[chunk] = true;
  }
}

bool Transfer::in_place(const Checks::Block& block, bool fresh) const {
  std::byte* const place = image_ + block.offset;
  if (!file_.direct() || reinterpret_cast<uintptr_t>(place) % File::kAlign != 0) return false;
  const PageTable::Kind kind = pages_.kind(place, block.nbytes);
  return kind == PageTable::Kind::huge ||
         (fresh && kind == PageTable::Kind::untouched && make_huge_pages(place, block.nbytes));
}

std::shared_ptr<FileWrite> FileWrite::begin(const Pool& pool, int fd, const std::byte* image, uint64_t nbytes,
                                            uint64_t chunk_bytes, std::vector<uint32_t> checksums,
                                            bool direct, const std::optional<std::vector<uint64_t>>& only) {
  auto checks = std::make_unique<Checks>(nbytes, chunk_bytes, std::move(checksums));
  std::shared_ptr<FileWrite> job(
      new FileWrite(pool, fd, const_cast<std::byte*>(image), std::move(checks), direct));
  if (only) job->only(*only);
  job->start();
  return job;
}

void FileWrite::work(uint64_t index) {
  std::call_once(reserved_, [this] { file_.reserve(checks_->nbytes()); });
  const Checks::Block block = checks_->block(index);
  if (!wanted(block.chunk)) return;
  if (block.offset == block.chunk * checks_->chunk_bytes()) failpoint("file-write", block.chunk);
  const std::byte* const place = image_ + block.offset;
  if (all() && blocks_ && in_place(block, false)) {
    file_.write(place, block.nbytes, block.offset);
    check(index, block, crc32c(place, block.nbytes));
  } else if (blocks_) {
    const Blocks::Lease lease(*blocks_);
    check(index, block, crc32c_copy(lease.held, place, block.nbytes));
    file_.write(lease.held, block.nbytes, block.offset);
  } else {
    check(index, block, crc32c(place, block.nbytes));
    file_.write(place, block.nbytes, block.offset);
  }
  add_progress(block.nbytes);
}

void FileWrite::check(uint64_t index, const Checks::Block& block, uint32_t checksum) {
  if (checks_->record(index, checksum) == Checks::Verdict::bad)
    throw Error(Kind::corrupt,
                "chunk " + std::to_string(block.chunk) +
                    " of the image in memory fails its checksum: it changed after it was captured");
}

void FileWrite::close(bool whole) {
  file_.restore();
  if (whole) file_.truncate(checks_->nbytes());
}

std::shared_ptr<FileRead> FileRead::begin(const Pool& pool, int fd, std::byte* image, uint64_t nbytes,
                                          uint64_t chunk_bytes, std::vector<uint32_t> checksums, bool direct,
                                          const std::optional<std::vector<uint64_t>>& only) {
  auto checks = std::make_unique<Checks>(nbytes, chunk_bytes, std::move(checksums));
  std::shared_ptr<FileRead> job(new FileRead(pool, fd, image, std::move(checks), direct));
  if (only) job->only(*only);
  job->start();
  return job;
}

void FileRead::work(uint64_t index) {
  const Checks::Block block = checks_->block(index);
  if (!wanted(block.chunk)) return;
  std::optional<Blocks::Lease> lease;
  if (blocks_ && !in_place(block, true)) lease.emplace(*blocks_);
  std::byte* const bytes = lease ? lease->held : image_ + block.offset;
  if (file_.read(bytes, block.nbytes, block.offset))
    checks_->record(
        index, lease ? crc32c_copy(image_ + block.offset, bytes, block.nbytes) : crc32c(bytes, block.nbytes));
  else
    checks_->lost(index);
  add_progress(block.nbytes);
}

void FileRead::close(bool) {
  file_.restore();
}

}  // namespace zs
