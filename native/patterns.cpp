#include "patterns.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "error.hpp"

namespace zs {
namespace {

// Blocks stay in the cache and end early; within one there is no branch, so that it is done in wide
// registers.
constexpr size_t kBlock = 16 << 10;

template <class Word>
bool any(const std::byte* data, size_t nbytes, Word mask, Word value) {
  Word words[kBlock / sizeof(Word)];
  for (size_t at = 0; at < nbytes; at += kBlock) {
    const size_t size = std::min(kBlock, nbytes - at);
    std::memcpy(words, data + at, size);  // where the data lie need not be aligned
    Word found = 0;
    for (size_t k = 0; k < size / sizeof(Word); ++k)
      found = static_cast<Word>(found | static_cast<Word>((words[k] & mask) == value));
    if (found != 0) return true;
  }
  return false;
}

}  // namespace

bool any_masked(const void* data, size_t nbytes, uint32_t width, uint64_t mask, uint64_t value) {
  const auto* const bytes = static_cast<const std::byte*>(data);
  if (width == 0 || nbytes % width != 0)
    throw Error(Kind::usage, std::to_string(nbytes) + " bytes are no elements of " + std::to_string(width));
  switch (width) {
    case 1:
      return any(bytes, nbytes, static_cast<uint8_t>(mask), static_cast<uint8_t>(value));
    case 2:
      return any(bytes, nbytes, static_cast<uint16_t>(mask), static_cast<uint16_t>(value));
    case 4:
      return any(bytes, nbytes, static_cast<uint32_t>(mask), static_cast<uint32_t>(value));
    case 8:
      return any(bytes, nbytes, mask, value);
    default:
      throw Error(Kind::usage, "no elements are " + std::to_string(width) + " bytes wide");
  }
}

}  // namespace zs
