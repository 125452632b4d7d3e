// CRC-32C on x86-64: three interleaved streams of the crc32 instruction, or carry-less multiplication on
// 512-bit registers. Each function names the instructions that it needs, so that one binary serves every
// machine.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "crc32c.hpp"

#define ZS_SSE42 __attribute__((target("sse4.2,crc32,pclmul")))
#define ZS_AVX512 __attribute__((target("avx512f,avx512vl,avx512bw,vpclmulqdq,pclmul,sse4.2,crc32")))

namespace zs::crc {
namespace {

uint64_t load64(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

ZS_SSE42 uint32_t one_stream(uint32_t state, const uint8_t* data, size_t nbytes) {
  uint64_t wide = state;
  for (; nbytes >= 8; data += 8, nbytes -= 8) wide = _mm_crc32_u64(wide, load64(data));
  state = static_cast<uint32_t>(wide);
  for (; nbytes != 0; ++data, --nbytes) state = _mm_crc32_u8(state, *data);
  return state;
}

// state * constant * x^33 mod P. The carry-less product of two reflected 32-bit values has 63 bits, one short
// of the register's 64 (a factor x), and the crc32 instruction multiplies by x^32 as it reduces.
ZS_SSE42 inline uint64_t shifted(uint32_t state, uint32_t constant) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128(static_cast<int>(state)),
                                               _mm_cvtsi32_si128(static_cast<int>(constant)), 0);
  return _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product)));
}

// The crc32 instruction takes three cycles and can start every cycle: three independent streams fill it.
template <size_t kStream>
ZS_SSE42 inline uint32_t three_streams(uint32_t state, const uint8_t*& data, size_t& nbytes) {
  constexpr uint32_t kTwoOn = power(8 * 2 * kStream - 33), kOneOn = power(8 * kStream - 33);
  while (nbytes >= 3 * kStream) {
    uint64_t a = state, b = 0, c = 0;
    for (size_t i = 0; i < kStream; i += 64) {
      // The same lines of the next round: the hardware sees no pattern in three short streams.
      for (size_t k = i; k < 3 * kStream; k += kStream)
        _mm_prefetch(reinterpret_cast<const char*>(data + 3 * kStream + k), _MM_HINT_T0);
      for (size_t k = i; k < i + 64; k += 8) {
        a = _mm_crc32_u64(a, load64(data + k));
        b = _mm_crc32_u64(b, load64(data + kStream + k));
        c = _mm_crc32_u64(c, load64(data + 2 * kStream + k));
      }
    }
    state = static_cast<uint32_t>(shifted(static_cast<uint32_t>(a), kTwoOn) ^
                                  shifted(static_cast<uint32_t>(b), kOneOn) ^ c);
    data += 3 * kStream, nbytes -= 3 * kStream;
  }
  return state;
}

ZS_SSE42 uint32_t sse42_crc(uint32_t state, const uint8_t* data, size_t nbytes) {
  state = three_streams<2048>(state, data, nbytes);
  state = three_streams<256>(state, data, nbytes);
  return one_stream(state, data, nbytes);
}

// Bytes before `to` is aligned for full-line stores.
size_t head(const uint8_t* to, size_t nbytes) {
  const size_t misaligned = (64 - (reinterpret_cast<uintptr_t>(to) & 63)) & 63;
  return misaligned < nbytes ? misaligned : nbytes;
}

ZS_SSE42 inline void stream_line(uint8_t* to, const uint8_t* from) {
  const auto* in = reinterpret_cast<const __m128i*>(from);
  auto* out = reinterpret_cast<__m128i*>(to);
  const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
  const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
  _mm_stream_si128(out, a), _mm_stream_si128(out + 1, b);
  _mm_stream_si128(out + 2, c), _mm_stream_si128(out + 3, d);
}

ZS_SSE42 uint32_t sse42_copy(uint32_t state, uint8_t* to, const uint8_t* from, size_t nbytes) {
  constexpr size_t kStream = 2048;
  constexpr uint32_t kTwoOn = power(8 * 2 * kStream - 33), kOneOn = power(8 * kStream - 33);
  const size_t lead = head(to, nbytes);
  std::memcpy(to, from, lead);
  state = one_stream(state, from, lead);
  to += lead, from += lead, nbytes -= lead;
  for (; nbytes >= 3 * kStream; to += 3 * kStream, from += 3 * kStream, nbytes -= 3 * kStream) {
    uint64_t a = state, b = 0, c = 0;
    for (size_t i = 0; i < kStream; i += 64) {
      for (size_t k = i; k < 3 * kStream; k += kStream) {
        _mm_prefetch(reinterpret_cast<const char*>(from + 3 * kStream + k), _MM_HINT_T0);
        stream_line(to + k, from + k);
      }
      for (size_t k = i; k < i + 64; k += 8) {
        a = _mm_crc32_u64(a, load64(from + k));
        b = _mm_crc32_u64(b, load64(from + kStream + k));
        c = _mm_crc32_u64(c, load64(from + 2 * kStream + k));
      }
    }
    state = static_cast<uint32_t>(shifted(static_cast<uint32_t>(a), kTwoOn) ^
                                  shifted(static_cast<uint32_t>(b), kOneOn) ^ c);
  }
  for (; nbytes >= 64; to += 64, from += 64, nbytes -= 64) {
    stream_line(to, from);
    state = one_stream(state, from, 64);
  }
  std::memcpy(to, from, nbytes);
  _mm_sfence();  // streaming stores are unordered: nobody may be told of them before this
  return one_stream(state, from, nbytes);
}

