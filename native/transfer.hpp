// Image → file and file → image, with the checksum of every chunk taken on the way.
#pragma once
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "blocks.hpp"
#include "checks.hpp"
#include "file.hpp"
#include "huge_pages.hpp"
#include "pool.hpp"

namespace zs {

// What both ways have in common. A unit is a block of the image; as many are under way as the pool has
// threads. From and to huge pages it moves as it is. Else it is copied on the way, in the pass that checks
// it: small pages of shared memory would become small requests to the disk.
class Transfer : public Job {
 public:
  std::optional<std::string> fell_back() const { return file_.fell_back(); }

 protected:
  Transfer(const Pool& pool, int fd, std::byte* image, std::unique_ptr<Checks> checks, bool direct);
  std::byte* const image_;
  void only(const std::vector<uint64_t>& chunks);  // the others' blocks are left; before start
  bool wanted(uint64_t chunk) const { return wanted_.empty() || wanted_[chunk]; }
  bool all() const { return wanted_.empty(); }
  // Whether the disk may take the block from, or bring it to, where it belongs. `fresh`: huge pages are made
  // for it if nobody has touched the memory yet.
  bool in_place(const Checks::Block& block, bool fresh) const;
  const std::unique_ptr<Checks> checks_;
  File file_;
  std::optional<Blocks> blocks_;  // none for an image of less than a block

 private:
  std::vector<bool> wanted_;  // by chunk; empty: all
  const PageTable pages_;
};

// A chunk of the image that fails its checksum fails the job: CorruptError, and the file is good for nothing.
// What goes from where it lies is checked once it is written, so that nothing that changed before goes
// unseen. Sets the file's size; syncs nothing. With `only`, no chunk but these is written, none before it is
// checked, and what the file has of the others stays.
class FileWrite final : public Transfer {
 public:
  static std::shared_ptr<FileWrite> begin(const Pool& pool, int fd, const std::byte* image, uint64_t nbytes,
                                          uint64_t chunk_bytes, std::vector<uint32_t> checksums, bool direct,
                                          const std::optional<std::vector<uint64_t>>& only = std::nullopt);

 protected:
  void work(uint64_t block) override;
  void close(bool whole) override;

 private:
  using Transfer::Transfer;
  void check(uint64_t index, const Checks::Block& block, uint32_t checksum);
  std::once_flag reserved_;
};

// Chunks that fail their checksum or are not there are told by bad(); they do not fail the job. With `only`,
// no chunk but these is read. Memory that nobody has touched yet gets huge pages, where there are some.
class FileRead final : public Transfer {
 public:
  static std::shared_ptr<FileRead> begin(const Pool& pool, int fd, std::byte* image, uint64_t nbytes,
                                         uint64_t chunk_bytes, std::vector<uint32_t> checksums, bool direct,
                                         const std::optional<std::vector<uint64_t>>& only = std::nullopt);
  std::vector<uint64_t> bad() const { return checks_->bad(); }
  uint64_t verified() const { return checks_->verified(); }

 protected:
  void work(uint64_t block) override;
  void close(bool whole) override;

 private:
  using Transfer::Transfer;
};

}  // namespace zs
