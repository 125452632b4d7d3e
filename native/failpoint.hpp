// Places where a test may have the process killed: ZEROSTALL_FAILPOINTS="file-write=3" kills it before chunk
// 3 is written. Read once; without the variable a failpoint costs one comparison.
#pragma once
#include <cstdint>

namespace zs {

void failpoint(const char* name, uint64_t count) noexcept;

}  // namespace zs