// Multipliers that carry a 128-bit lane `kBits` further on. A reflected 64 x 32 bit product in a 128-bit
// register is short by x^33; the lane's low half stands 64 bits before its high half.
template <uint64_t kBits>
struct Fold {
  static constexpr long long kLow = power(kBits + 64 - 33), kHigh = power(kBits - 33);
};

template <uint64_t kBits>
ZS_AVX512 inline __m512i fold(__m512i lanes, __m512i next) {
  const __m512i k =
      _mm512_set_epi64(Fold<kBits>::kHigh, Fold<kBits>::kLow, Fold<kBits>::kHigh, Fold<kBits>::kLow,
                       Fold<kBits>::kHigh, Fold<kBits>::kLow, Fold<kBits>::kHigh, Fold<kBits>::kLow);
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, k, 0x00),
                                   _mm512_clmulepi64_epi128(lanes, k, 0x11), next, 0x96);  // a ^ b ^ c
}

template <bool kCopy>
ZS_AVX512 inline __m512i take(uint8_t* to, const uint8_t* from) {
  const __m512i line = _mm512_loadu_si512(from);
  if constexpr (kCopy) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
  return line;
}

// Folds all whole 64-byte lines; moves the pointers past them. Needs at least 256 bytes, and `to` on a line.
template <bool kCopy>
ZS_AVX512 inline uint32_t fold_lines(uint32_t state, uint8_t*& to, const uint8_t*& from, size_t& nbytes) {
  __m512i a = take<kCopy>(to, from), b = take<kCopy>(to + 64, from + 64);
  __m512i c = take<kCopy>(to + 128, from + 128), d = take<kCopy>(to + 192, from + 192);
  a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  to += 256, from += 256, nbytes -= 256;
  for (; nbytes >= 256; to += 256, from += 256, nbytes -= 256) {
    // The hardware prefetcher stops at every 4 KiB page.
    for (size_t line = 0; line < 256; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(from + 4096 + line), _MM_HINT_T0);
    a = fold<2048>(a, take<kCopy>(to, from));
    b = fold<2048>(b, take<kCopy>(to + 64, from + 64));
    c = fold<2048>(c, take<kCopy>(to + 128, from + 128));
    d = fold<2048>(d, take<kCopy>(to + 192, from + 192));
  }
  b = fold<512>(a, b), c = fold<512>(b, c), d = fold<512>(c, d);
  for (; nbytes >= 64; to += 64, from += 64, nbytes -= 64) d = fold<512>(d, take<kCopy>(to, from));
  // What is left is a message of 64 bytes with the same checksum.
  alignas(64) uint8_t rest[64];
  _mm512_store_si512(rest, d);
  return one_stream(0, rest, sizeof rest);
}

ZS_AVX512 uint32_t avx512_crc(uint32_t state, const uint8_t* data, size_t nbytes) {
  uint8_t* nowhere = nullptr;
  if (nbytes >= 512) {
    state = fold_lines<false>(state, nowhere, data, nbytes);
  }
  return one_stream(state, data, nbytes);
}

ZS_AVX512 uint32_t avx512_copy(uint32_t state, uint8_t* to, const uint8_t* from, size_t nbytes) {
  const size_t lead = head(to, nbytes);
  std::memcpy(to, from, lead);
  state = one_stream(state, from, lead);
  to += lead, from += lead, nbytes -= lead;
  if (nbytes >= 256) {
    state = fold_lines<true>(state, to, from, nbytes);
    _mm_sfence();
  }
  std::memcpy(to, from, nbytes);
  return one_stream(state, from, nbytes);
}

}  // namespace

size_t machine_kernels(CrcKernel* out) {
  size_t count = 0;
  __builtin_cpu_init();
  const bool sse42 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
  if (sse42 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("vpclmulqdq"))
    out[count++] = {"avx512", avx512_crc, avx512_copy};
  if (sse42) out[count++] = {"sse42", sse42_crc, sse42_copy};
  return count;
}

}  // namespace zs::crc
#endif
