// Whether what came from devices is what they held when the capture began.
#include <algorithm>

#include "capture.hpp"
#include "crc32c.hpp"
#include "error.hpp"

namespace zs {

Comparison Capture::compare_sources() const {
  if (to_peer()) throw Error(Kind::usage, "what went to a peer is compared where it is drained to");
  if (!done()) throw Error(Kind::usage, "a capture is compared with its sources when it is done");
  Comparison result;
  for (const Drain& drain : drains_) {
    const Lane& lane = *drain.lane;
    if (!lane.unprobed.empty()) result.unchecked.push_back(lane.unprobed);
    if (!lane.probe) continue;
    const std::vector<uint32_t> sums = lane.probe->checksums();
    result.nbytes += lane.probe->nbytes();
    std::span<const uint32_t> left = sums;
    for (const Lane::Look& look : lane.looks) {
      const std::span<const uint32_t> sources = left.first(look.last - look.first);
      left = left.subspan(sources.size());
      ++result.chunks;
      // As the chunk's would be if all that the lane brought were as it was; of the rest the image is taken.
      const std::byte* at = image_ + plan_->chunk_begin(look.name);
      const std::byte* const end = image_ + plan_->chunk_end(look.name);
      uint32_t value = 0;
      for (size_t k = 0; k < sources.size(); ++k) {
        const cuda::Copy& copy = lane.copies[look.first + k];
        const auto* const to = reinterpret_cast<const std::byte*>(copy.to);
        value = crc32c(at, static_cast<size_t>(to - at), value);
        value = crc32c_combine(value, sources[k], copy.nbytes);
        at = to + copy.nbytes;
      }
      if (crc32c(at, static_cast<size_t>(end - at), value) == checksums_[look.name]) continue;
      const size_t before = result.pieces.size();
      const auto blame = [&](bool all) {
        for (size_t k = 0; k < sources.size(); ++k) {
          const cuda::Copy& copy = lane.copies[look.first + k];
          if (all || crc32c(reinterpret_cast<const void*>(copy.to), copy.nbytes) != sources[k])
            result.pieces.push_back(drain.runs[look.first + k].piece);
        }
      };
      blame(false);
      if (result.pieces.size() == before) blame(true);  // the image has changed since it was checksummed
    }
  }
  std::sort(result.pieces.begin(), result.pieces.end());
  result.pieces.erase(std::unique(result.pieces.begin(), result.pieces.end()), result.pieces.end());
  return result;
}

std::vector<Capture::Sample> Capture::samples() const {
  if (!done()) throw Error(Kind::usage, "a capture tells its samples when it is done");
  const CUdeviceptr base = to_peer() ? peer_ : reinterpret_cast<CUdeviceptr>(image_);
  std::vector<Sample> result;
  for (const Drain& drain : drains_) {
    const Lane& lane = *drain.lane;
    if (!lane.probe) continue;
    const std::vector<uint32_t> sums = lane.probe->checksums();
    size_t next = 0;
    for (const Lane::Look& look : lane.looks)
      for (size_t k = look.first; k < look.last; ++k)
        result.push_back({lane.copies[k].to - base, lane.copies[k].nbytes, sums[next++]});
  }
  return result;
}

}  // namespace zs
