#include "crc32c.hpp"

#include <array>
#include <bit>
#include <cstring>

namespace zs {
namespace crc {
namespace {

using Table = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: what byte b contributes when k more bytes follow it in the same 8-byte step.
constexpr Table make_tables() {
  Table tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) ? kPolynomial : 0);
    tables[0][byte] = state;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xFF];
  return tables;
}

constexpr Table kTables = make_tables();
static_assert(std::endian::native == std::endian::little, "images are little-endian and so is this code");

// x^(8 * 2^k) mod P: appending 2^k zero bytes multiplies by it.
constexpr std::array<uint32_t, 64> make_shifts() {
  std::array<uint32_t, 64> shifts{};
  shifts[0] = power(8);
  for (size_t k = 1; k < 64; ++k) shifts[k] = multiply(shifts[k - 1], shifts[k - 1]);
  return shifts;
}

constexpr std::array<uint32_t, 64> kShifts = make_shifts();

}  // namespace

uint32_t table_crc(uint32_t state, const uint8_t* data, size_t nbytes) {
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= state;
    state = kTables[7][word & 0xFF] ^ kTables[6][(word >> 8) & 0xFF] ^ kTables[5][(word >> 16) & 0xFF] ^
            kTables[4][(word >> 24) & 0xFF] ^ kTables[3][(word >> 32) & 0xFF] ^
            kTables[2][(word >> 40) & 0xFF] ^ kTables[1][(word >> 48) & 0xFF] ^ kTables[0][word >> 56];
  }
  for (; nbytes != 0; ++data, --nbytes) state = (state >> 8) ^ kTables[0][(state ^ *data) & 0xFF];
  return state;
}

namespace {

uint32_t table_copy(uint32_t state, uint8_t* to, const uint8_t* from, size_t nbytes) {
  constexpr size_t kBlock = 16 << 10;  // stays in L1, so that the second pass over it costs no memory traffic
  while (nbytes != 0) {
    const size_t n = nbytes < kBlock ? nbytes : kBlock;
    std::memcpy(to, from, n);
    state = table_crc(state, to, n);
    to += n, from += n, nbytes -= n;
  }
  return state;
}

struct Kernels {
  std::array<CrcKernel, 4> all;
  size_t count;
  Kernels() : count(machine_kernels(all.data())) { all[count++] = {"table", table_crc, table_copy}; }
};

const Kernels& kernels() {
  static const Kernels chosen;
  return chosen;
}

}  // namespace
}  // namespace crc

std::span<const CrcKernel> crc32c_kernels() {
  return {crc::kernels().all.data(), crc::kernels().count};
}

bool crc32c_hardware() {
  return crc::kernels().count > 1;
}

uint32_t crc32c(const void* data, size_t nbytes, uint32_t value) {
  return ~crc::kernels().all[0].crc(~value, static_cast<const uint8_t*>(data), nbytes);
}

uint32_t crc32c_copy(void* to, const void* from, size_t nbytes, uint32_t value) {
  return ~crc::kernels().all[0].copy(~value, static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from),
                                     nbytes);
}

uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t nbytes_second) {
  for (size_t k = 0; nbytes_second != 0; ++k, nbytes_second >>= 1)
    if (nbytes_second & 1) first = crc::multiply(crc::kShifts[k], first);
  return first ^ second;
}

}  // namespace zs
