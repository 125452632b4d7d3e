// How much memory this process may still take.
#pragma once
#include <cstdint>

namespace zs {

// The least of what the machine has free and what the control groups of this process leave it; page cache
// counts as free. UINT64_MAX when the system does not tell.
uint64_t available_memory();

}  // namespace zs
