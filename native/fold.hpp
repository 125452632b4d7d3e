// CRC-32C of memory that a device reads fast and the CPU cannot: the device *folds* spans of it to a few KiB
// that have the same remainder, and the CPU takes the checksum of those.
//
// Over GF(2) P(x)^2 = P(x^2), so P(x^1024) is a multiple of the polynomial P of CRC-32C: dividing by it
// leaves the remainder by P as it was. Its digits are rows of 1024 bits, and it has 18 terms: a step of the
// division is an XOR of whole rows, in which no bit meets another of its own row. A warp holds the last 32
// rows in registers, one word a lane, reads memory once, and needs neither tables nor other lanes
// (docs/decisions/2026-11-30-ghosts.md).
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace zs::fold {

constexpr uint64_t kLanes = 32;
constexpr uint64_t kRow = 128;  // bytes
constexpr uint64_t kRows = 32;  // of which a residue has at most so many
constexpr uint64_t kBlock = kRows * kRow;

// What one warp folds, as the kernel reads it: rows that begin at multiples of kRow, of which bytes before
// `head` in the first and from `tail` on in the last are not read.
struct Span {
  uint64_t first;    // address of the first row
  uint64_t residue;  // address for residue_rows() rows
  uint32_t rows;     // at least 1
  uint32_t head;     // 0 to 127
  uint32_t tail;     // 1 to 128
  uint32_t unused = 0;

  uint64_t nbytes() const { return rows * kRow - head - (kRow - tail); }
  uint64_t residue_rows() const { return rows < kRows ? rows : kRows; }
};
static_assert(sizeof(Span) == 32);

// The kernel in PTX, which a driver compiles for whatever it drives: `kName`(address of Spans), one block of
// kLanes threads for each Span.
inline constexpr char kName[] = "zs_fold";
std::string kernel();

// Appends spans of about `span_bytes` bytes (a multiple of kBlock) that make up the run; their residues
// follow one another, the first at `residue`. Returns the bytes of all of them.
uint64_t cut(uint64_t at, uint64_t nbytes, uint64_t span_bytes, uint64_t residue, std::vector<Span>& spans);

// CRC-32C of the run that was cut to these spans, from their residues, one after another.
uint32_t checksum(std::span<const Span> spans, const std::byte* residues);

}  // namespace zs::fold
