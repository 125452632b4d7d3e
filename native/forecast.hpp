// How many parts of a snapshot will have landed when the device comes to its guard. The CPU comes there long
// before, so what is pending then says nothing: it is told by the snapshots before.
#pragma once
#include <cstddef>

#include "cuda.hpp"

namespace zs {

// Not thread-safe. Parts that land in time are best left to the copy stream; those that a guard would wait
// for are better moved aside, which takes a thirtieth of that, or left to an optimizer that flips, which
// costs nothing.
class Forecast {
 public:
  // So many parts landed one after another in that time.
  void landed(cuda::Way way, size_t parts, double seconds);

  // How long a guard left the copies to themselves, and how long its stream then waited for them; both in
  // seconds of the device. A wait says how much the rate is not to be relied on (another GPU drains over the
  // same bus, for instance): the margin grows by that at once, and shrinks slowly.
  void guarded(double free, double waited);

  // Of `all`; all where nothing is known yet, so that nothing is moved for nothing.
  size_t in_time(cuda::Way way, size_t all) const;

 private:
  double rate_ = 0;  // parts a second; 0: not known
  cuda::Way way_ = cuda::Way::to_host;
  double free_ = 0;  // 0: not known
  double margin_ = 0;
};

}  // namespace zs
