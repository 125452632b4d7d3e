// Which runs of an image come from a device, worked out once for a plan and used by every capture.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "arrays.hpp"

namespace zs {

class Plan;

struct Route {
  struct Run {
    uint32_t piece;
    uint64_t offset;         // in the image
    uint64_t begin, nbytes;  // of the piece
  };
  struct Part {
    uint64_t chunk;
    size_t first, last;  // runs
  };
  std::shared_ptr<const std::vector<int16_t>> places;  // of the pieces
  std::shared_ptr<const std::vector<Geometry>> geometries;
  int16_t place;
  std::vector<Run> runs;
  std::vector<Part> parts;  // of the chunks that have any

  // Throws Kind::capability where an array there is strided: copy engines move what is contiguous.
  static std::shared_ptr<const Route> make(const Plan& plan, const Arrays& arrays, int16_t place);
  bool is_of(const Arrays& arrays, int16_t there) const {
    return places == arrays.places && geometries == arrays.geometries && place == there;
  }
};

}  // namespace zs
