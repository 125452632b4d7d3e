// Elements whose bits follow a pattern: with an exponent's bits all set, a number is infinite or none.
#pragma once
#include <cstddef>
#include <cstdint>

namespace zs {

// Whether some of the elements of `width` bytes (1, 2, 4 or 8; little endian) at `data` has the bits `value`
// under `mask`. Throws Kind::usage for another width, or bytes that are no whole elements.
bool any_masked(const void* data, size_t nbytes, uint32_t width, uint64_t mask, uint64_t value);

}  // namespace zs
