// Where the arrays of a plan's pieces lie.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "copy.hpp"

namespace zs {

// Addresses as they are now, and shapes as they always are, of the arrays of a plan's pieces.
struct Arrays {
  static constexpr int16_t kHost = -1;
  std::vector<std::byte*> data;
  std::shared_ptr<const std::vector<Geometry>> geometries;
  std::shared_ptr<const std::vector<int16_t>> places;  // numbers of CUDA devices, or kHost; null: all kHost

  int16_t place(size_t index) const { return places ? (*places)[index] : kHost; }
};

using Pieces = std::shared_ptr<const std::vector<uint32_t>>;  // null: none

}  // namespace zs
