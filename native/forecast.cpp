#include "forecast.hpp"

#include <algorithm>

namespace zs {
namespace {

constexpr size_t kEnough = 16;      // parts; fewer tell no rate
constexpr double kLeastMargin = 8;  // parts
constexpr double kNoWait = 100e-6;  // what a wait for nothing may take

}  // namespace

void Forecast::landed(cuda::Way way, size_t parts, double seconds) {
  if (parts < kEnough || seconds <= 0) return;
  rate_ = static_cast<double>(parts) / seconds;
  way_ = way;
}

void Forecast::guarded(double free, double waited) {
  free_ = free;
  margin_ = waited > kNoWait ? margin_ + waited * rate_ : std::max(margin_ - 1, 0.0);
}

size_t Forecast::in_time(cuda::Way way, size_t all) const {
  if (free_ == 0 || rate_ == 0 || way_ != way) return all;
  return std::min(all, static_cast<size_t>(std::max(free_ * rate_ - kLeastMargin - margin_, 0.0)));
}

}  // namespace zs
