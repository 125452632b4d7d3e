#include "route.hpp"

#include <string>

#include "error.hpp"
#include "plan.hpp"

namespace zs {

std::shared_ptr<const Route> Route::make(const Plan& plan, const Arrays& arrays, int16_t place) {
  auto route = std::make_shared<Route>();
  route->places = arrays.places;
  route->geometries = arrays.geometries;
  route->place = place;
  for (size_t piece = 0; arrays.places && piece < plan.pieces(); ++piece)
    if (arrays.place(piece) == place && !(*arrays.geometries)[piece].contiguous())
      throw Error(Kind::capability, "tensor " + std::to_string(piece) + " is strided and on a device");
  for (uint64_t chunk = 0; arrays.places && chunk < plan.chunks(); ++chunk) {
    const size_t first = route->runs.size();
    plan.runs(
        chunk, [](uint64_t, uint64_t) {},
        [&](size_t piece, uint64_t offset, uint64_t begin, uint64_t end) {
          if (arrays.place(piece) == place)
            route->runs.push_back({static_cast<uint32_t>(piece), offset, begin, end - begin});
        },
        [](uint64_t, uint64_t) {});
    if (route->runs.size() != first) route->parts.push_back({chunk, first, route->runs.size()});
  }
  return route;
}

}  // namespace zs
