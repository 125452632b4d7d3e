// CRC-32C on AArch64 by its own instruction, three interleaved streams; on any other processor, none.
#include <cstring>

#include "crc32c.hpp"

#if defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>

#if defined(__clang__)
#define ZS_CRC __attribute__((target("crc")))
#else
#define ZS_CRC __attribute__((target("+crc")))
#endif

namespace zs::crc {
namespace {

constexpr unsigned long kHasCrc32 = 1 << 7;  // HWCAP_CRC32, part of the kernel's ABI

uint64_t load64(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

ZS_CRC uint32_t one_stream(uint32_t state, const uint8_t* data, size_t nbytes) {
  for (; nbytes >= 8; data += 8, nbytes -= 8) state = __crc32cd(state, load64(data));
  for (; nbytes != 0; ++data, --nbytes) state = __crc32cb(state, *data);
  return state;
}

ZS_CRC uint32_t arm_crc(uint32_t state, const uint8_t* data, size_t nbytes) {
  constexpr size_t kStream = 4096;  // long enough that joining the streams in software costs nothing
  constexpr uint32_t kTwoOn = power(8 * 2 * kStream), kOneOn = power(8 * kStream);
  for (; nbytes >= 3 * kStream; data += 3 * kStream, nbytes -= 3 * kStream) {
    uint32_t a = state, b = 0, c = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      a = __crc32cd(a, load64(data + i));
      b = __crc32cd(b, load64(data + kStream + i));
      c = __crc32cd(c, load64(data + 2 * kStream + i));
    }
    state = multiply(kTwoOn, a) ^ multiply(kOneOn, b) ^ c;
  }
  return one_stream(state, data, nbytes);
}

ZS_CRC uint32_t arm_copy(uint32_t state, uint8_t* to, const uint8_t* from, size_t nbytes) {
  constexpr size_t kBlock = 12 << 10;  // in L1 when it is read again
  while (nbytes != 0) {
    const size_t n = nbytes < kBlock ? nbytes : kBlock;
    state = arm_crc(state, from, n);
    std::memcpy(to, from, n);
    to += n, from += n, nbytes -= n;
  }
  return state;
}

}  // namespace

size_t machine_kernels(CrcKernel* out) {
  if ((getauxval(AT_HWCAP) & kHasCrc32) == 0) return 0;
  out[0] = {"arm", arm_crc, arm_copy};
  return 1;
}

}  // namespace zs::crc
#elif !defined(__x86_64__)
namespace zs::crc {
size_t machine_kernels(CrcKernel*) {
  return 0;
}
}  // namespace zs::crc
#endif
