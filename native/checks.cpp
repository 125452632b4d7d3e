#include "checks.hpp"

#include <algorithm>
#include <string>

#include "crc32c.hpp"
#include "error.hpp"

namespace zs {
namespace {

uint64_t divide_up(uint64_t a, uint64_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

uint64_t usable(uint64_t chunk_bytes) {
  if (chunk_bytes == 0) throw Error(Kind::usage, "a chunk has no bytes");
  return chunk_bytes;
}

}  // namespace

Checks::Checks(uint64_t nbytes, uint64_t chunk_bytes, std::optional<std::vector<uint32_t>> expected)
    : nbytes_(nbytes),
      chunk_bytes_(usable(chunk_bytes)),
      blocks_in_chunk_(divide_up(chunk_bytes_, kBlock)),
      checking_(expected.has_value()),
      expected_(expected ? std::move(*expected) : std::vector<uint32_t>(divide_up(nbytes_, chunk_bytes_))) {
  const uint64_t chunks = divide_up(nbytes_, chunk_bytes_);
  if (expected_.size() != chunks)
    throw Error(Kind::usage,
                std::to_string(expected_.size()) + " checksums for " + std::to_string(chunks) + " chunks");
  chunks_ = std::make_unique<Chunk[]>(chunks);
  uint64_t blocks = 0;
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    const uint64_t size = std::min(chunk_bytes_, nbytes_ - chunk * chunk_bytes_);
    const uint64_t count = divide_up(size, kBlock);
    chunks_[chunk].left.store(static_cast<uint32_t>(count), std::memory_order_relaxed);
    blocks += count;
  }
  checksums_.resize(blocks);
}

Checks::Block Checks::block(uint64_t index) const {
  const uint64_t chunk = index / blocks_in_chunk_, within = index % blocks_in_chunk_;
  const uint64_t offset = chunk * chunk_bytes_ + within * kBlock;
  const uint64_t end = std::min({offset + kBlock, (chunk + 1) * chunk_bytes_, nbytes_});
  return {chunk, offset, end - offset};
}

Checks::Verdict Checks::record(uint64_t index, uint32_t checksum) {
  checksums_[index] = checksum;
  return count(index / blocks_in_chunk_);
}

Checks::Verdict Checks::lost(uint64_t index) {
  const uint64_t chunk = index / blocks_in_chunk_;
  chunks_[chunk].lost.store(true, std::memory_order_relaxed);
  return count(chunk);
}

Checks::Verdict Checks::count(uint64_t chunk) {
  Chunk& state = chunks_[chunk];
  if (state.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return Verdict::open;
  uint32_t value = 0;
  for (uint64_t index = chunk * blocks_in_chunk_;
       checking_ && index < std::min<uint64_t>((chunk + 1) * blocks_in_chunk_, blocks()); ++index)
    value = crc32c_combine(value, checksums_[index], block(index).nbytes);
  const bool whole = !state.lost.load(std::memory_order_relaxed) && value == expected_[chunk];
  const Verdict verdict = whole ? Verdict::whole : Verdict::bad;
  state.verdict.store(verdict, std::memory_order_release);
  return verdict;
}

std::vector<uint64_t> Checks::bad() const {
  std::vector<uint64_t> result;
  for (uint64_t chunk = 0; chunk < expected_.size(); ++chunk)
    if (chunks_[chunk].verdict.load(std::memory_order_acquire) == Verdict::bad) result.push_back(chunk);
  return result;
}

uint64_t Checks::verified() const {
  uint64_t chunk = verified_.load(std::memory_order_acquire);
  while (chunk < expected_.size() && chunks_[chunk].verdict.load(std::memory_order_acquire) == Verdict::whole)
    ++chunk;
  verified_.store(chunk, std::memory_order_release);
  return chunk;
}

}  // namespace zs
