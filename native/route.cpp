#include "route.hpp"

#include "plan.hpp"

namespace zs {

std::shared_ptr<const Route> Route::make(const Plan& plan,
                                         const std::shared_ptr<const std::vector<int16_t>>& places,
                                         int16_t place) {
  auto route = std::make_shared<Route>();
  route->places = places;
  route->place = place;
  for (uint64_t chunk = 0; places && chunk < plan.chunks(); ++chunk) {
    const size_t first = route->runs.size();
    plan.runs(
        chunk, [](uint64_t, uint64_t) {},
        [&](size_t piece, uint64_t offset, uint64_t begin, uint64_t end) {
          if ((*places)[piece] == place)
            route->runs.push_back({static_cast<uint32_t>(piece), offset, begin, end - begin});
        },
        [](uint64_t, uint64_t) {});
    if (route->runs.size() != first) route->parts.push_back({chunk, first, route->runs.size()});
  }
  return route;
}

}  // namespace zs
