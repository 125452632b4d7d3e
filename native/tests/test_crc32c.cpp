// Every kernel against the definition, bit by bit, over lengths, alignments and splits.
#include <cstring>
#include <random>
#include <vector>

#include "../crc32c.hpp"
#include "check.hpp"

namespace {

uint32_t by_definition(uint32_t state, const uint8_t* data, size_t nbytes) {
  for (size_t i = 0; i < nbytes; ++i) {
    state ^= data[i];
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) ? zs::crc::kPolynomial : 0);
  }
  return state;
}

}  // namespace

int main() {
  CHECK(zs::crc32c("123456789", 9) == 0xE3069283u);
  CHECK(zs::crc32c("", 0) == 0);

  std::mt19937_64 random(1);
  std::vector<uint8_t> data(200'000), copy(data.size() + 128);
  for (auto& byte : data) byte = static_cast<uint8_t>(random());

  std::vector<size_t> lengths;
  for (size_t n = 0; n < 1100; ++n) lengths.push_back(n);
  for (size_t n : {4095, 4096, 6143, 6144, 6145, 12288, 36864, 65537, 150'001}) lengths.push_back(n);
  for (const zs::CrcKernel& kernel : zs::crc32c_kernels()) {
    std::printf("kernel %s\n", kernel.name);
    for (size_t n : lengths) {
      const size_t skip = random() % 70, shift = random() % 70;
      const auto state = static_cast<uint32_t>(random());
      const uint32_t expected = by_definition(state, data.data() + skip, n);
      CHECK(kernel.crc(state, data.data() + skip, n) == expected);
      std::memset(copy.data(), 0xAB, n + shift + 1);
      CHECK(kernel.copy(state, copy.data() + shift, data.data() + skip, n) == expected);
      CHECK(n == 0 || std::memcmp(copy.data() + shift, data.data() + skip, n) == 0);
      CHECK(copy[shift + n] == 0xAB && (shift == 0 || copy[shift - 1] == 0xAB));
    }
  }
  for (int i = 0; i < 200; ++i) {
    const size_t n = random() % data.size(), cut = n == 0 ? 0 : random() % n;
    const uint32_t first = zs::crc32c(data.data(), cut), second = zs::crc32c(data.data() + cut, n - cut);
    const uint32_t whole = zs::crc32c(data.data(), n);
    CHECK(zs::crc32c_combine(first, second, n - cut) == whole);
    CHECK(zs::crc32c(data.data() + cut, n - cut, first) == whole);
  }
  return 0;
}
