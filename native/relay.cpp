#include "relay.hpp"

#include <algorithm>

#include "error.hpp"

namespace zs {
namespace {
constexpr uint64_t kPart = uint64_t{64}
                           << 20;  // a mark behind each: over NVLink one of 16 MiB is over in 43 us
constexpr uint64_t kAhead = 8;     // parts in flight: soon over when it is given up
}  // namespace

std::shared_ptr<Relay> Relay::begin(const Pool& pool, std::shared_ptr<Device> device, const Vault& vault,
                                    uint64_t at, CUdeviceptr peer,
                                    std::span<const std::pair<uint64_t, uint64_t>> runs) {
  auto lane = empty_lane();
  uint64_t last_end = 0;
  for (const auto& [offset, size] : runs) {
    if (offset < last_end || at > vault.nbytes() || offset > vault.nbytes() - at ||
        size > vault.nbytes() - at - offset)
      throw Error(Kind::usage, "the runs of an image rise and end within the vault's memory");
    last_end = offset + size;
    for (uint64_t from = offset; from < last_end; from += kPart)
      add(*lane, {vault.at() + at + from, peer + from, std::min(kPart, last_end - from)});
  }
  std::shared_ptr<Relay> job(new Relay(pool, {std::move(device), nullptr}, std::move(lane)));
  run(job);
  return job;
}

Relay::Relay(const Pool& pool, Training training, std::shared_ptr<Lane> lane)
    : Job(pool.workers(), lane->parts.size(), lane->parts.size()),
      training_(std::move(training)),
      lane_(std::move(lane)) {}

std::shared_ptr<Lane> Relay::empty_lane() {
  auto lane = std::make_shared<Lane>();
  lane->way = cuda::Way::from_peer;
  lane->ahead = kAhead;
  lane->pinned = true;
  return lane;
}

void Relay::add(Lane& lane, const cuda::Copy& copy) {
  if (lane.parts.empty() || lane.parts.back().name >= kPart) lane.open(0);
  lane.add(copy);
  lane.parts.back().name += copy.nbytes;  // what it is called is its number of bytes
}

void Relay::run(const std::shared_ptr<Relay>& job) {
  if (!job->lane_->parts.empty()) {
    job->lane_->landing = job.get();
    try {
      job->training_.device->begin(job->lane_, job->training_.stream, {}, cuda::Way::within, job);
    } catch (...) {
      job->cancel();
      throw;
    }
  }
  job->start();
}

void Relay::landed(std::span<const uint64_t> parts) noexcept {
  for (const uint64_t nbytes : parts) add_progress(nbytes);
  retire(parts.size());
}

void Relay::dropped(uint64_t parts, std::exception_ptr why) noexcept {
  fail(std::move(why));
  retire(parts);
}

uint64_t Relay::drop_kept() noexcept {
  return training_.device->drop(*lane_);
}

}  // namespace zs
