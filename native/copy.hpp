// Where an array's elements lie, and moving a run of them between there and a contiguous, row-major place.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace zs {

// One array without its address: sizes and strides after everything mergeable is merged.
struct Geometry {
  struct Dim {
    int64_t size;
    int64_t stride;  // bytes; zero and negative are fine
  };
  uint64_t nbytes = 0;
  uint32_t itemsize = 1;
  std::vector<Dim> dims;  // empty: the elements lie one after another

  // Strides in bytes.
  static Geometry of(uint32_t itemsize, std::span<const int64_t> shape, std::span<const int64_t> strides);
  bool contiguous() const { return dims.empty(); }
};

// Bytes [begin, end) of the array at `data`, in logical row-major order, to `to`.
void gather(std::byte* to, const std::byte* data, const Geometry& geometry, uint64_t begin, uint64_t end);

// The way back: `from` holds bytes [begin, end) of the array.
void scatter(std::byte* data, const std::byte* from, const Geometry& geometry, uint64_t begin, uint64_t end);

}  // namespace zs
