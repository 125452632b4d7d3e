// CRC-32C (Castagnoli), as in RFC 3720: reflected, starting at and finished with all ones.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace zs {

// Checksum of `nbytes` bytes that follow bytes whose checksum is `value`.
uint32_t crc32c(const void* data, size_t nbytes, uint32_t value = 0);

// The same, copying the bytes on the way. Uses non-temporal stores: what is written is not left in the cache.
uint32_t crc32c_copy(void* to, const void* from, size_t nbytes, uint32_t value = 0);

// Checksum of a run made of two, from the checksums of both and the length of the second.
uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t nbytes_second);

// Whether the processor's own CRC instruction is in use.
bool crc32c_hardware();

// One way to compute it. State goes in and out as it is in the register: not inverted.
struct CrcKernel {
  const char* name;
  uint32_t (*crc)(uint32_t state, const uint8_t* data, size_t nbytes);
  uint32_t (*copy)(uint32_t state, uint8_t* to, const uint8_t* from, size_t nbytes);
};

// Those that this machine can run, best first. The last is always the table.
std::span<const CrcKernel> crc32c_kernels();

namespace crc {

constexpr uint32_t kPolynomial = 0x82F63B78u;  // reflected: bit 31 is x^0

// a * b mod P, both reflected.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
  }
  return product;
}

// x^n mod P, reflected.
constexpr uint32_t power(uint64_t n) {
  uint32_t result = 0x80000000u, square = 0x40000000u;
  for (; n != 0; n >>= 1) {
    if (n & 1) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

// The kernels of this processor family that this processor can run, best first; returns how many.
size_t machine_kernels(CrcKernel* out);

uint32_t table_crc(uint32_t state, const uint8_t* data, size_t nbytes);

}  // namespace crc
}  // namespace zs
