// What a capture copies before its beginning returns: which pieces, and how. Worked out once for a plan.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "arrays.hpp"
#include "tasks.hpp"

namespace zs {

class Workers;

// The places of tiny pieces in an image are pages apart, and to write to each takes longer than to read all
// of them: they are gathered side by side, and go to their places with their chunks.
struct AtOnce {
  enum Mark : uint8_t { kNot, kPlaced, kBeside };
  struct Tiny {
    uint32_t piece, nbytes;
    uint64_t at;
  };
  Pieces pieces;
  std::shared_ptr<const std::vector<Geometry>> geometries;
  std::shared_ptr<const std::vector<int16_t>> places;
  std::vector<uint8_t> marks;  // by piece of the plan
  std::vector<Tiny> tiny;
  uint64_t tiny_bytes = 0;
  std::vector<uint32_t> others;  // in host memory: straight to their places
  std::vector<Task> tasks;       // of the others

  // Throws where there is no such piece.
  static std::shared_ptr<const AtOnce> make(const Plan& plan, const Arrays& arrays, const Pieces& pieces);
  bool is_of(const Arrays& arrays, const Pieces& of) const {
    return pieces == of && geometries == arrays.geometries && places == arrays.places;
  }

  // Copies the tiny pieces to `beside`, and makes that the place where their bytes are to be had.
  void gather_tiny(Arrays& arrays, std::byte* beside) const;
  // Copies the others into the image, with the help of the workers where that is worth it.
  void place_others(const Plan& plan, const Arrays& arrays, std::byte* image,
                    const std::shared_ptr<Workers>& workers) const;
};

}  // namespace zs
