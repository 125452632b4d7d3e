#include "recall.hpp"

#include <algorithm>

#include "crc32c.hpp"
#include "error.hpp"

namespace zs {
namespace {

bool within(std::span<const std::pair<uint64_t, uint64_t>> runs, uint64_t offset, uint64_t nbytes) {
  const auto after = std::upper_bound(runs.begin(), runs.end(), offset,
                                      [](uint64_t at, const auto& run) { return at < run.first; });
  if (after == runs.begin()) return false;
  const auto& [begin, size] = *std::prev(after);
  return offset - begin <= size && nbytes <= size - (offset - begin);
}

}  // namespace

std::shared_ptr<Recall> Recall::begin(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays targets,
                                      std::vector<uint32_t> pieces, CUdeviceptr peer,
                                      std::span<const std::pair<uint64_t, uint64_t>> runs,
                                      Training training) {
  if (targets.data.size() != pieces.size()) throw Error(Kind::usage, "as many targets as pieces are needed");
  training.device->refuse_capturing(training.stream);
  auto lane = empty_lane();
  std::vector<uint32_t> taken;
  for (size_t k = 0; k < pieces.size(); ++k) {
    if (pieces[k] >= plan->pieces())
      throw Error(Kind::usage, "there is no piece " + std::to_string(pieces[k]) + " in the plan");
    const uint64_t offset = plan->offset(pieces[k]), size = plan->size(pieces[k]);
    const Geometry& geometry = (*targets.geometries)[k];
    if (size == 0 || targets.place(k) != training.device->ordinal() || !within(runs, offset, size)) continue;
    if (!geometry.contiguous() || geometry.nbytes != size)
      throw Error(Kind::usage, "target " + std::to_string(k) + " is strided, or not of its piece's size");
    taken.push_back(static_cast<uint32_t>(k));
    for (uint64_t at = offset; at < offset + size;) {
      const uint64_t next = std::min(offset + size, (at / plan->chunk_bytes() + 1) * plan->chunk_bytes());
      add(*lane, {reinterpret_cast<CUdeviceptr>(targets.data[k] + (at - offset)), peer + at, next - at});
      at = next;
    }
  }
  std::shared_ptr<Recall> job(
      new Recall(pool, std::move(plan), std::move(taken), peer, std::move(training), std::move(lane)));
  run(job);
  return job;
}

Recall::Recall(const Pool& pool, std::shared_ptr<const Plan> plan, std::vector<uint32_t> taken,
               CUdeviceptr peer, Training training, std::shared_ptr<Lane> lane)
    : Relay(pool, std::move(training), std::move(lane)),
      plan_(std::move(plan)),
      taken_(std::move(taken)),
      peer_(peer) {}

std::vector<uint64_t> Recall::bad(const std::byte* image, std::span<const uint32_t> checksums) const {
  if (!done() || cancelled()) throw Error(Kind::usage, "what has not arrived cannot be checked");
  if (checksums.size() != plan_->chunks())
    throw Error(Kind::usage, std::to_string(checksums.size()) + " checksums for " +
                                 std::to_string(plan_->chunks()) + " chunks");
  const std::vector<cuda::Copy>& copies = lane_->copies;
  if (copies.empty()) return {};
  std::vector<Probe::Run> runs;
  for (const cuda::Copy& copy : copies) runs.push_back({copy.to, copy.nbytes});
  const std::shared_ptr<Probes> probes = training_.device->probes();
  const std::shared_ptr<Probe> look = probes->probe(runs);
  look->launch(probes->stream());
  look->fetch(probes->stream());
  const std::vector<uint32_t> arrived = look->checksums();
  std::vector<uint64_t> found;
  for (size_t k = 0; k < copies.size();) {
    const uint64_t chunk = (copies[k].from - peer_) / plan_->chunk_bytes(), end = plan_->chunk_end(chunk);
    uint64_t at = plan_->chunk_begin(chunk);
    uint32_t value = 0;
    for (; k < copies.size() && copies[k].from - peer_ < end; ++k) {
      const uint64_t offset = copies[k].from - peer_;
      value = crc32c(image + at, offset - at, value);
      value = crc32c_combine(value, arrived[k], copies[k].nbytes);
      at = offset + copies[k].nbytes;
    }
    if (crc32c(image + at, end - at, value) != checksums[chunk]) found.push_back(chunk);
  }
  return found;
}

}  // namespace zs
