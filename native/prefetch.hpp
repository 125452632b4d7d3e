// Asking for lines of memory before they are needed.
#pragma once
#include <cstddef>

namespace zs {

constexpr size_t kLine = 64;

// Always inlined: GCC takes a function that does nothing but this for one without effect, and drops its
// calls.
[[gnu::always_inline]] inline void prefetch(const void* at) {
  __builtin_prefetch(at);
}

// The lines of bytes [first, last] of an object of at most a few lines.
[[gnu::always_inline]] inline void prefetch(const void* object, size_t first, size_t last) {
  const auto* const bytes = static_cast<const std::byte*>(object);
  for (size_t at = first; at < last; at += kLine) __builtin_prefetch(bytes + at);
  __builtin_prefetch(bytes + last);
}

}  // namespace zs
