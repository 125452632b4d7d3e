// The checksum table of an image, met block by block from several threads.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace zs {

// Chunks are cut into blocks, so that even a small image keeps several threads or disk requests busy; the
// checksums of a chunk's blocks are joined when its last block has come.
class Checks {
 public:
  static constexpr uint64_t kBlock = 4 << 20;
  struct Block {
    uint64_t chunk, offset, nbytes;  // offset in the image
  };
  enum class Verdict : uint8_t { open, whole, bad };

  // With no checksums at all every block that is there is right.
  Checks(uint64_t nbytes, uint64_t chunk_bytes, std::optional<std::vector<uint32_t>> expected);

  uint64_t nbytes() const { return nbytes_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  uint64_t blocks() const { return checksums_.size(); }
  bool checking() const { return checking_; }
  Block block(uint64_t index) const;

  // Each block comes once, by record or by lost. `open` unless it was the last of its chunk.
  Verdict record(uint64_t index, uint32_t checksum);
  Verdict lost(uint64_t index);  // a block that could not be had

  std::vector<uint64_t> bad() const;  // chunks, rising; of those judged so far
  uint64_t verified() const;  // chunks 0 to verified - 1 are whole, and their bytes can be seen by the caller
  uint32_t expected(uint64_t chunk) const { return expected_[chunk]; }

 private:
  struct Chunk {
    std::atomic<uint32_t> left;
    std::atomic<bool> lost{false};
    std::atomic<Verdict> verdict{Verdict::open};
  };
  Verdict count(uint64_t chunk);

  const uint64_t nbytes_, chunk_bytes_, blocks_in_chunk_;
  const bool checking_;
  const std::vector<uint32_t> expected_;
  std::vector<uint32_t> checksums_;  // by block
  std::unique_ptr<Chunk[]> chunks_;
  mutable std::atomic<uint64_t> verified_{0};
};

}  // namespace zs
