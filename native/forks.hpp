// Is this still the process in which something was made? Told from memory: the kernel takes a microsecond to
// say.
#pragma once
#include <cstdint>

namespace zs {

// How many forks this process is away from the one that loaded this code.
uint32_t forks() noexcept;
// Where that number is.
const uint32_t* forks_at() noexcept;

}  // namespace zs
